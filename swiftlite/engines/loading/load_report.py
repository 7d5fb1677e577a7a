"""Define the report of a dry load and build it while an engine's own loaders run on a recorder."""

import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch import nn

from swiftlite.bridge.tensors import Checkpoint, some
from swiftlite.engines.info import EngineInfo
from swiftlite.engines.loading.load_tracker import DryLoad
from swiftlite.engines.served_model import fed_otherwise
from swiftlite.families.resolved import HfModel


@dataclass(frozen=True)
class LoadReport:
    """The result of loading a checkpoint in an engine.

    Attributes:
        engine: name and version.
        target: class of the trunk; None if it was not reached.
        draft: class of the draft; None without drafts.
        num_mtp_heads: number of MTP heads in config.json.
        num_drafting: number of heads that draft.
        verdict: summary if there is no problem.
        problems: reasons why serving would be wrong, one line each.
        notes: further information.
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


@dataclass
class Loading:
    """A dry load under way: what an engine's own loaders have made of a checkpoint so far.

    Attributes:
        target, draft: the models that were built and filled.
        problems: as in the report.
    """

    info: EngineInfo
    model: HfModel
    target: nn.Module | None = None
    draft: nn.Module | None = None
    problems: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.recorder = DryLoad(Checkpoint(self.model.directory).stored)

    @contextmanager
    def until_it_objects(self) -> Iterator[None]:
        """Record errors of the engine as problems; without errors, record unread tensors."""
        try:
            yield
        except LoadError as error:
            self.problems.append(str(error))
            return
        if self.model.heads.layers == 0 or self.draft is not None:
            self.problems += self._unread()

    def fill(self, name: str, build: Callable[[], Any], not_loaded: Iterable[str] = ()) -> nn.Module:
        """Record unfilled parameters of a model that the engine built and loaded on the meta device.

        Args:
            name: name of its class in the engine.
            not_loaded: suffixes of parameters that are filled from the target or by default.
        """
        label = self.info.label
        with torch.device("meta"):
            with stage(f"{label} cannot build {name}"):
                filled = build()
            class_name = type(filled).__name__
            with stage(f"{label}'s {class_name} stops at the checkpoint"), self.recorder:
                filled.load_weights(self.recorder.weights())
        self.problems += some(
            f"{class_name} is left with {count} random numbers in {parameter}"
            for parameter, count in self.recorder.unfilled(filled, not_loaded).items()
        )
        return filled

    def note_that_target_drafts_for_itself(self) -> None:
        """The draft is the target again."""
        self.problems.append(
            f"the target drafts for itself: the draft is another {type(self.target).__name__} of the same directory, "
            "so every draft is accepted and none is cheaper"
        )

    def report(self, version: str, num_drafting: int) -> LoadReport:
        """All of it.

        Args:
            version: the engine's.
        """
        return LoadReport(
            engine=f"{self.info.name} {version}",
            target=self.target and type(self.target).__name__,
            draft=self.draft and type(self.draft).__name__,
            num_mtp_heads=self.model.heads.layers,
            num_drafting=num_drafting,
            problems=self.problems,
            notes=[*self._unknown_class(), *self._other_version(version), *self._fed_otherwise()],
        )

    def _unread(self) -> list[str]:
        """Keys that went nowhere; neither what follows from the config nor the copies that tied models have."""
        family = self.model.family
        copies = chain.from_iterable(row.hf_copies for row in family.rows(self.model.config))
        keys = (self.recorder.keys - self.recorder.used).difference(copies)
        left = sorted(key for key in keys if not family.is_derived(key) and not family.is_carried(key))
        return [f"no class of {self.info.label} reads {key}" for key in some(left)]

    def _other_version(self, version: str) -> list[str]:
        """A note on a version whose conventions may be others: engines change them without a word."""
        measured = self.info.measured
        if self.draft is None or version.startswith(measured):
            return []
        return [
            f"how {self.info.label} drafts was measured with {measured.rstrip('.')}, here is {version}: compare what "
            "swiftlite evaluate counts with what the engine counts before you trust its drafts"
        ]

    def _fed_otherwise(self) -> list[str]:
        """A note on heads that were trained on something else than the engine feeds them."""
        note = fed_otherwise(self.model, self.info) if self.draft else ""
        return [note] if note else []

    def _unknown_class(self) -> list[str]:
        """A note on a draft class other than the one whose convention was measured."""
        if self.draft is None:
            return []
        known = self.info.convention_for(self.model.family).draft
        found = type(self.draft).__name__
        if found == known:
            return []
        return [f"swiftlite knows {known} here, not {found}: how it drafts has not been measured"]


@contextmanager
def one_rank(distributed: Any) -> Iterator[None]:
    """Process groups of a single rank. It holds all of a model; which part of a tensor a rank has is not in question.

    Args:
        distributed: vLLM's module of that name, or SGLang's, which has its functions.
    """
    with tempfile.TemporaryDirectory() as folder:
        distributed.init_distributed_environment(1, 0, f"file://{folder}/store", 0, "gloo")
        try:
            distributed.initialize_model_parallel()  # groups for experts too, where the model has some
            yield
        finally:
            distributed.destroy_model_parallel()
            distributed.destroy_distributed_environment()
