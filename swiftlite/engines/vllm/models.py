"""Model classes of vLLM for checkpoints with MTP heads, and draft models that run the heads.

`plugin.py` registers the classes. Those that differ from others only in names of vLLM's classes are made from the files
of families when vLLM looks them up (`__getattr__`).

Shapes: T tokens of all requests of a batch, H hidden size.
"""

import inspect
from collections.abc import Callable, Iterator
from copy import copy, deepcopy
from functools import partial
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import nn
from vllm.compilation.decorators import support_torch_compile
from vllm.config import VllmConfig
from vllm.distributed import (
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
    tensor_model_parallel_all_reduce,
)
from vllm.model_executor.layers.fused_moe import fused_moe_make_expert_params_mapping
from vllm.model_executor.layers.fused_moe.router.cpu_router import CPURouter
from vllm.model_executor.layers.layernorm import GemmaRMSNorm, RMSNorm
from vllm.model_executor.layers.linear import ReplicatedLinear
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.rotary_embedding import get_rope
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.model_loader.mtp_validation import is_mtp_completeness_check_enabled
from vllm.model_executor.model_loader.weight_utils import default_weight_loader
from vllm.model_executor.models import (
    ernie45_moe,
    ernie_mtp,
    exaone4,
    gemma3,
    gemma4,
    gpt_oss,
    llama,
    minimax_m2,
    olmo_hybrid,
    qwen3_moe,
    step3p5,
)
from vllm.model_executor.models.utils import maybe_prefix
from vllm.sequence import IntermediateTensors

from swiftlite.engines.loading.head_weights import (
    FUSED_MODULES,
    PACKED_MODULES,
    ExpertMapping,
    Trunk,
    Weights,
    changed,
    fill,
    heads_of,
    own_sinks,
    single_experts,
    without_final_norm,
)
from swiftlite.engines.loading.no_rotary import NoRotaryEmbedding
from swiftlite.engines.loading.plugin_classes import class_of
from swiftlite.engines.vllm.ngram_drafts import head_tokens
from swiftlite.engines.vllm.plugin import PLUGIN_DRAFTS, check_draft_steps


class Ernie4_5_MoeForCausalLM(ernie45_moe.Ernie4_5_MoeForCausalLM):
    """The trunk of ERNIE 4.5 with experts. On a CPU, vLLM's class ignores the biases of routers.

    vLLM's router for a CPU (fused_moe/router/cpu_router.py of 0.32) supports such a bias only for groups of experts.
    """

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = ""):
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        for module in self.modules():
            if isinstance(module, ernie45_moe.Ernie4_5_MoeMoE):
                gate: Any = module.gate
                _set_route(module.experts, gate.e_score_correction_bias, partial(torch.softmax, dim=-1))


