"""List the matrix products of a decoder layer on a rank, and estimate their times."""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

from swiftlite.families.layer import Layer
from swiftlite.families.rank import Rank
from swiftlite.plan.cost.adapters import is_split_by_columns
from swiftlite.plan.cost.gpus import Gpu
from swiftlite.plan.cost.software import LOCAL, Software
from swiftlite.plan.cost.timing import memory_seconds, product_seconds
from swiftlite.plan.low_precision import LowPrecision, takes_low_precision


@dataclass(frozen=True)
class Product:
    """A matrix product of a linear layer on a rank.

    Attributes:
        module: the value of --recompute_modules that recomputes the product; empty if no value does.
        number: number of identical products.
        is_grouped: whether one kernel computes all `number` products.
        is_expert: whether the matrices belong to an expert.
        low: low precision of the product; None for bfloat16.
        tokens_in, tokens_out: number of tokens whose states and gradients are quantized on this rank. It is smaller
            than `tokens` if ranks gather quantized tensors.
    """

    tokens: float
    size_out: int
    size_in: int
    module: str = ""
    number: int = 1
    is_grouped: bool = False
    is_expert: bool = False
    low: LowPrecision | None = None
    tokens_in: float = 0
    tokens_out: float = 0
    software: Software = LOCAL

    @property
    def weights(self) -> int:
        """Number of elements of all `number` weight matrices."""
        return self.number * self.size_out * self.size_in

    def forward(self, gpu: Gpu) -> float:
        """Return the seconds of the forward pass."""
        return self._seconds(gpu, self.tokens, self.size_out, self.size_in) + self._stacking(gpu)

    def backward(self, gpu: Gpu, learns: bool = True) -> float:
        """Return the seconds to compute the gradients of inputs and, if `learns`, also the gradients of weights."""
        seconds = self._seconds(gpu, self.tokens, self.size_in, self.size_out) + self._stacking(gpu)
        if learns:
            of_weights = self
            if self.low and self.low.is_local:
                of_weights = dataclasses.replace(self, low=None)
            seconds += of_weights._seconds(gpu, self.size_out, self.size_in, self.tokens)
        return seconds

    def quantizing(self) -> tuple[float, float]:
        """Return the bytes moved to quantize the inputs in the forward pass, and the gradients in the backward pass.

        Weights are quantized once per step; only weights of experts (`model/layers/te.py`) and of torch's products are
        quantized in each pass.
        """
        if self.low is None:
            return 0, 0
        forward = self.number * self.tokens_in * self.size_in + (self.is_expert or self.low.is_local) * self.weights
        backward = self.number * self.tokens_out * self.size_out + self.low.is_local * self.weights
        return self.low.moved * forward, self.low.moved * backward

    def _stacking(self, gpu: Gpu) -> float:
        if not self.is_grouped:
            return 0
        return memory_seconds(gpu, self.software.stack_bytes * self.weights)

    def _seconds(self, gpu: Gpu, rows: float, columns: int, inner: float) -> float:
        faster, itemsize = 1.0, 2.0
        if self.low:
            faster, itemsize = self.low.speedup, self.low.quantized.copy
        number, times = (self.number, 1) if self.is_grouped else (1, self.number)
        efficiency = self.software.products_on(gpu)
        return times * product_seconds(gpu, rows, columns, inner, number, faster, itemsize, efficiency)


def products_of(
    layer: Layer,
    rank: Rank,
    has_grouped_experts: bool = False,
    software: Software = LOCAL,
    low: LowPrecision | None = None,
) -> Iterator[Product]:
    """Yield the matrix products of a decoder layer on a rank. Every expert has the same number of tokens.

    Args:
        low: precision of the products that support it, including grouped experts with Transformer Engine.
    """
    experts = layer.mlp.experts
    for name, size_out, size_in in layer.matrices:
        tokens, ranks, number = float(rank.tokens), rank.tp, 1
        is_whole = name.endswith((".gate_weight", "_latent_proj.weight")) or name.startswith("own_input_")
        if ".router." in name or is_whole:
            tokens, ranks = rank.sequence_tokens, 1
        elif name.endswith(".linear_kv_up_proj.weight"):
            tokens *= rank.cp  # each context-parallel rank expands the whole row
        elif ".local_experts." in name:
            tokens = rank.sequence_tokens * rank.etp * rank.ep * layer.mlp.topk / experts
            ranks, number = rank.etp, experts // rank.ep
        if is_split_by_columns(name):
            size_in //= ranks
        else:
            size_out //= ranks
        is_expert, is_grouped = ".local_experts." in name, has_grouped_experts and number > 1
        module = _recompute_module(layer, name)
        product = Product(tokens, size_out, size_in, module, number, is_grouped, is_expert, software=software)
        if low and takes_low_precision(name) and (not is_expert or (has_grouped_experts and not low.is_local)):
            product = in_low_precision(product, low, rank, is_split_by_columns(name))
        yield product


def _recompute_module(layer: Layer, name: str) -> str:
    """Return the value of --recompute_modules that recomputes a matrix product; empty if no value does."""
    if name.startswith("mlp."):
        return layer.mlp.recompute_modules[0]
    if "_up_proj." in name:
        return "mla_up_proj"
    return ""


def in_low_precision(product: Product, low: LowPrecision, rank: Rank, is_split_by_columns: bool) -> Product:
    """Return the product with the low precision `low`.

    Args:
        is_split_by_columns: whether tensor-parallel ranks split the product's input instead of its output.
    """
    here = there = product.tokens
    if not product.is_expert and not low.is_local:  # torch's products gather unquantized tensors
        there = float(rank.sequence_tokens)
    if is_split_by_columns:
        return dataclasses.replace(product, low=low, tokens_in=here, tokens_out=there)
    return dataclasses.replace(product, low=low, tokens_in=there, tokens_out=here)


def low_precision_weights(layer: Layer, rank: Rank) -> int:
    """Count the elements of a layer's matrices on a rank that support low precision, except those of experts."""
    number = 0
    for name, size_out, size_in in layer.matrices:
        if takes_low_precision(name) and ".local_experts." not in name:
            number += size_out * size_in // rank.tp
    return number
