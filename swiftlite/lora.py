"""Low-rank adapters (LoRA) as one value: which linear layers get one, and what it does to them.

A layer with weight W computes W x + scaling * B A x, with A [rank, in] and B [out, rank]. With DoRA each row of
W + scaling * B A is given a length that is learned, its magnitude. Names of layers are Hugging
Face's, as PEFT takes them: `q_proj`, or as much of a whole name as is wanted.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import sqrt
from typing import Any, Literal

ALL_LINEAR = "all-linear"
"""Every linear layer but the output layer."""
PART = ".adapter."
"""In the Megatron name of every parameter that an adapter has, and of no other."""
HeadsTuner = Literal["full", "lora", "frozen"]


@dataclass(frozen=True)
class Lora:
    """Adapters of a model.

    Attributes:
        rank: rows of A and columns of B.
        alpha: weight of the adapters before it is divided by the rank, or by its root.
        dropout: share of the numbers that an adapter takes in which are zero, in training.
        is_rank_stabilised: whether the weight is divided by the root of the rank.
        has_magnitudes: whether the rows of the sum have lengths that are learned, DoRA.
        targets: layers that get an adapter, or ALL_LINEAR.
        saved: modules of the trunk that learn in full beside them.
        on_trunk: whether the trunk gets adapters.
        heads: how MTP heads learn.
    """

    rank: int
    alpha: float
    dropout: float = 0.0
    is_rank_stabilised: bool = False
    has_magnitudes: bool = False
    targets: tuple[str, ...] = (ALL_LINEAR,)
    saved: tuple[str, ...] = ()
    on_trunk: bool = True
    heads: HeadsTuner = "full"

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> "Lora":
        """Of `dataclasses.asdict`, once it has been JSON."""
        return cls(**{**content, "targets": tuple(content["targets"]), "saved": tuple(content["saved"])})

    @property
    def scaling(self) -> float:
        """What B A x is multiplied by."""
        return self.alpha / (sqrt(self.rank) if self.is_rank_stabilised else self.rank)

    def adapts(self, module: str) -> bool:
        """Whether a linear layer gets an adapter.

        Args:
            module: its whole Hugging Face name, `model.layers.0.self_attn.q_proj`.
        """
        return ALL_LINEAR in self.targets or is_named(module, self.targets)

    def saves(self, module: str) -> bool:
        """Whether a module of the trunk learns in full."""
        return is_named(module, self.saved)


def is_named(module: str, names: tuple[str, ...]) -> bool:
    """Whether a module has one of these names, whole or from a dot on, as PEFT compares them."""
    return any(module == name or module.endswith(f".{name}") for name in names)


def is_adapter(mcore_name: str) -> bool:
    """Whether a parameter belongs to an adapter."""
    return PART in mcore_name
