"""Estimate the time of a training step with a parallel layout, to find the fastest layout. This module does not import
torch.

The time of a step is the sum of five parts: the computation of the slowest pipeline stage for all micro-batches, the
waiting time of its GPU, the pipeline bubble, the reduction of gradients, and the optimizer. See `timing.py` for
constants and `search.py` for the layouts that are tried.

Products of adapters, uneven lengths, uneven experts, clock rates and the file system are not modeled.
"""

import functools
import math

from swiftlite.families.architecture import Architecture
from swiftlite.families.layer import Layer
from swiftlite.plan.cost.gpus import Gpu
from swiftlite.plan.cost.layer_speed import LayerSpeed, Seconds
from swiftlite.plan.cost.memory import estimate_of, largest
from swiftlite.plan.cost.products import Product
from swiftlite.plan.cost.setup import Setup, gradient_bytes, held_by_stages, moment_bytes
from swiftlite.plan.cost.software import Software, software_of
from swiftlite.plan.cost.timing import STARTS, bandwidth, collective_seconds, memory_seconds
from swiftlite.plan.layout import data_parallel_size, num_virtual_stages, ranks_with_same_parameters

_LAUNCH = 6e-6
"""Seconds per kernel launch from Python, which is the minimum time of a kernel. The value is assumed."""
_KERNELS = 34
"""Number of kernels of a dense layer, forward and backward, as counted by `tests/cuda_emulated`."""
_MIXTURE_KERNELS = 46
"""Number of additional kernels of a layer with grouped experts on one rank (router, sorting, sums), as counted by
`tests/cuda_emulated`.
"""
_EXPERT_KERNELS = 20
"""Approximate number of kernels of an expert that is computed separately."""
_UNFUSED_LOGIT_BYTES = 54
"""Bytes moved per logit, like `Software.logit_bytes`, for a loss that is not fused and reads all logits at once.
Counted from the kernels."""
_WEIGHT_BYTES = 30
"""Bytes that the optimizer moves per parameter in addition to its moments. The gradient is read for the norm, read and
written to clip it, and read by AdamW, which reads and writes the float32 main weight; a copy to the weight reads it
again. Counted from the kernels."""
_ZERO_BYTES = 4
"""Bytes moved per element of a gradient to set it to zero."""
_WAIT = 3.3e-3
"""Seconds for which the GPU is idle each time that the host waits for it between steps. Measured on an H200: 23 ms in a
step with 7 such waits."""
_WAITS_OF_RANKS = 2
"""Number of additional waits of several ranks, for the number of targets and the decision to stop."""
_HIDDEN_REDUCTION = 0.9
"""Share of gradient reductions and weight gathers that can overlap with computation; the last bucket cannot. The value
is assumed."""


