"""Describe the trunk of a run: where its output comes from, and what exports take from files. Does not import torch.

    trunk       decoder layers                    output in a step            exports take from --model
    computed    in the model                      computed                    nothing
    cached      in the model                      computed once (`cache`)     nothing
    streamed    in files (not `holds_layers`)     cached before all steps     the decoder layers
    quantized   in the model, decoded             computed, or cached         all files (`keeps_files`)

The last three require a frozen trunk (`Trainable.freezes_trunk`). `model/trunk.py` computes and reads the outputs.
"""

from dataclasses import dataclass
from typing import Any

from swiftlite.args.commands import SftArgs
from swiftlite.args.fields import MtpArgs
from swiftlite.base.errors import UserError
from swiftlite.families.tower import Tower


@dataclass(frozen=True)
class Trunk:
    """The trunk of a run.

    Attributes:
        holds_layers: whether the model has the decoder layers. Otherwise they are read from the files of --model.
        keeps_files: whether exports keep the files of a quantized trunk.
        cache: directory of the outputs; None: each step computes them.
        waiting_gb: memory in GB for hidden states that wait between layers which are read.
    """

    holds_layers: bool = True
    keeps_files: bool = False
    cache: str | None = None
    waiting_gb: float = MtpArgs.stream_trunk_gb

    @classmethod
    def of(cls, args: SftArgs, *, keeps_files: bool = False) -> "Trunk":
        """Return the trunk that the options select."""
        return cls(not args.stream_trunk, keeps_files, args.cache_trunk_states, args.stream_trunk_gb)

    @property
    def is_in_base(self) -> bool:
        """Whether exports take tensors of the trunk from the model that the run started from."""
        return not self.holds_layers or self.keeps_files

    def to_state(self) -> dict[str, Any]:
        """Fields of `CheckpointState`."""
        return {"streams_trunk": not self.holds_layers, "quantized_trunk": self.keeps_files}

    @property
    def lines(self) -> list[tuple[str, str]]:
        """Lines of --dry_run, as (name, text)."""
        if self.holds_layers:
            return []
        return [("trunk", f"read layer by layer, its states are written to {self.cache}")]

    @property
    def run_words(self) -> str:
        """Name of the run in error messages."""
        return "the run" if self.holds_layers else "the run with --stream_trunk"

    @property
    def lost_base_hint(self) -> str:
        """Hint of the error that an export does not find the model that the run started from."""
        if self.keeps_files:
            return "restore the directory: the export keeps the files of the quantized trunk"
        return "restore the directory: a run with --stream_trunk does not store decoder layers"

    def check_weights_can_be_sent(self) -> None:
        """Check that the run has the whole model after each step, as `after_step` requires.

        Raises:
            UserError: the model has no decoder layers.
        """
        if not self.holds_layers:
            raise UserError("after_step is not supported with --stream_trunk", "remove one of the two")

    def check_tower(self, tower: Tower | None, model_type: str) -> None:
        """Check that the decoder layers support the tower of a run whose rows have images.

        Raises:
            UserError: decoder layers add outputs of the tower, and --stream_trunk reads them layer by layer.
        """
        if not self.holds_layers and tower is not None and tower.num_deepstack:
            problem = f"--stream_trunk does not support images with model_type {model_type!r}"
            raise UserError(problem, "omit --stream_trunk")