def _set_route(experts: Any, bias_E: torch.Tensor, score: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Let vLLM's router for a CPU select experts by their scores plus a bias, which it supports only for groups."""
    # Routers for GPUs read the bias themselves.
    if isinstance(experts.router, CPURouter):
        scale = experts.router.routed_scaling_factor
        experts.router.custom_routing_function = partial(_route, bias_E, score, scale)


def _route(
    bias_E: torch.Tensor,
    score: Callable[[torch.Tensor], torch.Tensor],
    scale: float,
    hidden_states: torch.Tensor,
    gating_output: torch.Tensor,
    topk: int,
    renormalize: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return weights and experts [T, topk] of a router with logits [T, E] and a bias for the selection.

    Args:
        scale: factor of the weights.
    """
    # As _grouped_topk in cpu_router.py, without groups: scores with the bias select, those without it weigh.
    scores_TE = score(gating_output.float())
    expert_TK = (scores_TE + bias_E).topk(topk, dim=-1).indices
    weight_TK = scores_TE.gather(1, expert_TK)
    if renormalize:
        weight_TK = weight_TK / weight_TK.sum(dim=-1, keepdim=True)
    return weight_TK * scale, expert_TK


class Step3p5ForCausalLM(step3p5.Step3p5ForCausalLM):
    """The trunk of Step-3.5. vLLM's router for a CPU supports sigmoids only for groups of experts."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = ""):
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        for module in self.modules():
            if isinstance(module, step3p5.FusedMoEBlock):
                _set_route(module.experts, module.router_bias, torch.sigmoid)


class MiniMaxM2ForCausalLM(Trunk, minimax_m2.MiniMaxM2ForCausalLM):
    """The trunk of a checkpoint with MTP heads. vLLM 0.32 ignores `tie_word_embeddings`."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = ""):
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        _select_by_sigmoids(self)
        if self.config.tie_word_embeddings:
            output_layer: Any = self.lm_head
            self.lm_head = output_layer.tie_weights(self.model.embed_tokens)


def _select_by_sigmoids(model: nn.Module) -> None:
    """Let MiniMax-M2's routers run on a CPU: vLLM's router for a CPU supports sigmoids only for groups of experts."""
    for module in model.modules():
        if isinstance(module, minimax_m2.MiniMaxM2MoE):
            bias_E: Any = module.e_score_correction_bias
            _set_route(module.experts, bias_E, torch.sigmoid)


class MtpFrame(nn.Module):
    """The modules of a head except its decoder layer, with the names of Qwen3-Next.

    Args:
        norm: class of the norms.
    """

    def __init__(self, hidden_size: int, eps: float, norm: Any = RMSNorm):
        super().__init__()
        self.pre_fc_norm_embedding = norm(hidden_size, eps=eps)
        self.pre_fc_norm_hidden = norm(hidden_size, eps=eps)
        self.fc = ReplicatedLinear(2 * hidden_size, hidden_size, bias=False, return_bias=False)
        self.norm = norm(hidden_size, eps=eps)


def _runs_one_head(vllm_config: VllmConfig) -> bool:
    """Return whether every draft step runs the same head.

    vLLM does not check whether a compiled graph is valid for new arguments (compilation/wrapper.py of 0.32). With
    several heads, the graph that was compiled for one head would therefore run for all heads.
    """
    speculative = vllm_config.speculative_config
    return speculative is None or not speculative.use_multi_module_mtp()


# Positions are [T], or [3, T] in vision-language models. The other arguments start with T.
@support_torch_compile(
    dynamic_arg_dims={"ids_T": 0, "positions_T": -1, "hidden_TH": 0, "embedding_TH": 0}, enable_if=_runs_one_head
)
class MtpHeads(nn.Module):
    """All heads of a checkpoint: for each depth an `MtpFrame` and a decoder layer, and the trunk's embedding.

    vLLM compiles this module like the trunk, unless eager mode is enforced or several heads draft. The module includes
    the embedding, because a captured CUDA graph reads its inputs at fixed addresses: vLLM keeps token ids at a fixed
    address, but not embeddings.

    Args:
        vllm_config: vLLM's config, which `support_torch_compile` reads.
        config: config of the draft model.
        layers: one decoder layer per depth.
        embedding_multiplier: factor of embeddings.
        norm: class of the norms.
    """

    def __init__(
        self,
        *,
        vllm_config: VllmConfig,
        config: Any,
        layers: list[nn.Module],
        embedding_multiplier: float,
        norm: Any,
    ):
        super().__init__()
        self.embed_tokens = VocabParallelEmbedding(config.vocab_size, config.hidden_size)
        self.embedding_multiplier = embedding_multiplier
        self.heads = nn.ModuleList(MtpFrame(config.hidden_size, config.rms_norm_eps, norm) for _ in layers)
        self.layers = nn.ModuleList(layers)
        # Other layers of vLLM add their output to the residual themselves.
        self.layer_returns_residual = all("residual" in inspect.signature(layer.forward).parameters for layer in layers)

    def forward(
        self,
        ids_T: torch.Tensor | None,
        positions_T: torch.Tensor,
        hidden_TH: torch.Tensor,
        embedding_TH: torch.Tensor | None,
        depth: int,
    ) -> torch.Tensor:
        """Return the state [T, H] after the head's output norm. Exactly one of `ids_T` and `embedding_TH` is given."""
        read_TH: torch.Tensor = self.embed_tokens(ids_T) if embedding_TH is None else embedding_TH
        frame: Any = self.heads[depth]
        parts = (frame.pre_fc_norm_embedding(read_TH * self.embedding_multiplier), frame.pre_fc_norm_hidden(hidden_TH))
        # In this order: files have the columns of the embedding first.
        hidden_TH = frame.fc(torch.cat(parts, dim=-1))
        layer = self.layers[depth]
        if not self.layer_returns_residual:
            return frame.norm(layer(positions=positions_T, hidden_states=hidden_TH))
        hidden_TH, residual_TH = layer(positions=positions_T, hidden_states=hidden_TH, residual=None)
        return frame.norm(hidden_TH, residual_TH)[0]


class MtpDraft(nn.Module):
    """A draft model that vLLM runs after each pass of the trunk, with the trunk's embedding and output layer.

    The head of depth k runs at draft step k, as vLLM's multi-module speculator requires. vLLM's older model runner,
    which is used without Triton (for example on a CPU), silently runs the first head at every step. Checkpoints with
    several heads are therefore rejected if that runner is used.

    Raises:
        ValueError: there are more steps than heads, or the tensors do not match config.json.
    """

    layer_class: ClassVar[Any]
    norm_class: ClassVar[Any] = RMSNorm
    expert_matrices: ClassVar[tuple[str, ...]] = ()
    """As in `PluginClasses`."""
    packed_modules_mapping = PACKED_MODULES

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = ""):
        super().__init__()
        # Heads read the config of the draft model, as `hf_config_override` in plugin.py returns it.
        # Its model_config is that of the target.
        speculative = vllm_config.speculative_config
        assert speculative is not None
        config: Any = speculative.draft_model_config.hf_config
        self.config = config
        depth = heads_of(config).layers
        # Not num_speculative_tokens, which with drafts from the text is their number.
        check_draft_steps(head_tokens(vllm_config), depth, runs_all_heads=vllm_config.use_v2_model_runner)
        # KV caches have the names of layers, which must differ from the trunk's model.layers.*.
        layers = [self.make_layer(vllm_config, maybe_prefix(prefix, f"mtp.layers.{k}")) for k in range(depth)]
        self.model = MtpHeads(
            vllm_config=vllm_config,
            config=config,
            layers=layers,
            embedding_multiplier=self.embedding_multiplier,
            norm=self.norm_class,
        )
        self.add_output_layer(prefix)
        if config.tie_word_embeddings:
            self.lm_head = self.lm_head.tie_weights(self.model.embed_tokens)

    def add_output_layer(self, prefix: str) -> None:
        """Create what `compute_logits` uses, for `self.config`."""
        config = self.config
        self.lm_head: Any = ParallelLMHead(
            config.vocab_size, config.hidden_size, prefix=maybe_prefix(prefix, "lm_head")
        )
        self.logits_scale = 1.0 / getattr(config, "logits_scaling", 1.0)
        cap: float | None = getattr(config, "final_logit_softcapping", None)
        self.logits_cap = cap
        self.logits_processor = LogitsProcessor(config.vocab_size, scale=self.logits_scale, soft_cap=cap)
        self._drafted = torch.tensor(heads_of(config).draft_vocab, dtype=torch.int64)
        self._drafted_rows: torch.Tensor | None = None  # rows of lm_head, which is set to the trunk's after loading

    @property
    def embedding_multiplier(self) -> float:
        """Factor of embeddings."""
        return getattr(self.config, "embedding_multiplier", 1.0)

    def make_layer(self, vllm_config: VllmConfig, prefix: str) -> nn.Module:
        """Create a decoder layer of the trunk's kind. The classes of vLLM's layers have some of these arguments."""
        arguments = {
            "vllm_config": vllm_config,
            "config": self.config,
            "cache_config": vllm_config.cache_config,
            "quant_config": vllm_config.quant_config,
            "prefix": prefix,
        }
        accepted = inspect.signature(self.layer_class).parameters
        return self.layer_class(**{name: value for name, value in arguments.items() if name in accepted})

    def expert_mapping(self) -> ExpertMapping:
        """Return how vLLM's fused parameters of experts are filled; empty without experts."""
        if not self.expert_matrices:
            return []
        gate, up, down = self.expert_matrices
        return fused_moe_make_expert_params_mapping(self, gate, down, up, num_experts=self.config.num_experts)

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Return the embeddings [T, H] of ids [T]."""
        return self.model.embed_tokens(input_ids)

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        hidden_states: torch.Tensor,
        intermediate_tensors: IntermediateTensors | None = None,
        inputs_embeds: torch.Tensor | None = None,
        spec_step_idx: int = 0,
    ) -> torch.Tensor:
        """Return the state [T, H] of one depth, for `compute_logits` and for the next draft step.

        Args:
            input_ids: [T], the token after each position.
            positions: [T], positions in the trunk; [3, T] in vision-language models.
            hidden_states: [T, H], states of the trunk after its final norm, or the previous result of this method.
            inputs_embeds: [T, H], embeddings to use instead of input_ids.
            spec_step_idx: draft step, from 0. A single head runs at all steps.
        """
        depth = spec_step_idx % len(self.model.heads)
        return self.model(input_ids, positions, hidden_states, inputs_embeds, depth)

    def compute_logits(self, hidden_states: torch.Tensor, spec_step_idx: int = 0) -> torch.Tensor | None:
        """Return logits [T, V]. Tokens outside of the draft vocabulary have the logit -inf, which is not computed."""
        if not len(self._drafted):
            return self.logits_processor(self.lm_head, hidden_states)
        if self._drafted_rows is None:
            self._drafted = self._drafted.to(hidden_states.device)
            self._drafted_rows = _rows(self.lm_head, self._drafted)
        logits = F.linear(hidden_states, self._drafted_rows) * self.logits_scale
        if self.logits_cap is not None:
            logits = torch.tanh(logits / self.logits_cap) * self.logits_cap
        # Over the whole vocabulary, because drafts are verified against the trunk's distribution over it.
        whole = logits.new_full((len(logits), self.config.vocab_size), -torch.inf)
        return whole.index_copy_(1, self._drafted, logits)

    def name_on_disk(self, name: str) -> str:
        """Return the name in files of a parameter, or of the tensors that are fused in it."""
        return _name_on_disk(name)

    def load_weights(self, weights: Weights) -> set[str]:
        """Load the heads from HF tensors, and return the names of the filled parameters, as `fill` does."""
        names = {self.name_on_disk(name): name for name, _ in self.named_parameters()}
        parameters = {stored: self.get_parameter(name) for stored, name in names.items()}
        filled = fill(
            parameters,
            weights,
            heads_of(self.config).layers,
            default_weight_loader,
            self.expert_mapping(),
            # While new weights are sent, the class gets one bucket at a time (live/weight_transfer.py: Checked).
            is_part=not is_mtp_completeness_check_enabled(),
            is_fused=self.packed_modules_mapping is FUSED_MODULES,
        )
        return {names[stored] for stored in filled}


def _full_attention(config: Any) -> list[str]:
    """Return the kind of layer of each head, without a window."""
    return ["full_attention"] * heads_of(config).layers


def _with_config(vllm_config: VllmConfig, config: Any) -> VllmConfig:
    """Return a copy for layers that read the model's config from `model_config`, which is the target's."""
    speculative = vllm_config.speculative_config
    assert speculative is not None
    changed = copy(vllm_config)
    # Copies on each level, because vLLM continues to use the originals for the trunk.
    changed.model_config = copy(speculative.draft_model_config)
    changed.model_config.hf_config = config
    # vLLM's layers read either of the two configs.
    changed.model_config.hf_text_config = config.get_text_config()
    return changed


def _rows(lm_head: Any, tokens: torch.Tensor) -> torch.Tensor:
    """Return the rows [N, H] of an output layer for N tokens, on every tensor-parallel rank."""
    row = tokens - lm_head.shard_indices.org_vocab_start_index
    is_elsewhere = (row < 0) | (tokens >= lm_head.shard_indices.org_vocab_end_index)
    # Each row is on one rank, and the others add zeros: the sum of all ranks is every row.
    rows = lm_head.weight.detach()[row.masked_fill(is_elsewhere, 0)]
    return tensor_model_parallel_all_reduce(rows.masked_fill(is_elsewhere[:, None], 0))


def _name_on_disk(name: str) -> str:
    if name.startswith(("model.embed_tokens.", "lm_head.")):
        return name
    return name.replace("model.", "mtp.", 1).replace("mtp.heads.0.", "mtp.", 1)


class Ernie4_5_MoeMTP(ernie_mtp.ErnieMTP):
    """MTP draft model for ERNIE 4.5 with experts: vLLM's, with the rotary embeddings and the output norm of the model.

    vLLM's class (ernie_mtp.py of 0.32) rotates other channels together than the trunk, and computes logits without a
    norm. In Baidu's training code, heads have the trunk's rotary embeddings and final norm.

    Raises:
        ValueError: the checkpoint has several heads, of which vLLM's class loads only the first.
    """

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = ""):
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        if heads_of(self.config).layers != 1:
            raise ValueError(f"one MTP head is supported, but config.json declares {heads_of(self.config).layers}")
        self.model.norm = RMSNorm(self.config.hidden_size, eps=self.config.rms_norm_eps)
        heads: Any = self.model.layers.values()
        for head in heads:
            attention = head.mtp_block.self_attn
            attention.rotary_emb = get_rope(
                attention.head_dim,
                max_position=attention.max_position_embeddings,
                rope_parameters=self.config.rope_parameters,
                is_neox_style=False,
            )

    def compute_logits(self, hidden_states: torch.Tensor, spec_step_idx: int = 0) -> torch.Tensor | None:
        """Return logits [T, V] for states [T, H] before the norm, which the next draft step reads."""
        model: Any = self.model
        return super().compute_logits(model.norm(hidden_states), spec_step_idx)

    def load_weights(self, weights: Weights) -> set[str]:
        """Load the head, and the trunk's final norm, which vLLM's class ignores."""
        norm: set[str] = set()
        return super().load_weights(without_final_norm(self, weights, default_weight_loader, norm)) | norm


class Exaone4Layer(exaone4.Exaone4DecoderLayer):
    """A layer of EXAONE 4 that returns only its output, to which vLLM's layer has already added the residual."""

    def forward(self, positions: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return the output [T, H]."""
        return super().forward(positions, hidden_states, residual=None)[0]


class Exaone4MTPModel(MtpDraft):
    """MTP draft model for EXAONE 4. Its layers see all tokens, like the trunk's layers without a window."""

    def make_layer(self, vllm_config: VllmConfig, prefix: str) -> nn.Module:
        kinds = _full_attention(self.config)
        if self.config.sliding_window is not None:
            kinds.append("sliding_attention")  # of no head; with it, layers without a window have no rotary embeddings
        config = changed(self.config, layer_types=kinds)
        return Exaone4Layer(config, vllm_config.cache_config, vllm_config.quant_config, prefix)


class Gemma3MTPModel(MtpDraft):
    """MTP draft model for Gemma 3. Its layers see all tokens, like the trunk's layers without a window."""

    norm_class = GemmaRMSNorm

    @property
    def embedding_multiplier(self) -> float:
        # Like vLLM's, rounded to the model's precision, which is torch's default while the model is built.
        return torch.tensor(self.config.hidden_size**0.5, device="cpu").item()

    def make_layer(self, vllm_config: VllmConfig, prefix: str) -> nn.Module:
        config = changed(self.config, layer_types=_full_attention(self.config))
        return gemma3.Gemma3DecoderLayer(config, vllm_config.cache_config, vllm_config.quant_config, prefix)


class Gemma4Layer(gemma4.Gemma4DecoderLayer):
    """A layer of Gemma 4 that returns only its output, to which vLLM's layer has already added the residual.

    The factor of the output is a parameter instead of a buffer, because `fill` reads parameters.
    """

    def __init__(self, *args: Any):
        super().__init__(*args)
        self.layer_scalar = nn.Parameter(self.layer_scalar, requires_grad=False)

    def forward(self, positions: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return the output [T, H]."""
        return super().forward(positions, hidden_states, residual=None)[0]


class Gemma4HeadMTPModel(Gemma3MTPModel):
    """MTP draft model for Gemma 4. Its layers see all tokens, like the trunk's layers without a window."""

    norm_class = RMSNorm
    expert_matrices = ("gate_proj", "up_proj", "down_proj")

    def make_layer(self, vllm_config: VllmConfig, prefix: str) -> nn.Module:
        config = deepcopy(self.config)
        full = config.per_layer_config[config.layer_types.index("full_attention")]
        sizes = {"head_dim": full.head_dim, "num_key_value_heads": full.num_key_value_heads}
        config.layer_types = ["full_attention"] * config.num_hidden_layers
        config.per_layer_config = dict.fromkeys(range(config.num_hidden_layers), sizes)
        # Heads have keys and values, and neither a further input nor a wider MLP.
        config.num_kv_shared_layers = config.hidden_size_per_layer_input = 0
        return Gemma4Layer(config, vllm_config.cache_config, vllm_config.quant_config, prefix)

    def expert_mapping(self) -> ExpertMapping:
        if self.config.num_experts is None:
            return []
        return super().expert_mapping()

    def load_weights(self, weights: Weights) -> set[str]:
        """Load the heads from HF tensors. If keys are values, vLLM's layer has them twice."""
        if self.config.attention_k_eq_v:
            weights = _keys_as_values(weights)
        return super().load_weights(weights)


def _keys_as_values(weights: Weights) -> Iterator[tuple[str, torch.Tensor]]:
    for name, tensor in weights:
        yield name, tensor
        # vLLM's layer has a fused matrix of queries, keys and values also if the files have no values.
        if name.startswith("mtp.") and ".k_proj." in name:
            yield name.replace(".k_proj.", ".v_proj."), tensor


class GptOssMTPModel(MtpDraft):
    """MTP draft model for gpt-oss. Its layers see all tokens, like the trunk's layers without a window."""

    def make_layer(self, vllm_config: VllmConfig, prefix: str) -> nn.Module:
        config = changed(self.config, sliding_window=None)  # vLLM's layers with even numbers have a window
        quant_config = vllm_config.quant_config
        if getattr(quant_config, "get_name", str)() in _MXFP4:  # of the trunk; experts of heads are plain
            quant_config = None
        # TransformerBlock takes no config of the model, only vLLM's whole config.
        own = _with_config(vllm_config, config)
        own.quant_config = quant_config
        return gpt_oss.TransformerBlock(own, quant_config, prefix)  # pyright: ignore[reportArgumentType]

    def expert_mapping(self) -> ExpertMapping:
        parts = {"w13_weight": "gate_up_proj", "w13_bias": "gate_up_proj_bias"}
        parts |= {"w2_weight": "down_proj", "w2_bias": "down_proj_bias"}
        return [
            (f"experts.routed_experts.{joined}", f"experts.{expert}.{part}", expert, f"gpt_oss_{joined.split('_')[0]}")
            for joined, part in parts.items()
            for expert in range(self.config.num_local_experts)
        ]

    def name_on_disk(self, name: str) -> str:
        # vLLM's layer of gpt-oss has its own name for the attention.
        return super().name_on_disk(name).replace(".attn.", ".self_attn.", 1)

    def load_weights(self, weights: Weights) -> set[str]:
        rank, size = get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size()
        return super().load_weights(own_sinks(single_experts(weights), rank, size))


_MXFP4 = ("mxfp4", "gpt_oss_mxfp4")


class MiniMaxM2MTPModel(MtpDraft):
    """MTP draft model for MiniMax-M2."""

    expert_matrices = ("w1", "w3", "w2")

    def make_layer(self, vllm_config: VllmConfig, prefix: str) -> nn.Module:
        layer = minimax_m2.MiniMaxM2DecoderLayer(
            self.config, prefix, vllm_config.model_config, vllm_config.cache_config, vllm_config.quant_config
        )
        _select_by_sigmoids(layer)
        return layer


class Olmo2MTPModel(MtpDraft):
    """MTP draft model for OLMo 2. It uses a layer of vLLM's hybrid OLMo, because vLLM has no layer for OLMo 2."""

    def make_layer(self, vllm_config: VllmConfig, prefix: str) -> nn.Module:
        rope = self.config.rope_parameters.get("full_attention", self.config.rope_parameters)  # OLMo 3: by kind
        config = changed(self.config, layer_types=_full_attention(self.config), rope_parameters=rope)
        return olmo_hybrid.OlmoHybridDecoderLayer(vllm_config=_with_config(vllm_config, config), prefix=prefix)


class SeedOssMTPModel(MtpDraft):
    """MTP draft model for Seed-OSS. It uses the decoder layer of Llama, because vLLM has no layer for Seed-OSS."""

    def make_layer(self, vllm_config: VllmConfig, prefix: str) -> nn.Module:
        # vLLM's Llama reads attention_bias for o_proj as well, and for q, k and v only if there is no qkv_bias.
        config = self.config
        config = changed(config, qkv_bias=config.attention_bias, attention_bias=config.attention_out_bias)
        return llama.LlamaDecoderLayer(vllm_config, prefix, config)


class SmolLM3MTPModel(MtpDraft):
    """MTP draft model for SmolLM3. It uses the decoder layer of Llama, because vLLM has no layer for SmolLM3."""

    layer_class = llama.LlamaDecoderLayer

    def make_layer(self, vllm_config: VllmConfig, prefix: str) -> nn.Module:
        layer: Any = super().make_layer(vllm_config, prefix)
        if not self.config.no_rope_layers[self.config.num_hidden_layers - 1]:
            # As in training, heads have the kind of the trunk's last layer.
            layer.self_attn.rotary_emb = NoRotaryEmbedding()
        return layer


class Qwen3MoeMTPModel(MtpDraft):
    """MTP draft model for Qwen3 MoE."""

    expert_matrices = ("gate_proj", "up_proj", "down_proj")

    def make_layer(self, vllm_config: VllmConfig, prefix: str) -> nn.Module:
        # vLLM's layer reads the kind of its MLP from model_config.
        return qwen3_moe.Qwen3MoeDecoderLayer(_with_config(vllm_config, self.config), prefix)


def __getattr__(name: str) -> type:
    """Return a class that consists only of names in the file of a family."""
    return class_of(name, PLUGIN_DRAFTS, "vllm.model_executor.models", globals())
