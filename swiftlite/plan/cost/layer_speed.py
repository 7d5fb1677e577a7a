"""Estimate the time of a decoder layer or an MTP layer for one micro-batch.

Each kind of layer defines its matrix products and activations (`families/layer.py`). See `timing.py` for constants and
`speed.py` for whole steps.
"""

import dataclasses
from dataclasses import dataclass

from swiftlite.base.heads import MTP_FEATURES
from swiftlite.families.architecture import Architecture
from swiftlite.families.layer import Layer, num_pairs
from swiftlite.plan.cost.gpus import Gpu
from swiftlite.plan.cost.products import Product, in_low_precision, products_of
from swiftlite.plan.cost.setup import Setup, held_by_stages, rank_of
from swiftlite.plan.cost.software import Software
from swiftlite.plan.cost.timing import collective_seconds, exchange_seconds, memory_seconds
from swiftlite.plan.low_precision import LowPrecision

_FLOAT32_TIME = 15
"""Time of a float32 operation relative to one at peak speed, as on an H100."""


@dataclass(frozen=True)
class Seconds:
    """The seconds of a training step, divided into kinds of work such as attention, communication and the optimizer."""

    products: float = 0
    attention: float = 0
    elementwise: float = 0
    vocabulary: float = 0
    recompute: float = 0
    tensor_parallel: float = 0
    context_parallel: float = 0
    expert_parallel: float = 0
    launches: float = 0
    pipeline: float = 0
    data_parallel: float = 0
    optimizer: float = 0
    idle: float = 0

    @property
    def total(self) -> float:
        return sum(vars(self).values())

    def __add__(self, other: "Seconds") -> "Seconds":
        return Seconds(*(mine + theirs for mine, theirs in zip(vars(self).values(), vars(other).values(), strict=True)))

    def __mul__(self, times: float) -> "Seconds":
        return Seconds(*(times * each for each in vars(self).values()))


