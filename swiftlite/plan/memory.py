"""How much memory a rank of a training run needs: `doctor --plan`. Arithmetic on config.json and options, no torch.

Parameters, gradients and optimizer state are counted exactly (but for the padding of the distributed optimizer's
buffers, a few kilobytes). Activations are the tensors that autograd keeps in our own model (`swiftlite/model`), written
down module by module as `saved_tensors_hooks` shows them; `scripts/bench/memory.py` measures both. With Transformer
Engine's fused layers they are fewer.

Not counted: the CUDA context, NCCL's buffers, the allocator's fragments (`RESERVE`), and one layer's gradients in the
backward pass.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from swiftlite.args.commands import DoctorArgs
from swiftlite.args.fields import MtpMode, ParallelLayout, RecomputeArgs
from swiftlite.errors import UserError
from swiftlite.heads import Heads
from swiftlite.plan.layout import (
    data_parallel_size,
    decoder_layers_per_stage,
    group_of,
    layout_of,
    layout_problems,
    num_experts,
    parse_stages,
    process_problems,
)

FLOAT32 = 4
# Part of a GPU's memory that is left for the CUDA context, NCCL's buffers and what the allocator cannot use.
RESERVE = 0.08
# Every model_type whose modules are known here, and what the config does not say: (biases on q, k, v; norms on q, k).
_ATTENTION = {
    "llama": (False, False),
    "qwen2": (True, False),
    "mimo": (True, False),
    "qwen3": (False, True),
    "qwen3_moe": (False, True),
    "glm4_moe": (None, None),  # attention_bias, use_qk_norm
    "deepseek_v3": (False, False),
}


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


def planned_setup(args: DoctorArgs, hf_config: Mapping[str, Any]) -> Setup:
    """What the options of `doctor --plan` say; the fewest GPUs that the layout takes if they do not."""
    layout = layout_of(args)
    per_replica = layout.tensor_model_parallel_size * layout.context_parallel_size
    per_experts = layout.expert_tensor_parallel_size * layout.expert_model_parallel_size
    layers = Heads.from_config(hf_config).layers
    return Setup(
        layout=layout,
        recompute=group_of(args, RecomputeArgs),
        num_gpus=args.num_gpus or math.lcm(per_replica, per_experts) * layout.pipeline_model_parallel_size,
        use_distributed_optimizer=args.use_distributed_optimizer,
        micro_batch_size=args.micro_batch_size,
        max_length=args.max_length,
        parameter_bytes=2 if args.torch_dtype == "bfloat16" else FLOAT32,
        heads=Heads(layers if args.mtp_num_layers is None else args.mtp_num_layers),
        mtp_mode=args.mtp_mode,
    )


@dataclass(frozen=True)
class StageMemory:
    """One rank of one pipeline stage. Everything but `parameters` is in bytes."""

    holds: str
    """Its virtual stages, as in a layout string: "E t*4" or "t*2 | t*2 m L"."""
    parameters: int
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


@dataclass(frozen=True)
class _Count:
    """Parameters of one rank: those that every rank of the expert-parallel group holds, and those of its experts."""

    dense: int = 0
    expert: int = 0

    def __add__(self, other: "_Count") -> "_Count":
        return _Count(self.dense + other.dense, self.expert + other.expert)

    def __mul__(self, times: int) -> "_Count":
        return _Count(self.dense * times, self.expert * times)

    @property
    def total(self) -> int:
        return self.dense + self.expert


def estimate(hf_config: Mapping[str, Any], setup: Setup) -> list[StageMemory]:
    """The memory of a rank on each pipeline stage; the layout has passed `layout_problems` and `process_problems`.

    Args:
        hf_config: config.json.

    Raises:
        UserError: a model_type that is not known here.
    """
    model = ModelSizes(hf_config, setup)
    chunks = [_Chunk(model, stage) for stage in stages(setup, model.num_layers)]
    pp = setup.layout.pipeline_model_parallel_size
    return [_stage_memory(model, chunks[rank::pp], rank, pp) for rank in range(pp)]


def stages(setup: Setup, num_layers: int) -> list[str]:
    """What each virtual stage holds, in the order in which a row passes them, as parse_stages gives it."""
    layout, depth = setup.layout, setup.heads.layers
    if layout.pipeline_model_parallel_layout:
        return parse_stages(layout.pipeline_model_parallel_layout)
    held = ["t" * count for count in decoder_layers_per_stage(layout, num_layers)]
    held[0] = "E" + held[0]
    held[-1] += "m" * depth + "L"
    return held


class ModelSizes:
    """Sizes of one rank's modules, and what each counts: parameters, and bytes that autograd keeps of it."""

    def __init__(self, hf_config: Mapping[str, Any], setup: Setup):
        model_type = str(hf_config.get("model_type"))
        if model_type not in _ATTENTION:
            raise UserError(f"model_type {model_type!r}: its memory is not known", f"known: {', '.join(_ATTENTION)}")
        layout = setup.layout
        self.config, self.setup, self.recompute = hf_config, setup, setup.recompute
        self.tp, self.etp = layout.tensor_model_parallel_size, layout.expert_tensor_parallel_size
        self.num_layers: int = hf_config["num_hidden_layers"]
        self.depth = setup.heads.layers
        self.heads_only = setup.mtp_mode == "heads_only"
        self.tied = bool(hf_config.get("tie_word_embeddings"))
        self.hidden: int = hf_config["hidden_size"]
        self.vocab = -(-hf_config["vocab_size"] // self.tp)

        data_parallel = data_parallel_size(layout, setup.num_gpus)
        self.dense_shards = data_parallel * layout.context_parallel_size
        self.expert_shards = setup.num_gpus // (
            self.etp * layout.expert_model_parallel_size * layout.pipeline_model_parallel_size
        )

        heads: int = hf_config["num_attention_heads"]
        self.heads = heads // self.tp
        self.groups = (hf_config.get("num_key_value_heads") or heads) // self.tp
        self.head_dim: int = hf_config.get("head_dim") or self.hidden // heads
        bias, norm = _ATTENTION[model_type]
        self.qkv_bias = bool(hf_config.get("attention_bias")) if bias is None else bias
        self.qk_norm = bool(hf_config.get("use_qk_norm")) if norm is None else norm
        self.is_latent = bool(hf_config.get("kv_lora_rank"))
        self.rotary: int = hf_config.get("qk_rope_head_dim") or int(
            self.head_dim * hf_config.get("partial_rotary_factor", 1)
        )

        self.experts = num_experts(hf_config)
        self.local_experts = self.experts // layout.expert_model_parallel_size
        self.topk: int = hf_config.get("num_experts_per_tok") or 0
        expert_ffn: int = hf_config.get("moe_intermediate_size") or 0
        self.ffn = hf_config["intermediate_size"] // self.tp
        self.expert_ffn = expert_ffn // self.etp
        self.shared_ffn = expert_ffn * (hf_config.get("n_shared_experts") or 0) // self.tp

        self.itemsize = setup.parameter_bytes
        self.length = setup.max_length // layout.context_parallel_size
        self.tokens = setup.micro_batch_size * self.length
        self.sequence_tokens = self.tokens // self.tp if layout.sequence_parallel else self.tokens

    # Parameters

    def is_moe(self, layer: int) -> bool:
        """Whether decoder layer `layer` (from 0) has experts."""
        if not self.experts:
            return False
        config = self.config
        if "first_k_dense_replace" in config:
            return layer >= config["first_k_dense_replace"]
        return layer not in (config.get("mlp_only_layers") or []) and not (layer + 1) % config.get(
            "decoder_sparse_step", 1
        )

    def layer(self, is_moe: bool) -> _Count:
        return _Count(2 * self.hidden + self._attention()) + (self._mixture() if is_moe else _Count(self.mlp(self.ffn)))

    def mtp_layer(self) -> _Count:
        """A head: its block is one more decoder layer."""
        frame = 3 * self.hidden + 2 * self.hidden * self.hidden // self.tp
        return _Count(frame) + self.layer(self.is_moe(self.num_layers - 1))

    def attention_matrices(self) -> int:
        """Parameters of attention that a token is multiplied with."""
        hidden = self.hidden
        if self.is_latent:
            config, tp = self.config, self.tp
            q_rank, kv_rank, rope = config.get("q_lora_rank"), config["kv_lora_rank"], config["qk_rope_head_dim"]
            q, kv = self.heads * self.key_size, self.heads * (config["qk_nope_head_dim"] + self.value_size)
            queries = q_rank // tp * hidden + q * q_rank if q_rank else q * hidden
            return queries + (kv_rank + rope) // tp * hidden + kv * kv_rank + hidden * self.heads * self.value_size
        return (2 * self.heads + 2 * self.groups) * self.head_dim * hidden

    def _attention(self) -> int:
        if self.is_latent:
            vectors = (self.config.get("q_lora_rank") or 0) + self.config["kv_lora_rank"]
        else:
            biases = (self.heads + 2 * self.groups) * self.head_dim if self.qkv_bias else 0
            vectors = biases + (2 * self.head_dim if self.qk_norm else 0)
        return self.attention_matrices() + vectors

    @property
    def key_size(self) -> int:
        """Of a head; a query has as many numbers."""
        return self.config["qk_nope_head_dim"] + self.config["qk_rope_head_dim"] if self.is_latent else self.head_dim

    @property
    def value_size(self) -> int:
        """Of a head."""
        return self.config["v_head_dim"] if self.is_latent else self.head_dim

    def mlp(self, ffn: int) -> int:
        return 3 * self.hidden * ffn

    def _mixture(self) -> _Count:
        router = self.experts * self.hidden
        return _Count(router + self.mlp(self.shared_ffn), self.local_experts * self.mlp(self.expert_ffn))

    # What autograd keeps, in bytes

    def kept_norm(self, tokens: int, width: int) -> int:
        """The input in float32, its scale, and the result before the weight."""
        return tokens * ((FLOAT32 + self.itemsize) * width + FLOAT32)

    def kept_hidden(self) -> int:
        return self.sequence_tokens * self.hidden * self.itemsize

    def kept_layer(self, is_moe: bool) -> int:
        mlp = self._kept_mixture() if is_moe else self._kept_mlp(self.ffn)
        modules = self.recompute.recompute_modules if self.recompute.recompute_granularity == "selective" else []
        if ("moe" if is_moe else "mlp") in modules:
            mlp = 0
        norms = 2 * self.kept_norm(self.sequence_tokens, self.hidden)
        return norms + 2 * self.kept_hidden() + self._kept_attention(modules) + mlp

    def kept_mtp_layer(self, depth: int) -> int:
        """Head number `depth` (from 0): token ids, three norms, the projection's input, and its block."""
        norms = 3 * self.kept_norm(self.sequence_tokens, self.hidden)
        ids = 8 * self.tokens
        if self.heads_only:
            # A frozen embedding and a frozen trunk want no gradient: of the norms over them only the weights learn.
            frozen_norms = 2 if depth == 0 else 1
            norms -= frozen_norms * self.sequence_tokens * FLOAT32 * (self.hidden + 1)
            ids = 0
        return ids + norms + 2 * self.kept_hidden() + self.kept_layer(self.is_moe(self.num_layers - 1))

    def kept_head(self) -> int:
        """The loss of one head without its logits: states for the output layer's gradient, targets, weights."""
        states = 0 if self.heads_only else self.hidden * self.itemsize
        return self.tokens * (states + 14)

    def kept_angles(self) -> int:
        """Rotary angles of all positions, which every span that is recomputed takes."""
        return self.length * self.rotary * FLOAT32

    def kept_logits(self) -> int:
        """The softmax of one head, in float32."""
        return self.tokens * self.vocab * FLOAT32

    def passing_logits(self) -> int:
        """The same before they are float32, gone after the loss."""
        return self.tokens * self.vocab * self.itemsize if self.itemsize < FLOAT32 else 0

    def _kept_attention(self, modules: Sequence[str]) -> int:
        """All after the first projection's input; the result is kept once, by the attention and the last projection."""
        tokens, itemsize = self.tokens, self.itemsize
        cp = self.setup.layout.context_parallel_size
        angles = 4 * self.length * self.rotary  # cosines and sines, of queries and of keys
        statistics = 0 if "core_attn" in modules else tokens * self.heads * FLOAT32
        if self.is_latent:
            config = self.config
            q_rank, kv_rank, value = config.get("q_lora_rank") or 0, config["kv_lora_rank"], config["v_head_dim"]
            down = sum(
                self.kept_norm(self.sequence_tokens, rank) + self.sequence_tokens * rank * itemsize
                for rank in (q_rank, kv_rank)
                if rank
            )
            # Queries, and keys and values of all context-parallel ranks, each a copy of its own: what a fused kernel
            # keeps. On a CPU that takes equal sizes of keys and values; others keep the matrix of scores there.
            up = self.heads * (self.key_size + cp * (self.key_size + value))
            if "mla_up_proj" in modules:
                up = 0
            return down + statistics + itemsize * (angles + tokens * (up + self.heads * value))
        q, kv = self.heads * self.head_dim, self.groups * self.head_dim
        norms = 0
        if self.qk_norm:
            norms = self.kept_norm(tokens * self.heads, self.head_dim) + self.kept_norm(
                tokens * self.groups, self.head_dim
            )
            if itemsize == FLOAT32 and cp == 1:
                norms -= tokens * kv * FLOAT32  # the norm's input and the values are views of one tensor
        # Queries, keys, the result; and the values, a view of what the projection made, so all of that stays.
        # With context parallelism keys and values come from all its ranks, in tensors of their own.
        core = 2 * q + (2 * kv * cp if cp > 1 else q + 3 * kv)
        return norms + statistics + itemsize * (angles + tokens * core)

    def _kept_mlp(self, ffn: int) -> int:
        """Gate and up in one tensor, the gate's activation, up + 0 (an offset that other models have), the product."""
        return self.tokens * 5 * ffn * self.itemsize

    def _kept_mixture(self) -> int:
        """As if the router gave every rank the same number of tokens."""
        tokens, topk = self.sequence_tokens * self.etp, self.topk
        scores = self.sequence_tokens * (9 * self.experts + 20 * topk + 4)  # float32, indices and masks
        # As the MLP, once more times the router's weight.
        experts = tokens * topk * (self.itemsize * (self.hidden + 6 * self.expert_ffn) + FLOAT32)
        return scores + experts + self._kept_mlp(self.shared_ffn)


