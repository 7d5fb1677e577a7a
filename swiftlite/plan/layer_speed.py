"""How long a decoder layer or an MTP layer takes for one micro-batch. What it multiplies and keeps is its own answer
(`families/layer.py`).

Constants as in `timing.py`. Next: `speed.py`, what a step is made of.
"""

import dataclasses
from dataclasses import dataclass

from swiftlite.families.architecture import Architecture
from swiftlite.families.layer import Layer
from swiftlite.plan.gpus import Gpu
from swiftlite.plan.products import Product, products_of
from swiftlite.plan.setup import Setup, held_by_stages, rank_of
from swiftlite.plan.timing import collective_seconds, exchange_seconds, memory_seconds

_BYTES_MOVED = 4.5
"""Bytes that elementwise kernels move, forward and backward, for each byte that autograd keeps of a layer. Counted as
`tests/model/test_kernels.py` does, a layer of Qwen3 8B has 3.6; of 3 and 4.5, Megatron's figures fit this better."""


@dataclass(frozen=True)
class Software:
    """What a trainer's kernels are like; by default swiftlite's own.

    Attributes:
        attention: part of the peak that attention gets, forward and backward. Assumed, for FlashAttention-2 on Hopper;
            newer kernels get more, and so does this one on an A100.
        logit_bytes: moved for each logit of a fused loss beside its products. Counted.
        gradient_bytes: moved by a micro-batch for each weight, to add to its gradient.
        vocabulary_products: of the loss; in chunks the logits are made a second time (`model/chunked_loss.py`).
        exposed_tp: collectives of a half layer that nothing hides, forward and backward. megatron-core hides two of
            the three backward behind products. Counted.
        exposed_sends: part of the messages between interleaved stages that nothing hides. They are sent while others
            compute, but the other side waits for their shape first; a guess.
    """

    attention: float = 0.34
    logit_bytes: float = 20
    gradient_bytes: float = 12
    vocabulary_products: int = 4
    exposed_tp: tuple[float, float] = (2, 1)
    exposed_sends: float = 0.5


@dataclass(frozen=True)
class Seconds:
    """Seconds by what they are spent on."""

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

    @property
    def total(self) -> float:
        return sum(vars(self).values())

    def __add__(self, other: "Seconds") -> "Seconds":
        return Seconds(*(mine + theirs for mine, theirs in zip(vars(self).values(), vars(other).values(), strict=True)))

    def __mul__(self, times: float) -> "Seconds":
        return Seconds(*(times * each for each in vars(self).values()))


