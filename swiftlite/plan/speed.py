"""How long a training step takes on a parallel layout: an estimate, to put layouts in order. Arithmetic, no torch.

A step is what the slowest pipeline stage computes for all its micro-batches, what its GPU waits for meanwhile, and what
stands before and behind: the pipeline's bubble, the sum of gradients, the optimizer. Each effect has one constant here.
It says whether it was fitted (`tests/plan/test_speed.py` tells how), counted from what the kernels do, or assumed; none
was measured. What a layer multiplies and keeps is its own answer. Next: `search.py`, which layouts are tried.

Not counted: adapters' own products, uneven lengths, uneven experts, clocks, the file system.
"""

import dataclasses
import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass

from swiftlite.families.architecture import Architecture
from swiftlite.families.layer import Layer
from swiftlite.families.rank import FLOAT32, Rank
from swiftlite.plan.adapters import is_split_by_columns
from swiftlite.plan.gpus import Gpu
from swiftlite.plan.layout import data_parallel_size, num_virtual_stages
from swiftlite.plan.memory import Setup, estimate_of, held_by_stages, largest, rank_of

_BFLOAT16 = 2
_TILE = (128, 256)
"""Rows and columns of a product that a processor computes at one time. Assumed, as a usual one for Hopper."""
PRODUCT_EFFICIENCY = 0.62
"""Part of the peak inside a tile; clocks fall under load. Fitted."""
_INNER_START = 400
"""What starting and ending a tile costs, in steps along the inner side. Fitted."""
HBM_EFFICIENCY = 0.85
"""Part of the memory's bandwidth that a pass over a large tensor gets. Assumed."""
_BYTES_MOVED = 4.5
"""Bytes that elementwise kernels move, forward and backward, for each byte that autograd keeps of a layer. Counted as
`tests/model/test_kernels.py` does, a layer of Qwen3 8B has 3.6; of 3 and 4.5, Megatron's figures fit this better."""
LINK_EFFICIENCY = 0.8
"""Part of NVLink's and the network's bandwidth that NCCL gets for large messages. Assumed."""
_STARTS, _STARTS_BETWEEN_MACHINES = 15e-6, 40e-6
"""Seconds until a collective's first byte arrives. Assumed."""
_LAUNCH = 6e-6
"""Seconds between two kernels that Python starts: the least of each, however small. Assumed."""
_KERNELS = 75
"""Kernels of a dense layer, forward and backward. Counted, roughly."""
_EXPERT_KERNELS = 20
"""Those of an expert that is computed for itself. Counted, roughly."""
_STACK_BYTES = 4
"""Bytes moved for each weight of experts to stack them for one product, forward and again backward. Counted."""
_UNFUSED_LOGIT_BYTES = 54
"""As `Software.logit_bytes`, of a loss over all logits at one time, counted pass by pass."""
_OPTIMIZER_BYTES = 30
"""Bytes moved for each parameter by AdamW: gradient, two moments, main weight in float32, the weight. Counted."""
_GRADIENT_BYTES = 8
"""Bytes moved for each gradient to measure its norm and set it to zero. Counted."""
_HIDDEN_REDUCTION = 0.9
"""Part of the sums of gradients and gathers of weights that can hide; the last bucket cannot. Assumed."""


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


# Pieces


def product_seconds(gpu: Gpu, rows: float, columns: int, inner: float, number: int = 1) -> float:
    """Seconds of matrix products [rows, inner] x [inner, columns] that are started together: computing, in whole tiles
    on all processors at once, or moving their matrices, whichever is longer."""
    tiles = number * math.ceil(rows / _TILE[0]) * math.ceil(columns / _TILE[1])
    waves = math.ceil(tiles / gpu.processors)
    flops = 2 * waves * gpu.processors * math.prod(_TILE) * (inner + _INNER_START)
    moved = number * _BFLOAT16 * (rows * inner + inner * columns + rows * columns)
    return max(flops / (gpu.peak_flops * PRODUCT_EFFICIENCY), memory_seconds(gpu, moved))


def memory_seconds(gpu: Gpu, num_bytes: float) -> float:
    """Seconds of moving bytes between memory and processors."""
    return num_bytes / (gpu.hbm * HBM_EFFICIENCY)


