"""Rules of `megatron sft --report_to`."""

import importlib.util
from collections.abc import Iterator

from swiftlite.args.commands import SftArgs
from swiftlite.args.config import Problem, near
from swiftlite.plan.facts import Facts
from swiftlite.train.metrics.trackers import TRACKERS


def report_to_can_be(args: SftArgs, facts: Facts) -> Iterator[Problem]:
    known = ("tensorboard", *TRACKERS)
    text = " ".join(args.report_to)
    for name in args.report_to:
        if name not in known:
            hint = f"use {', '.join(known)}"
            if suggestion := near(name, known):
                hint = f"did you mean {suggestion}?"
            if name == "none":
                hint = "use none alone: --report_to none"
            yield f"--report_to {text}: unknown tracker {name}", hint
        elif name in TRACKERS and not _is_installed(name):
            yield f"--report_to {name}: the {name} package is not installed", f"pip install {name}"
    if vars(args).get("log_completions") and "swanlab" in args.report_to and not _is_installed("pyecharts"):
        yield "--log_completions: tables in SwanLab require pyecharts, which is not installed", "pip install pyecharts"
    if len(set(args.report_to)) < len(args.report_to):
        yield f"--report_to {text} contains a tracker twice", "give each tracker once"


def _is_installed(package: str) -> bool:
    """Return whether a package is installed. A directory of the same name, such as wandb's runs, does not count."""
    spec = importlib.util.find_spec(package)
    return spec is not None and spec.origin is not None
