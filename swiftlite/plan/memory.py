"""How much memory a rank of a training run needs: `doctor --plan`. Arithmetic on config.json and options, no torch.

Parameters, gradients and optimizer state are counted exactly (but for the padding of the distributed optimizer's
buffers, a few kilobytes). Activations are the tensors that autograd keeps in our own model (`swiftlite/model`), written
down module by module as `saved_tensors_hooks` shows them; `scripts/bench/memory.py` measures both. What fused kernels
keep is read from torch's and megatron-core's sources: on a CPU torch has no fused norm.

What a decoder layer counts is its own answer (`families/layer.py`); here stand the modules around layers, and what a
pipeline stage holds of all. Not counted: the CUDA context, NCCL's buffers, the allocator's fragments (`RESERVE`), and
one layer's gradients in the backward pass. With adapters, activations are counted as if every weight learned, which is
more than there are: a norm that stays keeps less. What DoRA keeps beside is counted (`plan/adapters.py`).
"""

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from swiftlite.args.commands import DoctorArgs
from swiftlite.args.fields import MtpMode, ParallelLayout, RecomputeArgs
from swiftlite.bridge.rows import Row, lift
from swiftlite.families.architecture import Architecture
from swiftlite.families.family import HfConfig
from swiftlite.families.index import architecture_of
from swiftlite.families.layer import Layer
from swiftlite.families.rank import FLOAT32, ParameterCount, Rank
from swiftlite.heads import Heads
from swiftlite.lora import Lora
from swiftlite.plan.adapters import adapter_parameters, kept_products, saved_parameters
from swiftlite.plan.kernels import CHUNK
from swiftlite.plan.layout import (
    data_parallel_size,
    decoder_layers_per_stage,
    group_of,
    layout_of,
    layout_problems,
    parse_stages,
    process_problems,
)
from swiftlite.plan.preference import answers_of

# Part of a GPU's memory that is left for the CUDA context, NCCL's buffers and what the allocator cannot use.
RESERVE = 0.08
USUAL_GPU_MEMORY_GB = 80.0


@dataclass(frozen=True)
class Setup:
    """What of a run decides about its memory, beside the model."""

    layout: ParallelLayout = field(default_factory=ParallelLayout)
    recompute: RecomputeArgs = field(default_factory=RecomputeArgs)
    num_gpus: int = 1
    use_distributed_optimizer: bool = False
    micro_batch_size: int = 1
    max_length: int = 2048
    parameter_bytes: int = 2
    """2 for bfloat16, with float32 main weights in the optimizer; 4 for float32."""
    heads: Heads = Heads()
    mtp_mode: MtpMode = "joint"
    is_fused: bool = False
    """Whether kernels are fused, see `plan.kernels.Kernels`."""
    lora: Lora | None = None


def planned_setup(args: DoctorArgs, hf_config: HfConfig) -> Setup:
    """What the options of `doctor --plan` say; the fewest GPUs that the layout takes if they do not."""
    layout = layout_of(args)
    per_replica = layout.tensor_model_parallel_size * layout.context_parallel_size
    per_experts = layout.expert_tensor_parallel_size * layout.expert_model_parallel_size
    layers = Heads.from_config(hf_config).layers
    num_gpus = args.num_gpus or math.lcm(per_replica, per_experts) * layout.pipeline_model_parallel_size
    has_replicas = num_gpus > layout.tensor_model_parallel_size * layout.pipeline_model_parallel_size
    shares = args.use_distributed_optimizer
    return Setup(
        layout=layout,
        recompute=group_of(args, RecomputeArgs),
        num_gpus=num_gpus,
        use_distributed_optimizer=has_replicas if shares is None else shares,
        micro_batch_size=args.micro_batch_size * (answers_of(args.loss_type) if args.loss_type else 1),
        max_length=args.max_length,
        parameter_bytes=2 if args.torch_dtype == "bfloat16" else FLOAT32,
        # Which tokens they draft makes no difference.
        heads=Heads(
            layers if args.mtp_num_layers is None else args.mtp_num_layers, draft_vocab=tuple(range(args.draft_vocab))
        ),
        mtp_mode=args.mtp_mode,
        is_fused=args.fused_kernels == "auto",  # a plan is one for GPUs
        lora=_planned_lora(args),
    )


