"""What a dry load found: the report, and how it is read from a recorder on which an engine's own loaders ran."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from torch import nn

from swiftlite.bridge.tensors import some
from swiftlite.engines.info import EngineInfo
from swiftlite.engines.served_model import ServedModel
from swiftlite.engines.weight_recorder import WeightRecorder


@dataclass(frozen=True)
class LoadReport:
    """What an engine makes of a checkpoint.

    Attributes:
        engine: name and version.
        target: class that serves the trunk; None when it was not reached.
        draft: class that drafts; None when none does.
        num_mtp_heads: MTP heads that config.json promises.
        num_drafting: how many of them draft.
        verdict: what was found out when there is no problem.
        problems: why serving would be wrong, one line each.
        notes: what is worth knowing and is not wrong.
    """

    engine: str
    target: str | None
    draft: str | None
    num_mtp_heads: int
    num_drafting: int
    verdict: str = "every tensor has its place, every parameter its numbers"
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


class LoadError(Exception):
    """An engine's own objection, with the stage it came at."""


@contextmanager
def stage(words: str) -> Iterator[None]:
    """Says what was being done when an engine objected.

    Raises:
        LoadError: instead of whatever is raised inside.
    """
    try:
        yield
    except Exception as error:  # whatever it is, it would have ended the engine's start
        lines = str(error).strip().splitlines() or [""]
        raise LoadError(f"{words}: {type(error).__name__}: " + "\n      ".join(some(lines))) from error


def unfilled(recorder: WeightRecorder, model: nn.Module, shared: Iterable[str] = ()) -> list[str]:
    """Parameters that the loader left as they were.

    Args:
        shared: ends of names of those that the target gives to the draft afterwards.
    """
    name = type(model).__name__
    return some(
        f"{name} is left with {count} random numbers in {parameter}"
        for parameter, count in recorder.unfilled(model).items()
        if not parameter.endswith(tuple(shared))
    )


def unread(info: EngineInfo, model: ServedModel, recorder: WeightRecorder) -> list[str]:
    """Keys that went nowhere; neither what follows from the config nor the copies that tied models have."""
    copies = {copy for row in model.family.rows(model.hf_config) for copy in row.hf_copies}
    keys = recorder.keys - recorder.used - copies
    left = sorted(key for key in keys if not model.family.is_derived(key))
    return [f"no class of {info.label} reads {key}" for key in some(left)]


def drafts_for_itself(target: nn.Module) -> str:
    """The problem of a target whose draft is the target again."""
    return (
        f"the target drafts for itself: the draft is another {type(target).__name__} of the same directory, so every "
        "draft is accepted and none is cheaper"
    )


def unknown_class(info: EngineInfo, model: ServedModel, draft: nn.Module | None) -> list[str]:
    """A note on a draft class other than the one whose convention was measured."""
    if draft is None:
        return []
    known = info.convention_for(model.family)
    if type(draft).__name__ == known.draft:
        return []
    return [f"swiftlite knows {known.draft} here, not {type(draft).__name__}: how it drafts has not been measured"]