class LayerSpeed:
    """One micro-batch of a model's layers on a rank."""

    def __init__(self, architecture: Architecture, setup: Setup, gpu: Gpu, software: Software):
        self.architecture, self.setup, self.gpu, self.software = architecture, setup, gpu, software
        # What is recomputed is counted as such; here a rank that keeps all.
        self.rank = dataclasses.replace(rank_of(architecture, setup), recomputed=frozenset())
        # Experts with adapters are computed one by one (`model/experts.py`).
        self.has_grouped_experts = setup.is_fused and setup.lora is None
        self.is_trunk_frozen = setup.mtp_mode == "heads_only"

    def trunk_layer(self, layer: Layer) -> Seconds:
        """Forward and backward of a decoder layer; of a trunk that stays the forward pass alone."""
        forward = self._forward(layer)
        if self.is_trunk_frozen:
            return forward
        backward = self._backward(layer, learns=self.setup.lora is None)
        return forward + backward + Seconds(recompute=self._recomputed(layer, forward))

    def mtp_layer(self) -> Seconds:
        """Forward and backward of an MTP layer: a decoder layer behind a projection."""
        block, hidden = self.architecture.mtp_block, self.architecture.outside.hidden
        learns = self.setup.lora is None or self.setup.lora.heads == "full"
        projection = Product(self.rank.tokens, hidden // self.rank.tp, 2 * hidden)
        forward = self._forward(block)
        backward = self._backward(block, learns)
        of_projection = Seconds(products=projection.forward(self.gpu) + projection.backward(self.gpu, learns))
        return forward + backward + of_projection + Seconds(recompute=self._recomputed(block, forward))

    def _forward(self, layer: Layer) -> Seconds:
        gather, exchange = self._tensor_collective(), self._expert_exchange(layer)
        return Seconds(
            products=sum(product.forward(self.gpu) for product in self._products(layer)),
            attention=self._attention(layer),
            elementwise=self._elementwise(layer) / 3,
            tensor_parallel=self.software.exposed_tp[0] * gather * _shared_halves(layer),
            context_parallel=self._context_gather(layer),
            expert_parallel=2 * exchange,
        )

    def _backward(self, layer: Layer, learns: bool) -> Seconds:
        gather, exchange = self._tensor_collective(), self._expert_exchange(layer)
        products = self._products(layer)
        weights = sum(product.weights for product in products) if learns else 0
        added = memory_seconds(self.gpu, weights * self.software.gradient_bytes)
        return Seconds(
            products=sum(product.backward(self.gpu, learns) for product in products),
            attention=2.5 * self._attention(layer),  # five products of scores where forward has two
            elementwise=2 / 3 * self._elementwise(layer) + added,
            tensor_parallel=self.software.exposed_tp[1] * gather * _shared_halves(layer),
            context_parallel=self._context_gather(layer),
            expert_parallel=2 * exchange,
        )

    def _products(self, layer: Layer) -> list[Product]:
        return list(products_of(layer, self.rank, self.has_grouped_experts))

    def _attention(self, layer: Layer) -> float:
        """Seconds of attention itself, forward: each token of a row with those before it."""
        length = self.setup.max_length
        pairs = self.setup.micro_batch_size * length * (length + 1) / 2
        flops = 2 * layer.attention.macs_per_pair() * pairs / (self.rank.tp * self.rank.cp)
        return flops / (self.gpu.peak_flops * self.software.attention)

    def _elementwise(self, layer: Layer) -> float:
        """Seconds of what is no product, forward and backward: passes over memory."""
        return memory_seconds(self.gpu, _BYTES_MOVED * layer.kept(self.rank))

    def _tensor_collective(self) -> float:
        """Seconds of gathering, or summing and scattering, a layer's states over tensor-parallel ranks."""
        num_bytes = self.rank.tokens * self.architecture.outside.hidden * self.rank.itemsize
        return collective_seconds(self.gpu, self.rank.tp, 1, num_bytes)

    def _context_gather(self, layer: Layer) -> float:
        """Seconds of gathering keys and values from the ranks that share a row: what one more such rank would add to
        what attention keeps is what each of them sends."""
        if self.rank.cp == 1:
            return 0
        one_more = dataclasses.replace(self.rank, cp=self.rank.cp + 1)
        share = layer.attention.kept(one_more) - layer.attention.kept(self.rank)
        return collective_seconds(self.gpu, self.rank.cp, self.rank.tp, share * self.rank.cp)

    def _expert_exchange(self, layer: Layer) -> float:
        """Seconds of sending each token to the ranks of its experts, or back."""
        if not layer.mlp.experts:
            return 0
        states = self.rank.kept_states(self.architecture.outside.hidden)
        return exchange_seconds(self.gpu, self.rank.ep, self.rank.etp, states * layer.mlp.topk)

    def _recomputed(self, layer: Layer, forward: Seconds) -> float:
        """Seconds of computing a layer's forward pass, or modules of it, a second time."""
        recompute = self.setup.recompute
        if recompute.recompute_granularity == "none":
            return 0
        if recompute.recompute_granularity == "full":
            return forward.total * self._recomputed_part()
        modules = set(recompute.recompute_modules)
        seconds = forward.attention if "core_attn" in modules else 0
        for product in self._products(layer):
            if product.module in modules:
                seconds += product.forward(self.gpu)
        if modules & set(layer.mlp.recompute_modules):
            seconds += memory_seconds(self.gpu, _BYTES_MOVED * layer.mlp.kept(self.rank)) / 3
            seconds += forward.tensor_parallel / 2 + forward.expert_parallel
        return seconds

    def _recomputed_part(self) -> float:
        """The share of layers that full recomputation computes again."""
        if self.setup.recompute.recompute_method == "uniform":
            return 1
        held = held_by_stages(self.setup, self.architecture.outside.num_layers)
        most = max(each.count("t") for each in held)
        return min(1, self.setup.recompute.recompute_num_layers / max(most, 1))


def _shared_halves(layer: Layer) -> int:
    """Halves of a layer whose matrices tensor-parallel ranks share."""
    return bool(layer.attention.tensor_split) + bool(layer.mlp.tensor_split)