def bandwidth(gpu: Gpu, size: int, stride: int) -> float:
    """Bytes per second that each rank of a group gets: the link inside a machine, else the network ports of all ranks
    that the group has on a machine.

    Args:
        size: ranks of the group.
        stride: distance between two neighbours of it.
    """
    if size * stride <= gpu.linked:
        return gpu.link * LINK_EFFICIENCY
    on_a_machine = max(1, gpu.linked // stride)
    return min(gpu.link, gpu.network * on_a_machine) * LINK_EFFICIENCY


def collective_seconds(gpu: Gpu, size: int, stride: int, num_bytes: float) -> float:
    """Seconds of a gather or a reduce-scatter over a group.

    Args:
        num_bytes: the whole tensor's; each rank sends all of it but its own share.
    """
    if size == 1:
        return 0
    starts = _STARTS if size * stride <= gpu.linked else _STARTS_BETWEEN_MACHINES
    return starts + num_bytes * (size - 1) / size / bandwidth(gpu, size, stride)


def exchange_seconds(gpu: Gpu, size: int, stride: int, num_bytes: float) -> float:
    """Seconds of an exchange in which each rank sends another part to each: what leaves the machine goes through the
    rank's own network port.

    Args:
        num_bytes: what one rank sends, its own part included.
    """
    if size * stride <= gpu.linked:
        return collective_seconds(gpu, size, stride, num_bytes)
    leaving = num_bytes * (1 - max(1, gpu.linked // stride) / size)
    return _STARTS_BETWEEN_MACHINES + leaving / (gpu.network * LINK_EFFICIENCY)


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
        elif name.endswith(".linear_kv_up_proj.weight"):
            tokens *= rank.cp  # context-parallel ranks each unfold all of a row
        elif ".local_experts." in name:
            tokens = rank.sequence_tokens * rank.etp * rank.ep * layer.mlp.topk / experts
            ranks, number = rank.etp, experts // rank.ep
        if is_split_by_columns(name):
            size_in //= ranks
        else:
            size_out //= ranks
        yield Product(tokens, size_out, size_in, module, number, has_grouped_experts and number > 1)


# A step


class Step:
    """A training step of a model on a layout."""

    def __init__(
        self,
        architecture: Architecture,
        setup: Setup,
        gpu: Gpu,
        global_batch_size: int,
        software: Software = Software(),
    ):
        self.architecture, self.setup, self.gpu, self.software = architecture, setup, gpu, software
        self.layout, self.memory = setup.layout, estimate_of(architecture, setup)
        self.replicas = data_parallel_size(setup.layout, setup.num_gpus)
        self.num_micro_batches = global_batch_size / (self.replicas * setup.micro_batch_size)
        # What is recomputed is counted as such; here a rank that keeps all.
        self.rank = dataclasses.replace(rank_of(architecture, setup), recomputed=frozenset())
        # Experts with adapters are computed one by one (`model/experts.py`).
        self.has_grouped_experts = setup.is_fused and setup.lora is None
        self.is_trunk_frozen = setup.mtp_mode == "heads_only"
        self.tokens_per_step = global_batch_size * setup.max_length

    @functools.cached_property
    def seconds(self) -> Seconds:
        """Seconds of the step, by what the slowest pipeline stage spends them on."""
        pp = self.layout.pipeline_model_parallel_size
        held = held_by_stages(self.setup, self.architecture.outside.num_layers)
        firsts = [sum(each.count("t") for each in held[:number]) for number in range(len(held))]
        stages = []
        for rank in range(pp):
            numbers = range(rank, len(held), pp)
            parts = [self._virtual_stage(held[number], firsts[number]) for number in numbers]
            stages.append(sum(parts, Seconds()))
        slowest = max(stages, key=lambda stage: stage.total)
        of_step = slowest * self.num_micro_batches
        of_step += Seconds(pipeline=self._bubble(slowest.total) + self._sends())
        return of_step + self._gradients(slowest.total) + self._optimizer()

    @property
    def tokens_per_second(self) -> float:
        """Of all GPUs together."""
        return self.tokens_per_step / self.seconds.total

    def _virtual_stage(self, holds: str, first_layer: int) -> Seconds:
        """One micro-batch, forward and backward, of a virtual stage."""
        last_layer = first_layer + holds.count("t")
        seconds = sum(self._trunk_layers[first_layer:last_layer], Seconds())
        if "m" in holds:
            seconds += self._mtp_layer() * holds.count("m")
        if "L" in holds:
            seconds += self._losses()
        launches = self._launches(holds, first_layer)
        return seconds + Seconds(launches=max(0, launches - seconds.total))

    @functools.cached_property
    def _trunk_layers(self) -> list[Seconds]:
        """One micro-batch of each decoder layer; those that are alike are computed once."""
        found: list[tuple[Layer, Seconds]] = []
        for layer in self.architecture.layers:
            known = [pair for pair in found if pair[0] == layer] or [(layer, self._trunk_layer(layer))]
            found.append(known[0])
        return [seconds for _, seconds in found]

    def _launches(self, holds: str, first_layer: int) -> float:
        """Seconds that Python takes to start the kernels of a micro-batch: it does nothing faster than that."""
        count = holds.count("t")
        layers = list(self.architecture.layers[first_layer : first_layer + count])
        kernels = sum(map(self._kernels, layers)) / (3 if self.is_trunk_frozen else 1)
        kernels += self._kernels(self.architecture.mtp_block) * holds.count("m")
        if self.setup.recompute.recompute_granularity == "full":
            kernels *= 4 / 3
        return _LAUNCH * kernels

    def _kernels(self, layer: Layer) -> float:
        one_by_one = 1 if self.has_grouped_experts else layer.mlp.experts / self.rank.ep
        return _KERNELS + (_EXPERT_KERNELS * one_by_one if layer.mlp.experts else 0)

    def _products(self, layer: Layer) -> list[Product]:
        return list(products_of(layer, self.rank, self.has_grouped_experts))

    def _trunk_layer(self, layer: Layer) -> Seconds:
        """Forward and backward of a decoder layer; of a trunk that stays the forward pass alone."""
        forward = self._forward(layer)
        if self.is_trunk_frozen:
            return forward
        backward = self._backward(layer, learns=self.setup.lora is None)
        return forward + backward + Seconds(recompute=self._recomputed(layer, forward))

    def _mtp_layer(self) -> Seconds:
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
        """Seconds of gathering keys and values, or what they are made of, from the ranks that share a row."""
        of_row = layer.attention.gathered(self.rank) * self.rank.cp
        return collective_seconds(self.gpu, self.rank.cp, self.rank.tp, of_row)

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

    def _losses(self) -> Seconds:
        """Of the trunk and of each head: the output layer's products, and the passes over its logits."""
        outside, heads, rank = self.architecture.outside, self.setup.heads, self.rank
        words = [] if self.is_trunk_frozen else [outside.local_vocab(rank)]
        words += [math.ceil(len(heads.draft_vocab) / rank.tp) or outside.local_vocab(rank)] * heads.layers
        per_logit = self.software.logit_bytes if self.setup.is_fused else _UNFUSED_LOGIT_BYTES
        seconds = 0.0
        for number in words:
            product = Product(rank.tokens, number, outside.hidden)
            seconds += product.forward(self.gpu) + product.backward(self.gpu, learns=not self._output_layer_stays)
            if self.setup.is_fused and not self._output_layer_stays:
                seconds += (self.software.vocabulary_products - 3) * product.forward(self.gpu)
            seconds += memory_seconds(self.gpu, per_logit * rank.tokens * number)
        return Seconds(vocabulary=seconds)

    @property
    def _output_layer_stays(self) -> bool:
        return self.is_trunk_frozen or self.setup.lora is not None

    def _bubble(self, micro_batch: float) -> float:
        """Seconds that a stage idles until the first micro-batch is there and after its last one is done.

        Args:
            micro_batch: seconds of one, forward and backward, on the slowest stage.
        """
        stages = self.layout.pipeline_model_parallel_size
        return (stages - 1) / (num_virtual_stages(self.layout) or 1) * micro_batch

    def _sends(self) -> float:
        """Seconds of a step in which states and their gradients pass from stage to stage."""
        pp = self.layout.pipeline_model_parallel_size
        if pp == 1:
            return 0
        virtual = num_virtual_stages(self.layout) or 1
        states = self.rank.kept_states(self.architecture.outside.hidden)
        one = _STARTS + states / bandwidth(self.gpu, pp, self.setup.num_gpus // pp)
        exposed = 1 if virtual == 1 else self.software.exposed_sends
        return exposed * 2 * virtual * self.num_micro_batches * one

    def _gradients(self, micro_batch: float) -> Seconds:
        """Seconds of summing gradients and gathering weights over data-parallel ranks beyond one micro-batch's own."""
        learns = largest(self.memory).trained
        layout, num_bytes = self.layout, FLOAT32 + self.setup.parameter_bytes
        size = self.replicas * layout.context_parallel_size
        stride = layout.tensor_model_parallel_size
        seconds = collective_seconds(self.gpu, size, stride, num_bytes * learns.dense)
        stride = layout.expert_tensor_parallel_size * layout.expert_model_parallel_size
        size = self.setup.num_gpus // (stride * layout.pipeline_model_parallel_size)
        seconds += collective_seconds(self.gpu, size, stride, num_bytes * learns.expert)
        hidden = min(_HIDDEN_REDUCTION * seconds, micro_batch)
        return Seconds(data_parallel=seconds - hidden)

    def _optimizer(self) -> Seconds:
        """AdamW's passes over memory, which a distributed optimizer shares out."""
        ranks = self.replicas * self.layout.context_parallel_size if self.setup.use_distributed_optimizer else 1
        num_bytes = largest(self.memory).trained.total * (_GRADIENT_BYTES + _OPTIMIZER_BYTES / ranks)
        return Seconds(optimizer=memory_seconds(self.gpu, num_bytes))


def _shared_halves(layer: Layer) -> int:
    """Halves of a layer whose matrices tensor-parallel ranks share."""
    return bool(layer.attention.tensor_split) + bool(layer.mlp.tensor_split)