class _Chunk:
    """One virtual stage."""

    def __init__(self, model: ModelSizes, holds: str):
        self.model, self.holds = model, holds
        self.num_layers, self.depth = holds.count("t"), holds.count("m")
        self.is_first, self.is_last = "E" in holds, "L" in holds

    def describe(self) -> str:
        return " ".join(
            letter if (count := len(list(run))) == 1 else f"{letter}*{count}"
            for letter, run in itertools.groupby(self.holds)
        )

    def count(self, first_layer: int) -> tuple[_Count, _Count]:
        """Parameters, and those among them that train; its decoder layers begin with number `first_layer`."""
        model = self.model
        layers = range(first_layer, first_layer + self.num_layers)
        trunk = sum((model.layer(model.is_moe(layer)) for layer in layers), _Count())
        vocabulary = _Count(model.vocab * model.hidden)
        if self.is_first or self.depth:  # MTP layers look tokens up too
            trunk += vocabulary
        if self.is_last and not (model.tied and (self.is_first or self.depth)):
            trunk += vocabulary
        # With heads the final norm stands with the last decoder layer, else with the loss.
        if (self.num_layers and layers[-1] == model.num_layers - 1) if model.depth else self.is_last:
            trunk += _Count(model.hidden)
        heads = model.mtp_layer() * self.depth
        return trunk + heads, heads if model.heads_only else trunk + heads

    def kept(self, first_layer: int) -> tuple[int, int]:
        """Bytes that one forward pass keeps until its backward pass, and beside them the most for recomputing."""
        model = self.model
        kept = working = 0
        if not model.heads_only:
            blocks = [model.kept_layer(model.is_moe(first_layer + n)) for n in range(self.num_layers)]
            kept, working = self._recomputed(blocks, model.kept_hidden())
            if self.is_first:
                kept += 8 * model.tokens
            elif model.itemsize < FLOAT32 and model.recompute.recompute_granularity != "full":
                kept += model.kept_hidden()  # what came from the stage before; float32 norms keep that very tensor
            if (self.num_layers and first_layer + self.num_layers == model.num_layers) or (
                self.is_last and not model.depth
            ):
                kept += model.kept_norm(model.sequence_tokens, model.hidden)
        if self.depth:
            blocks = [model.kept_mtp_layer(depth) for depth in range(self.depth)]
            heads, at_work = self._recomputed(blocks, 2 * model.kept_hidden())
            kept, working = kept + heads, max(working, at_work)
        if working:
            kept += model.kept_angles()
        if self.is_last:
            kept += (model.depth + (not model.heads_only)) * model.kept_head()
        return kept, working

    def _recomputed(self, blocks: list[int], boundary: int) -> tuple[int, int]:
        """What is kept of these blocks, and the most that is computed again at one time."""
        recompute, number = self.model.recompute, self.model.recompute.recompute_num_layers
        if recompute.recompute_granularity != "full" or not blocks:
            return sum(blocks), 0
        if recompute.distribute_saved_activations and not self.model.setup.layout.sequence_parallel:
            boundary //= self.model.tp
        if recompute.recompute_method == "block":
            return len(blocks[:number]) * boundary + sum(blocks[number:]), max(blocks[:number])
        spans = [sum(blocks[start : start + number]) for start in range(0, len(blocks), number)]
        return len(spans) * boundary, max(spans)

    def logits(self) -> tuple[int, int]:
        """Bytes that one forward pass keeps of the logits, and the copy that passes."""
        if not self.is_last:
            return 0, 0
        model = self.model
        kept = model.depth + (not model.heads_only)
        return kept * model.kept_logits(), model.passing_logits()


