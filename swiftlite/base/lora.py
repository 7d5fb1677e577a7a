"""Describe LoRA settings as one value: the linear layers with low-rank adapters, and the scaling of the adapters.

A layer with weight W computes W x + scaling * B A x, with A [rank, in] and B [out, rank]. With DoRA, each row of W +
scaling * B A is scaled to a trained norm, the row's magnitude. Layers are specified by their Hugging Face names as in
PEFT: `q_proj`, or a longer suffix of the full name that starts after a dot.
"""

from dataclasses import dataclass
from math import sqrt
from typing import Annotated, Literal

from annotated_types import Interval  # not pydantic, for which --help would wait

ALL_LINEAR = "all-linear"
"""Value of `targets` that selects every linear layer except the output layer."""
PART = ".adapter."
"""Part of the Megatron name of every adapter parameter, and of no other parameter."""
HeadsTuner = Literal["full", "lora", "frozen"]


@dataclass(frozen=True)
class Lora:
    """LoRA settings of a model.

    Attributes:
        rank: rows of A and columns of B.
        alpha: the scaling of adapters is alpha / rank.
        dropout: share of an adapter's inputs that are zeroed in training.
        is_rank_stabilized: whether the scaling is alpha / sqrt(rank) instead.
        has_magnitudes: whether the lengths of the rows of W + scaling * B A are trained (DoRA).
        targets: layers that get an adapter, or ALL_LINEAR.
        saved: modules of the trunk that are trained in full, in addition to the adapters.
        on_trunk: whether the trunk gets adapters.
        heads: how MTP heads are trained.
    """

    rank: Annotated[int, Interval(ge=1)]
    alpha: Annotated[float, Interval(gt=0)]
    dropout: Annotated[float, Interval(ge=0, lt=1)] = 0.0
    is_rank_stabilized: bool = False
    has_magnitudes: bool = False
    targets: tuple[str, ...] = (ALL_LINEAR,)
    saved: tuple[str, ...] = ()
    on_trunk: bool = True
    heads: HeadsTuner = "full"

    @property
    def scaling(self) -> float:
        """Factor of B A x."""
        if self.is_rank_stabilized:
            return self.alpha / sqrt(self.rank)
        return self.alpha / self.rank

    def adapts(self, module: str) -> bool:
        """Return whether a linear layer gets an adapter.

        Args:
            module: full Hugging Face name of the layer, such as `model.layers.0.self_attn.q_proj`.
        """
        return ALL_LINEAR in self.targets or is_named(module, self.targets)

    def saves(self, module: str) -> bool:
        """Return whether a module of the trunk is trained in full."""
        return is_named(module, self.saved)


def is_named(module: str, names: tuple[str, ...]) -> bool:
    """Return whether one of `names` is the module's full name, or a suffix of this name that starts after a dot, as in
    PEFT.
    """
    return any(module == name or module.endswith(f".{name}") for name in names)


def is_adapter(mcore_name: str) -> bool:
    """Return whether a parameter belongs to an adapter."""
    return PART in mcore_name
