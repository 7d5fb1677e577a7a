"""Verify the files of checkpoints, and find the newest whole checkpoint of a run."""

import itertools
import pickle
from pathlib import Path
from typing import Any

import torch.distributed as dist

from swiftlite.base.errors import UserError
from swiftlite.base.log import logger
from swiftlite.bridge.tensors import some
from swiftlite.plan.facts import run_checkpoints
from swiftlite.runtime.decisions import record_decision
from swiftlite.runtime.progress import num_restarts
from swiftlite.store.manifest import MANIFEST_FILE, changed_files, read_manifest
from swiftlite.store.run_store import fetch_newest
from swiftlite.train.checkpoint.metadata import check_metadata
from swiftlite.train.checkpoint.state import STATE_FILE, CheckpointState

DAMAGED = ".damaged"
"""Suffix of the name of a damaged checkpoint, which no command uses by itself."""


def damage_of(checkpoint: Path) -> str:
    """Return how a checkpoint is damaged, the same on every rank; empty if it is whole. Collective.

    The first rank reads the list of files. Each rank verifies the digests of some of them.
    """
    listed: list[Any] = [None, None]
    if dist.get_rank() == 0:
        listed = list(_listed_files(checkpoint))
    dist.broadcast_object_list(listed)
    digests, problem = listed
    if problem:
        return problem
    mine: list[str] = []
    if checkpoint.is_dir():  # see `newest_whole_checkpoint`
        mine = sorted(digests)[dist.get_rank() :: dist.get_world_size()]
    changed: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(changed, changed_files(checkpoint, digests, mine))
    names = sorted(itertools.chain.from_iterable(changed))
    if not names:
        return ""
    return f"the sha256 differs for {', '.join(some(names, 5))}"


def _listed_files(checkpoint: Path) -> tuple[dict[str, str], str]:
    """Return the digests in SHA256SUMS, and what is wrong with the list."""
    try:
        digests = read_manifest(checkpoint)
    except ValueError as error:
        return {}, str(error)
    if digests is None:
        return {}, _damage_without_digests(checkpoint)
    # A list that was cut off would leave files unverified.
    needed = {".metadata", "common.pt", STATE_FILE, *(path.name for path in checkpoint.glob("*.distcp"))}
    if unlisted := sorted(needed - digests.keys()):
        return {}, f"{MANIFEST_FILE} lacks {', '.join(some(unlisted, 5))}"
    return digests, ""


def _damage_without_digests(checkpoint: Path) -> str:
    """Return how a checkpoint without SHA256SUMS is damaged.

    Checkpoints without a version may lack the list. Their files are checked for their sizes.
    """
    try:
        if CheckpointState.has_version(checkpoint) or _an_older_one_has_digests(checkpoint):
            return f"{MANIFEST_FILE} is missing"
        CheckpointState.read(checkpoint)
        check_metadata(checkpoint)
    # No damage: the files may be whole.
    except PermissionError:
        raise
    except UserError as error:
        return error.problem
    except (OSError, ValueError, pickle.UnpicklingError) as error:
        return str(error)
    logger.warning(
        "%s has no %s, as in the first releases: only the sizes of its files are verified", checkpoint, MANIFEST_FILE
    )
    return ""


def _an_older_one_has_digests(checkpoint: Path) -> bool:
    checkpoints = run_checkpoints(checkpoint.parent)
    older = itertools.takewhile(lambda path: path.name != checkpoint.name, checkpoints)
    return any((path / MANIFEST_FILE).exists() for path in older)


def newest_whole_checkpoint(run: Path, store: str | None) -> Path | None:
    """Return the newest checkpoint of a run whose files are whole, the same on every rank. Collective.

    Damaged ones are renamed. If the store has a newer one than the next checkpoint of the directory, it is fetched.

    Args:
        store: value of --checkpoint_store.

    Returns:
        None if the run has no checkpoint yet, or if the launcher restarts a run whose checkpoints are all damaged.

    Raises:
        UserError: all checkpoints are damaged.
    """
    damaged: dict[str, str] = {}  # how they are damaged, by name
    while (name := _newest_name(run)) and (problem := damage_of(run / name)):
        if dist.get_rank() == 0:
            renamed = _set_aside(run / name)
            if store is not None and name not in damaged:  # otherwise this disk has damaged the fetched one as well
                fetch_newest(run, store, is_running=True)
            damaged[name] = f"{name} was renamed to {renamed.name}, because {problem}"
    if dist.get_rank() == 0:
        _record(run, name, damaged)
    if not name:
        _check_can_begin(run)
    if not name or not (run / name).is_dir():  # a node with another file system, which `check_ranks_agree` reports
        return None
    return run / name


def _newest_name(run: Path) -> str:
    """Return the name of the newest checkpoint that the first rank sees; empty without one. Collective."""
    newest = [""]
    if dist.get_rank() == 0 and (checkpoints := run_checkpoints(run)):
        newest = [checkpoints[-1].name]
    dist.broadcast_object_list(newest)
    return newest[0]


def _set_aside(checkpoint: Path) -> Path:
    """Rename a damaged checkpoint, from which a person may still need something; return its new path."""
    for number in itertools.count(1):
        suffix = DAMAGED if number == 1 else f"{DAMAGED}-{number}"
        path = checkpoint.with_name(checkpoint.name + suffix)
        if not path.exists():
            return checkpoint.rename(path)
    raise AssertionError


def _record(run: Path, chosen: str, damaged: dict[str, str]) -> None:
    """Record a decision for each damaged checkpoint."""
    step = _step_of(chosen) if chosen else 0
    for name, problem in damaged.items():
        source = chosen or "its first step"
        if chosen == name:
            source = "its copy in the store"
        decision = f"{problem}; the run continues from {source}"
        record_decision(run, step, "damaged_checkpoint", decision, lost_steps=_step_of(name) - step)


def _step_of(name: str) -> int:
    return int(name.removeprefix("checkpoint-"))


def _check_can_begin(run: Path) -> None:
    """Check that a run without a checkpoint may start from its first step. Collective.

    A launcher may restart a run whose checkpoints are all damaged. A person decides in all other cases.

    Raises:
        UserError: all checkpoints are damaged.
    """
    names = [sorted(path.name for path in run.glob(f"checkpoint-*{DAMAGED}*"))]
    # As seen by the first rank: a node with another file system must decide alike.
    dist.broadcast_object_list(names)
    if names[0] and not num_restarts():
        raise UserError(
            f"--resume: {run} has no whole checkpoint; damaged: {', '.join(some(names[0], 5))}",
            "restore one from a backup under the name checkpoint-N; or move the damaged ones elsewhere, and the run "
            "starts from its first step",
        )