def _stage_memory(model: ModelSizes, chunks: list[_Chunk], rank: int, pp: int) -> StageMemory:
    firsts = _first_layers(model, pp)[rank::pp]
    parameters, trained, kept, working, logits, passing = _Count(), _Count(), [], [], [], []
    for chunk, first in zip(chunks, firsts, strict=True):
        held, learns = chunk.count(first)
        parameters, trained = parameters + held, trained + learns
        for amounts, (stays, passes) in (((kept, working), chunk.kept(first)), ((logits, passing), chunk.logits())):
            amounts[0].append(stays)
            amounts[1].append(passes)
    state = 2 * FLOAT32 + (FLOAT32 if model.itemsize < FLOAT32 else 0)
    if model.setup.use_distributed_optimizer:
        optimizer = -(-trained.dense // model.dense_shards) + -(-trained.expert // model.expert_shards)
    else:
        optimizer = trained.total
    waiting = _most_waiting([a + b for a, b in zip(kept, logits, strict=True)], rank, pp)
    return StageMemory(
        holds=" | ".join(chunk.describe() for chunk in chunks),
        parameters=parameters.total,
        weights=parameters.total * model.itemsize,
        gradients=trained.total * FLOAT32,
        optimizer=optimizer * state,
        activations=sum(n * each for n, each in zip(waiting, kept, strict=True)),
        in_flight=sum(waiting),
        recomputed=max(working),
        logits=sum(n * each for n, each in zip(waiting, logits, strict=True)) + max(passing),
    )


def _first_layers(model: ModelSizes, pp: int) -> list[int]:
    """The number of the first decoder layer of every virtual stage."""
    counts = [stage.count("t") for stage in stages(model.setup, model.num_layers)]
    return [0, *itertools.accumulate(counts)][: len(counts)]


def _most_waiting(sizes: Sequence[int], rank: int, pp: int) -> list[int]:
    """Forward passes of each virtual stage that wait for their backward pass when their bytes are highest.

    megatron-core's schedules: 1F1B, in which stage `rank` of `pp` runs pp - rank forward passes before its first
    backward pass, and its interleaved form, in which micro-batches pass in groups of `pp` through one virtual stage
    after another. With enough micro-batches, that is: a step that has fewer needs less.

    Args:
        sizes: bytes that one forward pass of each virtual stage keeps.
    """
    virtual = len(sizes)
    if virtual == 1:
        return [pp - rank]
    warmup = 2 * (pp - rank - 1) + (virtual - 1) * pp
    waiting, most = [0] * virtual, [0] * virtual
    for step in range(warmup + 2 * pp * virtual):
        waiting[step // pp % virtual] += 1
        if sum(map(_times, waiting, sizes)) > sum(map(_times, most, sizes)):
            most = list(waiting)
        if step >= warmup:
            waiting[virtual - 1 - (step - warmup) // pp % virtual] -= 1
    return most


def _times(number: int, size: int) -> int:
    return number * size


# What to change


def usable_bytes(gpu_memory_gb: float) -> int:
    """Of a GPU's memory, what a run can count on."""
    return int(gpu_memory_gb * 1e9 * (1 - RESERVE))


def largest(memory: Sequence[StageMemory]) -> StageMemory:
    """The stage that needs most."""
    return max(memory, key=lambda stage: stage.total)


def suggest(hf_config: Mapping[str, Any], setup: Setup, gpu_memory_gb: float) -> Setup | None:
    """The setup nearest to this one that fits; with twice, four times ... as many GPUs if none does. None: not found.

    Tried in this order: sharing the optimizer state, recomputing, then more ranks per model, with and without
    recomputing.
    """
    for doublings in range(8):
        num_gpus = setup.num_gpus << doublings
        for candidate in _candidates(hf_config, dataclasses.replace(setup, num_gpus=num_gpus)):
            if largest(estimate(hf_config, candidate)).total <= usable_bytes(gpu_memory_gb):
                return candidate
    return None


def _candidates(hf_config: Mapping[str, Any], setup: Setup) -> Iterator[Setup]:
    """Setups that the model allows on these GPUs, the cheapest in speed first."""
    layout = setup.layout
    full = RecomputeArgs(recompute_granularity="full")
    recomputes = [setup.recompute] if setup.recompute.recompute_granularity == "full" else [setup.recompute, full]
    powers = [1 << n for n in range(setup.num_gpus.bit_length())]
    sizes = itertools.product(
        [n for n in powers if layout.tensor_model_parallel_size <= n <= max(8, layout.tensor_model_parallel_size)],
        [n for n in powers if n >= layout.expert_model_parallel_size] if num_experts(hf_config) else [1],
        range(layout.pipeline_model_parallel_size, min(setup.num_gpus, hf_config["num_hidden_layers"]) + 1),
    )
    # The fewer ranks share a model the more train different rows; a pipeline idles as well.
    ordered = sorted(sizes, key=lambda size: (math.prod(size) * size[2], size[2]))
    for (tp, ep, pp), recompute in itertools.product(ordered, recomputes):
        changed = dataclasses.replace(
            layout,
            tensor_model_parallel_size=tp,
            sequence_parallel=tp > 1,
            expert_model_parallel_size=ep,
            pipeline_model_parallel_size=pp,
        )
        if pp != layout.pipeline_model_parallel_size:  # what was said about other stages means nothing for these
            changed = dataclasses.replace(
                changed,
                pipeline_model_parallel_layout=None,
                num_virtual_stages_per_pipeline_rank=None,
                decoder_first_pipeline_num_layers=None,
                decoder_last_pipeline_num_layers=None,
            )
        if layout_problems(changed, hf_config, setup.heads.layers):
            continue
        if process_problems(changed, setup.num_gpus):
            continue
        shares = setup.use_distributed_optimizer or setup.num_gpus > tp * pp  # else there is nobody to share with
        yield dataclasses.replace(setup, layout=changed, recompute=recompute, use_distributed_optimizer=shares)