def _planned_lora(args: DoctorArgs) -> Lora | None:
    if args.tuner_type != "lora":
        return None
    of_heads = args.mtp_tuner or ("lora" if args.mtp_num_layers is None else "full")
    on_trunk = args.mtp_mode != "heads_only"
    targets, saved = tuple(args.target_modules), tuple(args.lora_modules_to_save)
    return Lora(
        args.lora_rank,
        1.0,
        has_magnitudes=args.use_dora,
        targets=targets,
        saved=saved,
        on_trunk=on_trunk,
        heads=of_heads,
    )


@dataclass(frozen=True)
class StageMemory:
    """One rank of one pipeline stage. Everything but `parameters` and `trained`, those that learn, is in bytes."""

    holds: str
    """Its virtual stages, as in a layout string: "E t*4" or "t*2 | t*2 m L"."""
    parameters: int
    trained: ParameterCount
    weights: int
    gradients: int
    optimizer: int
    activations: int
    """Of all micro-batches that are in flight when their number is highest, without the logits."""
    in_flight: int
    """Forward passes of a virtual stage that wait for their backward pass then."""
    recomputed: int
    """What one backward pass computes again at one time."""
    logits: int
    """What the loss keeps of the vocabulary for each head, and the largest copy beside it."""

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer + self.activations + self.recomputed + self.logits


def estimate(hf_config: HfConfig, setup: Setup) -> list[StageMemory]:
    """The memory of a rank on each pipeline stage; the layout has passed `layout_problems` and `process_problems`.

    Args:
        hf_config: config.json.

    Raises:
        UserError: a model_type that is not known.
    """
    return estimate_of(architecture_of(hf_config), setup)


def estimate_of(architecture: Architecture, setup: Setup) -> list[StageMemory]:
    """`estimate` of a model that is read already."""
    model = _Model(architecture, setup)
    virtual_stages, first_layer = [], 0
    for holds in held_by_stages(setup, architecture.outside.num_layers):
        virtual_stages.append(_VirtualStage(model, holds, first_layer))
        first_layer += holds.count("t")
    pp = setup.layout.pipeline_model_parallel_size
    return [_stage_memory(model, virtual_stages[rank::pp], rank) for rank in range(pp)]


def held_by_stages(setup: Setup, num_layers: int) -> list[str]:
    """What each virtual stage holds, in the order in which a row passes them, as parse_stages gives it."""
    layout = setup.layout
    if layout.pipeline_model_parallel_layout:
        return parse_stages(layout.pipeline_model_parallel_layout)
    held = ["t" * count for count in decoder_layers_per_stage(layout, num_layers)]
    held[0] = "E" + held[0]
    held[-1] += "m" * setup.heads.layers + "L"
    return held


def _stage_memory(model: "_Model", virtual_stages: Sequence["_VirtualStage"], rank: int) -> StageMemory:
    """One rank of pipeline stage `rank`, which computes these virtual stages."""
    setup, pp = model.setup, model.setup.layout.pipeline_model_parallel_size
    parameters = sum((stage.parameters() for stage in virtual_stages), ParameterCount())
    trained = sum((stage.trained_parameters() for stage in virtual_stages), ParameterCount())
    passes = [stage.forward_pass() for stage in virtual_stages]
    waiting = _most_waiting([each.kept + each.logits for each in passes], rank, pp)
    logits = _bytes_in_flight(waiting, [each.logits for each in passes])
    return StageMemory(
        holds=" | ".join(stage.describe() for stage in virtual_stages),
        parameters=parameters.total,
        trained=trained,
        weights=parameters.total * setup.parameter_bytes,
        gradients=trained.total * FLOAT32,
        optimizer=_optimizer_bytes(trained, setup),
        activations=_bytes_in_flight(waiting, [each.kept for each in passes]),
        in_flight=sum(waiting),
        recomputed=max(each.recomputed for each in passes),
        logits=logits + max(each.passing_logits for each in passes),
    )


