"""What an engine's own loaders have shown once they ran on a recorder: for `vllm_audit.py` and `sglang_audit.py`."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Literal

from torch import nn

from swiftlite.bridge.tensors import some
from swiftlite.engines.conventions import convention
from swiftlite.engines.served_model import ServedModel
from swiftlite.engines.weight_recorder import WeightRecorder


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


def unread(model: ServedModel, recorder: WeightRecorder) -> list[str]:
    """Keys that went nowhere; neither what follows from the config nor the copies that tied models have."""
    copies = {copy for row in model.family.rows(model.hf_config) for copy in row.hf_copies}
    return sorted(key for key in recorder.keys - recorder.used - copies if not model.family.is_derived(key))


def unknown_class(engine: Literal["vllm", "sglang"], model: ServedModel, draft: nn.Module | None) -> list[str]:
    """A word on a draft class that is not the one of the table of conventions."""
    known = convention(engine, model.family.name)
    if draft is None or type(draft).__name__ == known.draft:
        return []
    return [f"swiftlite knows {known.draft} here, not {type(draft).__name__}: how it drafts has not been measured"]
