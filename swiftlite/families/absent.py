"""Define the missing half of a decoder layer that has only attention, or only an MLP, as in Nemotron-H.

The missing half has no parameters and no norm, and its output is not added to the state.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

from swiftlite.bridge.rows import Row
from swiftlite.families.linear_attention import WithoutPairs
from swiftlite.families.rank import ParameterCount, Rank


@dataclass(frozen=True)
class _Absent:
    """A half with nothing to compute, to store or to split."""

    recompute_modules: ClassVar[tuple[str, ...]] = ()
    needs_sequence_parallel: ClassVar[str] = ""
    layer_arguments: ClassVar[tuple[str, ...]] = ()

    @property
    def tensor_split(self) -> dict[str, int]:
        return {}

    def mcore_config(self) -> dict[str, Any]:
        return {}

    def rows(self) -> list[Row]:
        return []

    def parameters(self, rank: Rank) -> ParameterCount:
        return ParameterCount()

    def macs_per_token(self) -> int:
        return 0

    def input_activation_bytes(self, rank: Rank) -> int:
        return 0

    def activation_bytes(self, rank: Rank) -> int:
        return 0


@dataclass(frozen=True)
class NoAttention(_Absent, WithoutPairs):
    """The attention of a layer that has only an MLP.

    Attributes:
        hidden: size of the model's states.
    """

    is_recurrent: ClassVar[bool] = False

    hidden: int

    def gathered(self, rank: Rank) -> int:
        return 0


@dataclass(frozen=True)
class NoMlp(_Absent):
    """The MLP of a layer that has only attention."""

    norms_input: ClassVar[bool] = True
    experts = 0
    topk = 0
    splits_experts = False

    @property
    def expert_split(self) -> dict[str, int]:
        return {}