def _optimizer_bytes(trained: ParameterCount, setup: Setup) -> int:
    """AdamW's two moments, and float32 weights where the model's are not; shared out by a distributed optimizer."""
    per_parameter = 3 * FLOAT32 if setup.parameter_bytes < FLOAT32 else 2 * FLOAT32
    if not setup.use_distributed_optimizer:
        return trained.total * per_parameter
    layout = setup.layout
    # Ranks that have the same parameters; the same experts are on fewer, or on more, than the rest.
    dense_ranks = data_parallel_size(layout, setup.num_gpus) * layout.context_parallel_size
    per_replica = layout.expert_tensor_parallel_size * layout.expert_model_parallel_size
    expert_ranks = setup.num_gpus // (per_replica * layout.pipeline_model_parallel_size)
    return (_share(trained.dense, dense_ranks) + _share(trained.expert, expert_ranks)) * per_parameter


def _share(number: int, ranks: int) -> int:
    """An equal part, rounded up."""
    return -(-number // ranks)


def _most_waiting(sizes: Sequence[int], rank: int, pp: int) -> list[int]:
    """Forward passes of each virtual stage that wait for their backward pass when their bytes are highest.

    megatron-core's schedules. 1F1B: stage `rank` of `pp` runs pp - rank forward passes before its first backward pass.
    Interleaved: micro-batches pass in groups of `pp` through one virtual stage after another, and their backward passes
    in the opposite order; after some forward passes (the warm-up) each is followed by a backward pass. With enough
    micro-batches, that is: a step that has fewer needs less.

    The first of 2 ranks with 2 virtual stages, A and B, warms up with 2 * (2 - 0 - 1) + (2 - 1) * 2 = 4 passes:

        forward    A  A  B  B  A  A  B  B
        backward               B  B  A  A
        waiting A  1  2  2  2  3  4  4  3      counted before the backward pass of the same column
        waiting B  0  0  1  2  2  1  1  2

    Five passes wait at most, 3 of A and 2 of B; but 4 and 1 are more bytes if A keeps more than B.

    Args:
        sizes: bytes that one forward pass of each virtual stage keeps.
    """
    virtual = len(sizes)
    if virtual == 1:
        return [pp - rank]
    warmup = 2 * (pp - rank - 1) + (virtual - 1) * pp
    waiting, most = [0] * virtual, [0] * virtual
    for step in range(warmup + 2 * pp * virtual):
        forward = step // pp % virtual
        waiting[forward] += 1
        if _bytes_in_flight(waiting, sizes) > _bytes_in_flight(most, sizes):
            most = list(waiting)
        if step >= warmup:
            backward = virtual - 1 - (step - warmup) // pp % virtual
            waiting[backward] -= 1
    return most


def _bytes_in_flight(waiting: Sequence[int], sizes: Sequence[int]) -> int:
    return sum(number * size for number, size in zip(waiting, sizes, strict=True))


class _Model:
    """A model on one rank: what its parts outside the decoder layers count, in parameters and in bytes that autograd
    keeps."""

    def __init__(self, architecture: Architecture, setup: Setup):
        self.setup, self.rank = setup, rank_of(architecture, setup)
        self.architecture, self.layers, self.outside = architecture, architecture.layers, architecture.outside
        self.hidden = architecture.outside.hidden
        self.vocab = architecture.outside.local_vocab(self.rank)
        self.drafted = _share(len(setup.heads.draft_vocab), self.rank.tp)
        self.num_mtp_layers = setup.heads.layers
        self.is_trunk_frozen = setup.mtp_mode == "heads_only"

    @property
    def vocabularies(self) -> list[int]:
        """This rank's words of each loss that a backward pass begins from: the trunk's, then the heads'."""
        of_trunk = [] if self.is_trunk_frozen else [self.vocab]
        return of_trunk + [self.drafted or self.vocab] * self.num_mtp_layers

    def embedding(self) -> ParameterCount:
        """The embedding, or an output layer that is not tied to it."""
        return ParameterCount(self.vocab * self.hidden)

    def mtp_layer(self) -> ParameterCount:
        """An MTP layer: three norms and a projection around one more decoder layer."""
        frame = 3 * self.hidden + 2 * self.hidden * self.hidden // self.rank.tp
        return ParameterCount(frame) + self.architecture.mtp_block.parameters(self.rank)

    def head_rows(self) -> list[Row]:
        """The linear layers of a head, as adapters know them."""
        projection = Row("mtp.eh_proj.weight", {"mtp.fc.weight": (self.hidden, 2 * self.hidden)})
        return [projection, *lift(self.architecture.mtp_block.rows(), "mtp.", "mtp.")]

    def kept_layer(self, number: int) -> int:
        """Decoder layer `number`, with what its adapters keep."""
        layer, lora = self.layers[number], self.setup.lora
        rows = self.architecture.layer_rows(number)
        return layer.kept(self.rank) + (kept_products(layer, rows, lora, self.rank) if lora else 0)

    def kept_mtp_layer(self, head: int) -> int:
        """MTP layer number `head` (from 0): token ids, three norms, the projection's input, and its decoder layer."""
        rank = self.rank
        norms = 3 * rank.kept_norm(rank.sequence_tokens, self.hidden)
        ids = 8 * rank.tokens
        if self.is_trunk_frozen:
            # A frozen embedding and a frozen trunk want no gradient: of the norms over them only the weights learn.
            frozen_norms = 2 if head == 0 else 1
            if not rank.is_fused:  # which keep their input for the weights too
                norms -= frozen_norms * rank.sequence_tokens * FLOAT32 * (self.hidden + 1)
            ids = 0
        block, lora = self.architecture.mtp_block, self.setup.lora
        of_adapters = kept_products(block, self.head_rows(), lora, rank) if lora else 0
        return ids + norms + 2 * rank.kept_states(self.hidden) + block.kept(rank) + of_adapters

    def kept_loss(self) -> int:
        """One loss without its logits: states for the output layer's gradient, targets, weights; made in chunks, also
        the gradient of the states."""
        kept_states = (not self.is_trunk_frozen) + self.setup.is_fused
        return self.rank.tokens * (kept_states * self.hidden * self.rank.itemsize + 14)

    def kept_turns(self) -> int:
        """Cosines and sines of all positions, of which all layers take the same."""
        return 2 * self.rank.length * max(layer.attention.rotary for layer in self.layers) * self.rank.itemsize


def rank_of(architecture: Architecture, setup: Setup) -> Rank:
    layout, recompute = setup.layout, setup.recompute
    is_selective = recompute.recompute_granularity == "selective"
    return Rank(
        tp=layout.tensor_model_parallel_size,
        cp=layout.context_parallel_size,
        ep=layout.expert_model_parallel_size,
        etp=layout.expert_tensor_parallel_size,
        sequence_parallel=layout.sequence_parallel,
        itemsize=setup.parameter_bytes,
        rows=setup.micro_batch_size,
        length=setup.max_length // layout.context_parallel_size,
        zero_centered_norms=architecture.outside.mcore_config.get("layernorm_zero_centered_gamma", False),
        is_fused=setup.is_fused,
        recomputed=frozenset(recompute.recompute_modules if is_selective else ()),
    )


class _VirtualStage:
    """What one rank computes of a virtual stage.

    Args:
        holds: letters as in a layout string, "Ett" or "tmL".
        first_layer: number of its first decoder layer.
    """

    def __init__(self, model: _Model, holds: str, first_layer: int):
        self.model, self.holds = model, holds
        last_layer = first_layer + holds.count("t")
        self.layer_numbers = range(first_layer, last_layer)
        self.layers: Sequence[Layer] = model.layers[first_layer:last_layer]
        self.num_mtp_layers = holds.count("m")
        self.is_first, self.is_last = "E" in holds, "L" in holds
        ends_trunk = bool(self.layers) and last_layer == len(model.layers)
        # With MTP layers the final norm stands behind the last decoder layer, else before the loss.
        self.has_final_norm = ends_trunk if model.num_mtp_layers else self.is_last

    def describe(self) -> str:
        """Its letters, repetitions counted: "E t*2"."""
        words = []
        for letter, run in itertools.groupby(self.holds):
            count = len(list(run))
            words.append(letter if count == 1 else f"{letter}*{count}")
        return " ".join(words)

    def parameters(self) -> ParameterCount:
        model = self.model
        count = sum((layer.parameters(model.rank) for layer in self.layers), ParameterCount())
        has_embedding = self.is_first or self.num_mtp_layers > 0  # MTP layers look tokens up too
        if has_embedding:
            count += model.embedding()
        if self.is_last and not (model.outside.is_tied and has_embedding):
            count += model.embedding()
        if self.has_final_norm:
            count += ParameterCount(model.hidden)
        return count + self._mtp_parameters() + self._adapter_parameters()

    def trained_parameters(self) -> ParameterCount:
        lora = self.model.setup.lora
        if lora is None:
            return self._mtp_parameters() if self.model.is_trunk_frozen else self.parameters()
        heads = self._mtp_parameters() if lora.heads == "full" else ParameterCount()
        return self._adapter_parameters() + self._saved_parameters(lora) + heads

    def _adapter_parameters(self) -> ParameterCount:
        model, lora = self.model, self.model.setup.lora
        if lora is None:
            return ParameterCount()
        count = ParameterCount()
        for number in self.layer_numbers:
            count += adapter_parameters(model.architecture.layer_rows(number), lora, model.rank)
        if self.num_mtp_layers:
            count += adapter_parameters(model.head_rows(), lora, model.rank) * self.num_mtp_layers
        return count

    def _saved_parameters(self, lora: Lora) -> ParameterCount:
        """What of this stage learns in full beside adapters."""
        model = self.model
        rows = [*model.outside.rows(), *itertools.chain(*map(model.architecture.layer_rows, self.layer_numbers))]
        number = 0
        for name, parameters in saved_parameters(rows, lora, model.rank).items():
            has_embedding = self.is_first or self.num_mtp_layers > 0
            is_here = {
                "embedding.word_embeddings.weight": has_embedding,
                "output_layer.weight": self.is_last and not (model.outside.is_tied and has_embedding),
                "decoder.final_layernorm.weight": self.has_final_norm,
            }
            if is_here.get(name, True):
                number += parameters
        return ParameterCount(number)

    def _mtp_parameters(self) -> ParameterCount:
        return self.model.mtp_layer() * self.num_mtp_layers if self.num_mtp_layers else ParameterCount()

    def forward_pass(self) -> "_ForwardPass":
        model, rank = self.model, self.model.rank
        kept, recomputed = self._kept_layers()
        if self.layers or self.num_mtp_layers:
            kept += model.kept_turns()
        if not model.is_trunk_frozen:
            if self.is_first:
                kept += 8 * rank.tokens  # ids
            elif (
                rank.itemsize < FLOAT32 and not rank.is_fused and model.setup.recompute.recompute_granularity != "full"
            ):
                kept += rank.kept_states(model.hidden)  # from the stage before; float32 norms keep that very tensor
            if self.has_final_norm:
                kept += rank.kept_norm(rank.sequence_tokens, model.hidden)
        if not self.is_last:
            return _ForwardPass(kept, recomputed)
        vocabularies = model.vocabularies
        kept += len(vocabularies) * model.kept_loss()
        kept += model.drafted * model.hidden * rank.itemsize  # those rows of the output matrix
        at_once = min(rank.tokens, CHUNK) if rank.is_fused else rank.tokens
        num_logits = at_once * max(vocabularies, default=0)
        rounded = num_logits * rank.itemsize if rank.itemsize < FLOAT32 else 0
        if rank.is_fused:
            return _ForwardPass(kept, recomputed, passing_logits=num_logits * FLOAT32 + rounded)
        logits = rank.tokens * sum(vocabularies) * FLOAT32
        return _ForwardPass(kept, recomputed, logits=logits, passing_logits=rounded)

    def _kept_layers(self) -> tuple[int, int]:
        """Bytes kept of decoder and MTP layers, and the most that is computed again at one time."""
        model = self.model
        states = model.rank.kept_states(model.hidden)
        layers = [] if model.is_trunk_frozen else [model.kept_layer(number) for number in self.layer_numbers]
        mtp_layers = [model.kept_mtp_layer(head) for head in range(self.num_mtp_layers)]
        kept, again = _recompute(model.setup, layers, states)
        kept_of_mtp, again_of_mtp = _recompute(model.setup, mtp_layers, 2 * states)
        return kept + kept_of_mtp, max(again, again_of_mtp)


@dataclass(frozen=True)
class _ForwardPass:
    """Bytes of one forward pass of a virtual stage on one rank."""

    kept: int
    """Until its backward pass, without logits."""
    recomputed: int
    """The most that its backward pass computes again at one time."""
    logits: int = 0
    """The softmax of each loss, in float32, until its backward pass."""
    passing_logits: int = 0
    """Logits that are gone after a loss: of one loss before they are float32, or of one chunk of it."""


def _recompute(setup: Setup, layers: list[int], boundary: int) -> tuple[int, int]:
    """Bytes kept of consecutive layers, and the most that is computed again at one time.

    Args:
        layers: what each keeps if nothing is recomputed.
        boundary: bytes of the input of a span that is recomputed.
    """
    recompute, number = setup.recompute, setup.recompute.recompute_num_layers
    if recompute.recompute_granularity != "full" or not layers:
        return sum(layers), 0
    if recompute.distribute_saved_activations and not setup.layout.sequence_parallel:
        boundary //= setup.layout.tensor_model_parallel_size
    if recompute.recompute_method == "block":  # the first layers, each a span for itself
        return len(layers[:number]) * boundary + sum(layers[number:]), max(layers[:number])
    spans = [sum(layers[start : start + number]) for start in range(0, len(layers), number)]
    return len(spans) * boundary, max(spans)


# What to change


def usable_bytes(gpu_memory_gb: float) -> int:
    """Of a GPU's memory, what a run can count on."""
    return int(gpu_memory_gb * 1e9 * (1 - RESERVE))


def largest(memory: Sequence[StageMemory]) -> StageMemory:
    """The stage that needs most."""
    return max(memory, key=lambda stage: stage.total)


def suggest(hf_config: HfConfig, setup: Setup, gpu_memory_gb: float) -> Setup | None:
    """The setup nearest to this one that fits; with twice, four times ... as many GPUs if none does. None: not found.

    Tried in this order: sharing the optimizer state, recomputing, then more ranks per model, with and without
    recomputing.
    """
    architecture = architecture_of(hf_config)
    for doublings in range(8):
        num_gpus = setup.num_gpus << doublings
        for candidate in _candidates(architecture, dataclasses.replace(setup, num_gpus=num_gpus)):
            if largest(estimate_of(architecture, candidate)).total <= usable_bytes(gpu_memory_gb):
                return candidate
    return None


def _candidates(architecture: Architecture, setup: Setup) -> Iterator[Setup]:
    """Setups that the model allows on these GPUs, the cheapest in speed first."""
    full = RecomputeArgs(recompute_granularity="full")
    recomputes = [setup.recompute] if setup.recompute.recompute_granularity == "full" else [setup.recompute, full]
    for tp, ep, pp in _candidate_sizes(architecture, setup):
        layout = _resized(setup.layout, tp, ep, pp)
        if layout_problems(layout, architecture, setup.heads.layers) or process_problems(layout, setup.num_gpus):
            continue
        shares = setup.use_distributed_optimizer or setup.num_gpus > tp * pp  # else there is nobody to share with
        for recompute in recomputes:
            yield dataclasses.replace(setup, layout=layout, recompute=recompute, use_distributed_optimizer=shares)


def _candidate_sizes(architecture: Architecture, setup: Setup) -> list[tuple[int, int, int]]:
    """Tensor-, expert- and pipeline-parallel sizes, none below the present one."""
    layout = setup.layout
    powers = [1 << exponent for exponent in range(setup.num_gpus.bit_length())]
    most_tp = max(8, layout.tensor_model_parallel_size)  # the GPUs of one machine
    most_pp = min(setup.num_gpus, architecture.outside.num_layers)
    sizes = itertools.product(
        [size for size in powers if layout.tensor_model_parallel_size <= size <= most_tp],
        [size for size in powers if size >= layout.expert_model_parallel_size] if architecture.has_experts else [1],
        range(layout.pipeline_model_parallel_size, most_pp + 1),
    )
    # The fewer ranks share a model the more train different rows; a pipeline idles as well.
    return sorted(sizes, key=lambda size: (math.prod(size) * size[2], size[2]))


def _resized(layout: ParallelLayout, tp: int, ep: int, pp: int) -> ParallelLayout:
    if pp != layout.pipeline_model_parallel_size:
        layout = dataclasses.replace(  # what was said about other stages means nothing for these
            layout,
            pipeline_model_parallel_layout=None,
            num_virtual_stages_per_pipeline_rank=None,
            decoder_first_pipeline_num_layers=None,
            decoder_last_pipeline_num_layers=None,
        )
    return dataclasses.replace(
        layout,
        tensor_model_parallel_size=tp,
        sequence_parallel=tp > 1,
        expert_model_parallel_size=ep,
        pipeline_model_parallel_size=pp,
    )
