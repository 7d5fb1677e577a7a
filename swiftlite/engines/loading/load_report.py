"""Define the report of a dry load, and build it. A dry load runs an engine's own loaders without reading tensors."""

import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import nn

from swiftlite.base.heads import MTP
from swiftlite.bridge.entry import Entry
from swiftlite.bridge.hf_config import HEADS_FILE, own_prefix
from swiftlite.bridge.tensors import Checkpoint, scan, some
from swiftlite.engines.info import EngineInfo
from swiftlite.engines.loading.head_weights import OF_ORDER
from swiftlite.engines.loading.load_tracker import DryLoad
from swiftlite.engines.served_model import fed_otherwise
from swiftlite.families.resolved import HfModel


def other_version(info: EngineInfo, version: str) -> str:
    """Return a note if conventions were measured with another version of the engine, because they can differ; "" if
    not.
    """
    if version.startswith(info.measured):
        return ""
    return (
        f"head inputs of {info.label} were measured with version {info.measured.rstrip('.')}, installed is {version}: "
        "compare the counts of swiftlite evaluate with those of the engine"
    )


@dataclass(frozen=True)
class LoadReport:
    """The result of loading a checkpoint in an engine.

    Attributes:
        engine: name and version.
        target: class of the trunk in the engine; None if an error occurred before the class was known.
        draft: class of the draft model in the engine; None without drafts.
        num_mtp_heads: number of MTP heads in config.json; 0 with another drafter.
        num_drafting: number of these heads that draft.
        sees_images: whether the engine passes the features of images to the draft model; otherwise the heads read the
            embeddings of placeholders. None without images or drafts, or if it is unknown.
        draft_modules: which modules of the draft were built quantized; "" if the model is not quantized.
        verdict: summary, used if there is no problem.
        problems: problems that make serving incorrect, one line each.
        notes: further information.
    """

    engine: str
    target: str | None
    draft: str | None
    num_mtp_heads: int
    num_drafting: int
    sees_images: bool | None = None
    draft_modules: str = ""
    verdict: str = "all tensors are read, all parameters are initialized"
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


class LoadError(Exception):
    """An engine's own error, with the stage at which it was raised."""


@contextmanager
def stage(words: str) -> Iterator[None]:
    """Convert errors of an engine to a `LoadError` that names the current stage.

    Raises:
        LoadError: an exception was raised inside the context.
    """
    try:
        yield
    except Exception as error:  # any exception would stop the engine
        lines = str(error).strip().splitlines() or [""]
        raise LoadError(f"{words}: {type(error).__name__}: " + "\n      ".join(some(lines))) from error