class LayerSpeed:
    """Estimates the time of a model's layers on a rank for one micro-batch."""

    def __init__(self, architecture: Architecture, setup: Setup, gpu: Gpu, software: Software):
        self.architecture, self.setup, self.gpu, self.software = architecture, setup, gpu, software
        # Recomputation is counted separately; this rank stores everything.
        self.rank = dataclasses.replace(rank_of(architecture, setup), recomputed=frozenset())
        # Experts with adapters are computed one by one (`model/layers/experts.py`).
        self.has_grouped_experts = setup.is_fused and setup.lora is None
        self.is_trunk_frozen = setup.trunk_is_frozen
        self.drafter = architecture.drafter_of(setup.heads)

    def trunk_layer(self, layer: Layer, low: LowPrecision | None) -> Seconds:
        """Return the time of a decoder layer, forward and backward. For a frozen trunk, there is no backward pass."""
        products = self._products(layer, low)
        forward = self._forward(layer, products)
        if self.is_trunk_frozen:
            return forward
        backward = self._backward(layer, products, learns=self.setup.lora is None)
        return forward + backward + Seconds(recompute=self._recomputed(layer, products, forward))

    def head_layers(self) -> list[Layer]:
        """List the decoder layers of all drafts of an MTP layer, or of another drafter, as often as they are computed.
        Queries of a block count as further tokens.
        """
        if self.drafter is None:
            return [self.architecture.mtp_block] * self.setup.heads.unroll
        return [*self.drafter.layers] * self.drafter.passes

    def drafts(self) -> Seconds:
        """Return the time of all drafts of an MTP layer, or of another drafter, forward and backward: projections and
        decoder layers.
        """
        learns = self.setup.lora is None or self.setup.lora.heads == "full"
        seconds, queries = self._projections(learns), 1 if self.drafter is None else self.drafter.queries
        for layer in self.head_layers():
            products = self._products(layer, self.setup.low_precision)
            forward = self._forward(layer, products)
            recompute = Seconds(recompute=self._recomputed(layer, products, forward))
            seconds += (forward + self._backward(layer, products, learns) + recompute) * queries
        return seconds

    def _projections(self, learns: bool) -> Seconds:
        """Return the time of the matrices of a drafter outside of its decoder layers."""
        hidden, heads, low = self.architecture.outside.hidden, self.setup.heads, self.setup.low_precision
        if self.drafter is None:
            features = len(heads.features) if heads.kind == MTP_FEATURES else 0
            sizes = [(hidden // self.rank.tp, (2 + features) * hidden)]
            sizes += [(hidden // self.rank.tp, 2 * hidden)] * (heads.unroll - 1)
        else:
            sizes, low = self.drafter.projections(), None
        seconds = Seconds()
        for size_out, size_in in sizes:
            projection = Product(self.rank.tokens, size_out, size_in, software=self.software)
            if low:
                projection = in_low_precision(projection, low, self.rank, is_split_by_columns=False)
            seconds += Seconds(
                products=projection.forward(self.gpu) + projection.backward(self.gpu, learns),
                elementwise=memory_seconds(self.gpu, sum(projection.quantizing())),
            )
        return seconds

    def _forward(self, layer: Layer, products: list[Product]) -> Seconds:
        gather, exchange = self._tensor_collective(), self._expert_exchange(layer)
        # Each half of a layer has two collectives: a gather of quantized states, and a reduce-scatter.
        exposed = self.software.exposed_tp[0] * (self._gather_of(products) + gather) / 2
        quantizing = sum(product.quantizing()[0] for product in products)
        return Seconds(
            products=sum(product.forward(self.gpu) for product in products),
            attention=self._attention(layer) + self._indexer(layer),
            elementwise=self._elementwise(layer) / 3 + memory_seconds(self.gpu, quantizing),
            tensor_parallel=exposed * _shared_halves(layer),
            context_parallel=self._context_gather(layer),
            expert_parallel=2 * exchange,
        )

    def _backward(self, layer: Layer, products: list[Product], learns: bool) -> Seconds:
        exchange = self._expert_exchange(layer)
        weights = 0
        if learns:
            weights = sum(product.weights for product in products)
        quantizing = sum(product.quantizing()[1] for product in products)
        added = memory_seconds(self.gpu, weights * self.software.gradient_bytes)
        return Seconds(
            products=sum(product.backward(self.gpu, learns) for product in products),
            attention=(2.5 + self._selects(layer)) * self._attention(layer),  # five products, two in the forward pass
            elementwise=2 / 3 * self._elementwise(layer) + added + memory_seconds(self.gpu, quantizing),
            tensor_parallel=self.software.exposed_tp[1] * self._gather_of(products) * _shared_halves(layer),
            context_parallel=self._context_gather(layer),
            expert_parallel=2 * exchange,
        )

    def _products(self, layer: Layer, low: LowPrecision | None) -> list[Product]:
        return list(products_of(layer, self.rank, self.has_grouped_experts, self.software, low))

    def _attention(self, layer: Layer) -> float:
        """Return the seconds of core attention in the forward pass."""
        pairs = self.setup.micro_batch_size * num_pairs(self.setup.max_length, layer.attention.window)
        flops = 2 * layer.attention.macs_per_pair() * pairs / (self.rank.tp * self.rank.cp)
        return flops / (self.gpu.peak_flops * self.software.attention_on(self.gpu, self.setup.has_flash2))

    def _selects(self, layer: Layer) -> bool:
        """Return whether attention is computed with selected tokens. The backward pass then recomputes it."""
        return layer.attention.indexer is not None and layer.attention.indexer.selects(self.setup.max_length)

    def _indexer(self, layer: Layer) -> float:
        """Return the seconds of the scores of an indexer, forward and, if it is trained, backward.

        They are float32, and each tensor-parallel rank computes all of them.
        """
        indexer, is_trained = layer.attention.indexer, self.setup.indexer_mode != "frozen"
        if indexer is None or not (is_trained or self._selects(layer)):
            return 0.0
        pairs = self.setup.micro_batch_size * num_pairs(self.setup.max_length, None) / self.rank.cp
        passes = 3 if is_trained else 1
        return 2 * passes * indexer.macs_per_pair() * pairs * _FLOAT32_TIME / self.gpu.peak_flops

    def _elementwise(self, layer: Layer) -> float:
        """Return the seconds of operations other than matrix products, forward and backward, from the bytes that they
        move.
        """
        return memory_seconds(self.gpu, self.software.layer_bytes * layer.activation_bytes(self.rank))

    def _tensor_collective(self, low: LowPrecision | None = None) -> float:
        """Return the seconds of a gather or reduce-scatter of a layer's states over tensor-parallel ranks."""
        itemsize: float = self.rank.itemsize
        if low and not low.is_local:
            itemsize = low.quantized.copy
        num_bytes = self.rank.tokens * self.architecture.outside.hidden * itemsize
        return collective_seconds(self.gpu, self.rank.tp, 1, num_bytes)

    def _gather_of(self, products: list[Product]) -> float:
        """Return the seconds of gathering the inputs of `products`, which belong to one half (attention or MLP) of a
        layer.

        With Transformer Engine's low precision, the inputs are quantized before they are gathered.
        """
        if not self.rank.sequence_parallel:
            return self._tensor_collective()
        return self._tensor_collective(next((product.low for product in products if product.low), None))

    def _context_gather(self, layer: Layer) -> float:
        """Return the seconds of gathering keys and values, or their latents, from the context-parallel ranks that share
        a row.
        """
        row_bytes = layer.attention.gathered(self.rank) * self.rank.cp
        return collective_seconds(self.gpu, self.rank.cp, self.rank.tp, row_bytes)

    def _expert_exchange(self, layer: Layer) -> float:
        """Return the seconds of sending each token to the ranks of its experts, or back."""
        if not layer.mlp.experts:
            return 0
        states = self.rank.hidden_state_bytes(self.architecture.outside.hidden)
        return exchange_seconds(self.gpu, self.rank.ep, self.rank.etp, states * layer.mlp.topk)

    def _recomputed(self, layer: Layer, products: list[Product], forward: Seconds) -> float:
        """Return the seconds of recomputing a layer's forward pass, or only the modules in --recompute_modules."""
        recompute = self.setup.recompute
        if recompute.recompute_granularity == "none":
            return 0
        if recompute.recompute_granularity == "full":
            return forward.total * self._recomputed_part()
        modules = set(recompute.recompute_modules)
        seconds = 0.0
        if "core_attn" in modules:
            seconds = forward.attention
        for product in products:
            if product.module in modules:
                seconds += product.forward(self.gpu) + memory_seconds(self.gpu, product.quantizing()[0])
        if modules & set(layer.mlp.recompute_modules):
            num_bytes = self.software.layer_bytes * layer.mlp.activation_bytes(self.rank)
            seconds += memory_seconds(self.gpu, num_bytes) / 3
            seconds += forward.tensor_parallel / 2 + forward.expert_parallel
        return seconds

    def _recomputed_part(self) -> float:
        """Return the share of layers that full recomputation recomputes."""
        if self.setup.recompute.recompute_method == "uniform":
            return 1
        held = held_by_stages(self.setup, self.architecture.outside.num_layers)
        most = max(each.count("t") for each in held)
        return min(1, self.setup.recompute.recompute_num_layers / max(most, 1))


def _shared_halves(layer: Layer) -> int:
    """Count the halves of a layer (attention, MLP) whose matrices tensor-parallel ranks split."""
    return bool(layer.attention.tensor_split) + bool(layer.mlp.tensor_split)
