"""The matrix products of a decoder layer on a rank, and how long each takes."""

from collections.abc import Iterator
from dataclasses import dataclass

from swiftlite.families.layer import Layer
from swiftlite.families.rank import Rank
from swiftlite.plan.adapters import is_split_by_columns
from swiftlite.plan.gpus import Gpu
from swiftlite.plan.timing import memory_seconds, product_seconds

_STACK_BYTES = 4
"""Bytes moved for each weight of experts to stack them for one product, forward and again backward. Counted."""


@dataclass(frozen=True)
class Product:
    """A linear layer's product on a rank.

    Attributes:
        module: what --recompute_modules calls the part that it belongs to; empty for none.
        number: how often there is one like it.
        is_grouped: whether those are one kernel.
    """

    tokens: float
    size_out: int
    size_in: int
    module: str = ""
    number: int = 1
    is_grouped: bool = False

    @property
    def weights(self) -> int:
        """Numbers in the matrices."""
        return self.number * self.size_out * self.size_in

    def forward(self, gpu: Gpu) -> float:
        """Seconds of the forward pass."""
        return self._seconds(gpu, self.tokens, self.size_out, self.size_in) + self._stacking(gpu)

    def backward(self, gpu: Gpu, learns: bool = True) -> float:
        """Seconds of the gradients of inputs, and of weights that learn."""
        seconds = self._seconds(gpu, self.tokens, self.size_in, self.size_out) + self._stacking(gpu)
        if learns:
            seconds += self._seconds(gpu, self.size_out, self.size_in, self.tokens)
        return seconds

    def _stacking(self, gpu: Gpu) -> float:
        return memory_seconds(gpu, _STACK_BYTES * self.weights) if self.is_grouped else 0

    def _seconds(self, gpu: Gpu, rows: float, columns: int, inner: float) -> float:
        if not self.is_grouped:
            return self.number * product_seconds(gpu, rows, columns, inner)
        return product_seconds(gpu, rows, columns, inner, self.number)


def products_of(layer: Layer, rank: Rank, has_grouped_experts: bool = False) -> Iterator[Product]:
    """The products of a decoder layer on a rank; every expert gets the same number of tokens."""
    experts, of_mlp = layer.mlp.experts, layer.mlp.recompute_modules[0]
    for name, size_out, size_in in layer.matrices:
        module = of_mlp if name.startswith("mlp.") else "mla_up_proj" if "_up_proj." in name else ""
        tokens, ranks, number = float(rank.tokens), rank.tp, 1
        if ".router." in name or name.endswith(".gate_weight"):
            tokens, ranks = rank.sequence_tokens, 1
        elif ".local_experts." in name:
            tokens = rank.sequence_tokens * rank.etp * rank.ep * layer.mlp.topk / experts
            ranks, number = rank.etp, experts // rank.ep
        if is_split_by_columns(name):
            size_in //= ranks
        else:
            size_out //= ranks
        yield Product(tokens, size_out, size_in, module, number, has_grouped_experts and number > 1)