@dataclass
class Loading:
    """The state of a dry load: models and problems so far.

    Attributes:
        draft_folder: directory that has the tensors of the draft model, if the engine reads it instead of those of the
            heads.
        target, draft: the models that were built and filled.
        problems: problems that make serving incorrect, one line each, as in `LoadReport`.
    """

    info: EngineInfo
    model: HfModel
    draft_folder: Path | None = None
    target: nn.Module | None = None
    draft: nn.Module | None = None
    problems: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        stored = Checkpoint(self.model.directory).stored
        self._of_draft: Mapping[str, Entry] = {}
        self._prefix = ""
        if self.draft_folder is not None:
            # Names of an assistant's tensors are names of the trunk's tensors as well.
            self._prefix = own_prefix(self.draft_folder)
            of_draft, problems = scan(self.draft_folder)
            self._of_draft = {self._prefix + key: entry for key, entry in of_draft.items()}
            self.problems += [f"{self.draft_folder.name}/: {problem}" for problem in problems]
            stored = {key: entry for key, entry in stored.items() if entry.file != HEADS_FILE}
        self.recorder = DryLoad({**stored, **self._of_draft})

    @contextmanager
    def until_it_objects(self) -> Iterator[None]:
        """Record an error of the engine in this context as a problem; without an error, record the unread tensors."""
        try:
            yield
        except LoadError as error:
            self.problems.append(str(error))
            return
        self.problems += some(self.recorder.cast_problems())
        # Without a draft model, tensors of heads are unread on purpose.
        if self.model.heads.layers == 0 or self.draft is not None:
            self.problems += self._unread()

    def fill(self, name: str, build: Callable[[], Any], not_loaded: Iterable[str] = ()) -> nn.Module:
        """Let the engine build and load a model on the meta device, and record the unfilled parameters.

        Args:
            name: the model's class in the engine, for errors.
            not_loaded: name endings of parameters that the checkpoint does not fill, such as parameters shared with the
                target.
        """
        label = self.info.label
        with torch.device("meta"):
            with stage(f"{label} cannot build {name}"):
                filled = build()
            class_name = type(filled).__name__
            with stage(f"{label}'s {class_name} cannot load the checkpoint"), self.recorder:
                filled.load_weights(self._weights(is_draft=self.target is not None))
        self.problems += some(
            f"{class_name}: {count} uninitialized elements in {parameter}"
            for parameter, count in self.recorder.unfilled(filled, not_loaded).items()
        )
        return filled

    def _weights(self, *, is_draft: bool) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (HF key, tensor) for the target or for the draft model, which is loaded after it."""
        for key, tensor in self.recorder.weights():
            # Otherwise both models are built from one directory, and each takes the tensors that it knows.
            if not self._of_draft or (key in self._of_draft) == is_draft:
                yield key.removeprefix(self._prefix), tensor

    def note_that_target_drafts_for_itself(self) -> None:
        """Record the problem that the engine uses the target as its draft model."""
        self.problems.append(
            f"the draft model is the target itself ({type(self.target).__name__} of the same directory): all drafts "
            "are accepted, but drafting is not faster"
        )

    def report(self, version: str, num_drafting: int, sees_images: bool | None = None) -> LoadReport:
        """Return the report.

        Args:
            version: version of the engine.
            num_drafting, sees_images: as in `LoadReport`.
        """
        heads = self.model.heads
        num_mtp_heads = heads.layers if heads.kind == MTP else 0
        return LoadReport(
            engine=f"{self.info.name} {version}",
            target=self.target and type(self.target).__name__,
            draft=self.draft and type(self.draft).__name__,
            num_mtp_heads=num_mtp_heads,
            num_drafting=num_drafting,
            sees_images=sees_images,
            draft_modules=self._draft_modules(),
            problems=self.problems,
            notes=self._notes(version),
        )

    def _unread(self) -> list[str]:
        """Return a problem (one line) for each tensor that was not read. Derived tensors and copies do not count."""
        family, hf_config = self.model.family, self.model.config
        # Engines may skip a copy, because they read the original.
        copies = chain.from_iterable(row.hf_copies for row in family.rows(hf_config))
        keys = (self.recorder.keys - self.recorder.used).difference(copies)
        left = sorted(
            key
            for key in keys
            if not (family.is_derived(key) or family.is_carried(hf_config, key) or key.endswith(OF_ORDER))
        )
        return [f"{self.info.label} does not read {key}" for key in some(left)]

    def _draft_modules(self) -> str:
        """Return which modules of the draft model were built quantized; "" if the model is not quantized."""
        if self.draft is None or not self.model.is_quantized:
            return ""
        quantized: list[str] = []
        plain: list[str] = []
        for name, module in self.draft.named_modules():
            method = type(getattr(module, "quant_method", None)).__name__
            # Engines also use torch's Linear for projections, which has no quant_method.
            if isinstance(module, nn.Linear) or method in _PLAIN_METHODS:
                plain.append(name)
            elif method.endswith(("LinearMethod", "MoEMethod")):
                quantized.append(name)
        texts = [f"{label}: {_short(names)}" for label, names in (("quantized", quantized), ("plain", plain)) if names]
        return "; ".join(texts)

    def _notes(self, version: str) -> list[str]:
        """Return notes if the draft's class or the engine's version is not the measured one, or if the inputs of the
        heads differ from those in training."""
        if self.draft is None:
            return []
        notes = [other_version(self.info, version), fed_otherwise(self.model, self.info)]
        if self.model.heads.kind == MTP:
            known, found = self.info.convention_for(self.model.family).draft, type(self.draft).__name__
            if found != known:
                notes.insert(0, f"the draft class is {found}, but head inputs were measured with {known}")
        return list(filter(None, notes))


_PLAIN_METHODS = ("UnquantizedLinearMethod", "UnquantizedFusedMoEMethod")


def _short(names: Iterable[str]) -> str:
    """Return the last components of module names, each once."""
    return ", ".join(dict.fromkeys(name.rpartition(".")[2] for name in names))


@contextmanager
def one_rank(distributed: Any) -> Iterator[None]:
    """Create process groups of a single rank, which holds the complete model.

    Args:
        distributed: the module `distributed` of vLLM or SGLang.
    """
    with tempfile.TemporaryDirectory() as folder:
        # A store in a file, because a port could be taken by another process.
        distributed.init_distributed_environment(1, 0, f"file://{folder}/store", 0, "gloo")
        try:
            distributed.initialize_model_parallel()  # also creates groups of experts, if any
            yield
        finally:
            distributed.destroy_model_parallel()
            distributed.destroy_distributed_environment()
