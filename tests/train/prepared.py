"""Prepare a training run up to its first step."""

from swiftlite.args.commands import SftArgs
from swiftlite.families.resolved import resolve_options
from swiftlite.runtime.mesh import Mesh
from swiftlite.train import phases
from swiftlite.train import run as training


def prepare(args: SftArgs, mesh: Mesh) -> phases.Run:
    """Call `run.prepare` with the models that the options name."""
    return training.prepare(args, mesh, resolve_options(args))