class Step:
    """A training step of a model with a parallel layout."""

    def __init__(
        self,
        architecture: Architecture,
        setup: Setup,
        gpu: Gpu,
        global_batch_size: int,
        software: Software | None = None,
    ):
        software = software or software_of(setup.transformer_impl)
        self.architecture, self.setup, self.gpu, self.software = architecture, setup, gpu, software
        self.layout, self.memory = setup.layout, estimate_of(architecture, setup)
        self.replicas = data_parallel_size(setup.layout, setup.num_gpus)
        self.num_micro_batches = global_batch_size / (self.replicas * setup.micro_batch_size)
        self.layers = LayerSpeed(architecture, setup, gpu, software)
        self.rank, self.is_trunk_frozen = self.layers.rank, self.layers.is_trunk_frozen
        self.tokens_per_step = global_batch_size * setup.max_length

    @functools.cached_property
    def seconds(self) -> Seconds:
        """Seconds of a step on the slowest pipeline stage, by activity."""
        pp = self.layout.pipeline_model_parallel_size
        held = held_by_stages(self.setup, self.architecture.outside.num_layers)
        firsts = [sum(each.count("t") for each in held[:number]) for number in range(len(held))]
        stages = []
        for rank in range(pp):
            numbers = range(rank, len(held), pp)
            parts = [self._virtual_stage(held[number], firsts[number]) for number in numbers]
            stages.append(sum(parts, Seconds()))
        slowest = max(stages, key=lambda stage: stage.total)
        step_seconds = slowest * self.num_micro_batches
        step_seconds += Seconds(pipeline=self._bubble(slowest.total) + self._sends())
        step_seconds += self._gradients(slowest.total) + self._optimizer() + self._quantized_weights()
        return step_seconds + self._idle()

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second of all GPUs."""
        return self.tokens_per_step / self.seconds.total

    def _virtual_stage(self, holds: str, first_layer: int) -> Seconds:
        """Return the time of one micro-batch in a virtual stage, forward and backward."""
        last_layer = first_layer + holds.count("t")
        seconds = sum(self._trunk_layers[first_layer:last_layer], Seconds())
        if "m" in holds:
            seconds += self.layers.drafts() * holds.count("m")
        if "L" in holds:
            seconds += self._losses()
        launches = self._launches(holds, first_layer)
        return seconds + Seconds(launches=max(0, launches - seconds.total))

    @functools.cached_property
    def _trunk_layers(self) -> list[Seconds]:
        """Time of one micro-batch for each decoder layer. The time of identical layers is computed once."""
        found: list[tuple[Layer, bool, Seconds]] = []
        low, layers = self.setup.low_precision, self.architecture.layers
        for number, layer in enumerate(layers):
            is_low = low is not None and low.is_in_layer(number, len(layers))
            seconds = next((seconds for *key, seconds in found if key == [layer, is_low]), None)
            if seconds is None and is_low:
                seconds = self.layers.trunk_layer(layer, low)
            elif seconds is None:
                seconds = self.layers.trunk_layer(layer, None)
            found.append((layer, is_low, seconds))
        return [seconds for *_, seconds in found]

    def _launches(self, holds: str, first_layer: int) -> float:
        """Return the seconds of launching the kernels of a micro-batch. The micro-batch takes at least this time."""
        count = holds.count("t")
        layers = list(self.architecture.layers[first_layer : first_layer + count])
        kernels = sum(map(self._kernels, layers))
        if self.is_trunk_frozen:  # only the forward pass
            kernels /= 3
        kernels += sum(map(self._kernels, self.layers.head_layers())) * holds.count("m")
        if self.setup.recompute.recompute_granularity == "full":
            kernels *= 4 / 3
        return _LAUNCH * kernels

    def _kernels(self, layer: Layer) -> float:
        if not layer.mlp.experts:
            return _KERNELS
        kernels = _KERNELS + _MIXTURE_KERNELS
        if self.layers.has_grouped_experts:
            return kernels
        return kernels + _EXPERT_KERNELS * layer.mlp.experts / self.rank.ep

    def _losses(self) -> Seconds:
        """Return the time of the losses of trunk and heads: the output layer's products, and the passes over logits."""
        outside, heads, rank = self.architecture.outside, self.setup.heads, self.rank
        vocabularies = [math.ceil(len(heads.draft_vocab) / rank.tp) or outside.local_vocab(rank)] * heads.drafts
        if not self.is_trunk_frozen:
            vocabularies.insert(0, outside.local_outputs(rank))
        per_logit: float = _UNFUSED_LOGIT_BYTES
        if self.setup.is_fused and rank.tp == 1:
            per_logit = self.software.logit_bytes
        elif self.setup.is_fused:
            per_logit = self.software.split_logit_bytes
        seconds = 0.0
        learns = [not self._output_layer_stays] * len(vocabularies)
        if outside.heads_have_output_layers and (self.setup.lora is None or self.setup.lora.heads == "full"):
            learns[len(learns) - heads.drafts :] = [True] * heads.drafts
        for number, output_learns in zip(vocabularies, learns, strict=True):
            product = Product(rank.tokens, number, outside.hidden, software=self.software)
            seconds += product.forward(self.gpu) + product.backward(self.gpu, learns=output_learns)
            if self.setup.is_fused and output_learns:
                seconds += (self.software.vocabulary_products - 3) * product.forward(self.gpu)
            seconds += memory_seconds(self.gpu, per_logit * rank.tokens * number)
        return Seconds(vocabulary=seconds)

    @property
    def _output_layer_stays(self) -> bool:
        return self.is_trunk_frozen or self.setup.lora is not None

    def _bubble(self, micro_batch: float) -> float:
        """Return the seconds for which a stage waits for its first micro-batch and is idle after its last one.

        Args:
            micro_batch: seconds of one micro-batch, forward and backward, on the slowest stage.
        """
        stages = self.layout.pipeline_model_parallel_size
        return (stages - 1) / (num_virtual_stages(self.layout) or 1) * micro_batch

    def _sends(self) -> float:
        """Return the seconds per step of sending states and their gradients between stages."""
        pp = self.layout.pipeline_model_parallel_size
        if pp == 1:
            return 0
        virtual = num_virtual_stages(self.layout) or 1
        states = self.rank.hidden_state_bytes(self.architecture.outside.hidden)
        one = STARTS + states / bandwidth(self.gpu, pp, self.setup.num_gpus // pp)
        exposed = 1.0
        if virtual > 1:
            exposed = self.software.exposed_sends
        return exposed * 2 * virtual * self.num_micro_batches * one

    def _gradients(self, micro_batch: float) -> Seconds:
        """Return the seconds of reducing gradients and gathering weights that do not overlap with computation.

        Args:
            micro_batch: seconds of one micro-batch, with which the communication can overlap.
        """
        learns, layout = largest(self.memory).trained, self.layout
        dense_ranks, expert_ranks = ranks_with_same_parameters(layout, self.setup.num_gpus)
        seconds = self._reduction(learns.dense, dense_ranks, layout.tensor_model_parallel_size)
        stride = layout.expert_tensor_parallel_size * layout.expert_model_parallel_size
        seconds += self._reduction(learns.expert, expert_ranks, stride)
        hidden = min(_HIDDEN_REDUCTION * seconds, micro_batch)
        return Seconds(data_parallel=seconds - hidden)

    def _reduction(self, parameters: int, size: int, stride: int) -> float:
        """Return the seconds of reducing the gradients of parameters that `size` ranks hold, and gathering the weights.

        Several instances of a distributed optimizer each reduce and gather among their ranks; then each rank sums its
        part of the gradients with the ranks of the other instances.

        Args:
            stride: distance between the numbers of two of these ranks.
        """
        instances = self.setup.num_distributed_optimizer_instances
        sharing, gradients = size // instances, gradient_bytes(self.setup) * parameters
        weights = self.setup.parameter_bytes * parameters
        seconds = collective_seconds(self.gpu, sharing, stride, gradients + weights)
        if instances > 1:
            seconds += collective_seconds(self.gpu, instances, stride * sharing, 2 * gradients / sharing)
        return seconds

    def _quantized_weights(self) -> Seconds:
        """Return the time to quantize weights, once per step."""
        low = self.setup.low_precision
        if low is None or low.is_local:
            return Seconds()
        num_bytes = max(stage.quantized for stage in self.memory) / low.quantized.weights * low.moved
        return Seconds(elementwise=memory_seconds(self.gpu, num_bytes))

    def _optimizer(self) -> Seconds:
        """Return the time in which AdamW reads and writes memory. A distributed optimizer shards this work."""
        ranks = 1
        if self.setup.use_distributed_optimizer:
            ranks, _ = ranks_with_same_parameters(self.layout, self.setup.num_gpus)
            ranks //= self.setup.num_distributed_optimizer_instances
        moved = _WEIGHT_BYTES + 2 * float(moment_bytes(self.setup))
        num_bytes = largest(self.memory).trained.total * (_ZERO_BYTES + moved / ranks)
        return Seconds(optimizer=memory_seconds(self.gpu, num_bytes))

    def _idle(self) -> Seconds:
        """Return the time per step in which the GPU waits for the host between steps."""
        waits = self.software.waits
        if waits and self.setup.num_gpus > 1:
            waits += _WAITS_OF_RANKS
        return Seconds(idle=_WAIT * waits)
