"""Model classes of SGLang for checkpoints with an MTP head, and draft models that run the head.

Only SGLang imports this module.

Shapes: T tokens of all requests of a batch, H hidden size.
"""

import inspect
from collections.abc import Iterator
from copy import deepcopy
from typing import Any, ClassVar

import torch
from sglang.srt.layers.layer_boundary import layer_stack
from sglang.srt.layers.layer_boundary.residual import batch as residual_batch
from sglang.srt.layers.layernorm import RMSNorm
from sglang.srt.layers.logits_processor import LogitsProcessor, LogitsProcessorOutput
from sglang.srt.layers.moe.fused_moe_triton import FusedMoE
from sglang.srt.layers.quantization.base_config import QuantizationConfig
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from sglang.srt.model_executor.forward_batch_info import ForwardBatch
from sglang.srt.model_loader.weight_utils import default_weight_loader
from sglang.srt.models import (
    ernie4_eagle,
    exaone4,
    gemma3_causal,
    gpt_oss,
    llama,
    mimo_v2,
    mimo_v2_nextn,
    minimax_m2,
    olmo2,
    qwen2,
    qwen2_moe,
    step3p5,
    step3p5_mtp,
)
from sglang.srt.runtime_context import get_server_args
from sglang.srt.utils import add_prefix
from torch import nn

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
    without_final_norm,
)
from swiftlite.engines.loading.no_rotary import NoRotaryEmbedding
from swiftlite.engines.loading.plugin_classes import class_of
from swiftlite.engines.sglang.plugin import DRAFTS, PLUGIN_DRAFTS


def _exaone4_config(config: Any) -> Any:
    """Return a copy of transformers' config with the settings that SGLang's layer reads.

    SGLang 0.5.23 reads `rope_theta`, which transformers 5 has only in `rope_parameters`, and a string as
    `sliding_window_pattern`, which can also be an integer.
    """
    config = deepcopy(config)
    config.rope_theta = config.rope_parameters["rope_theta"]
    pattern = config.sliding_window_pattern
    if config.sliding_window is None:
        config.sliding_window_pattern = None
    elif isinstance(pattern, int):
        config.sliding_window_pattern = "G".rjust(pattern, "L")
    return config


class Exaone4ForCausalLM(Trunk, exaone4.Exaone4ForCausalLM):
    """The trunk of a checkpoint with an MTP head."""

    def __init__(self, config: Any, *args: Any, **kwargs: Any):
        super().__init__(_exaone4_config(config), *args, **kwargs)


class Gemma3ForCausalLM(Trunk, gemma3_causal.Gemma3ForCausalLM):
    """The trunk of a checkpoint with an MTP head. SGLang 0.5.23 ignores an output layer that is not tied."""

    @torch.no_grad()
    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, forward_batch: ForwardBatch, **kwargs: Any):
        """Return the logits, from the output layer instead of the embedding."""
        states = self.model(input_ids, positions, forward_batch, **kwargs)
        return self.logits_processor(input_ids, states, self.lm_head, forward_batch)

    def load_weights(self, weights: Weights) -> Any:
        """Load also an output layer that is not tied, which SGLang's method skips."""
        return super().load_weights(self._without_output_layer(weights))

    def _without_output_layer(self, weights: Weights) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in weights:
            if name == "lm_head.weight" and not self.config.tie_word_embeddings:
                weight: Any = self.lm_head.weight
                # The parameter's own loader selects the rows of this tensor-parallel rank.
                weight.weight_loader(weight, tensor)
            else:
                yield name, tensor


class SharingTrunk(Trunk):
    """A trunk whose class in SGLang 0.5.23 has no method with which a draft shares its matrices."""

    def get_embed_and_head(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the matrices of embedding and output layer."""
        trunk: Any = self
        # SGLang's EAGLE worker asks the target for both, and gives them to `set_embed_and_head` of the draft.
        return trunk.model.embed_tokens.weight, trunk.lm_head.weight


class WindowOfOthers(nn.Module):
    """Base class placed before SGLang's classes of MiMo-V2-Flash (mimo_v2.py and mimo_v2_nextn.py of 0.5.23).

    They read rotary settings from `rope_theta` and `swa_rope_theta`, and fail if they also find those of transformers 5
    for each kind of layer. In SGLang, the size of a window does not count the token itself, unlike in config.json, but
    these classes pass the number of config.json on. A token would see one token more than in transformers and vLLM.
    Other models with these classes (MiMo-V2.5) are not affected.
    """

    def __init__(self, config: Any, *args: Any, **kwargs: Any):
        if config.model_type == "mimo_v2_flash":
            config = changed(config, rope_parameters=None, sliding_window_size=config.sliding_window_size - 1)
        super().__init__(config, *args, **kwargs)

    def get_attention_sliding_window_size(self) -> int:
        """Return the size of windows, without the token itself."""
        config: Any = self.config
        return config.sliding_window_size


class MiMoV2FlashForCausalLM(WindowOfOthers, mimo_v2.MiMoV2FlashForCausalLM):
    """The trunk of MiMo-V2-Flash."""


class MiniMaxM2ForCausalLM(Trunk, minimax_m2.MiniMaxM2ForCausalLM):
    """The trunk of a checkpoint with an MTP head. SGLang 0.5.23 ignores `tie_word_embeddings`."""

    def __init__(self, config: Any, *args: Any, **kwargs: Any):
        super().__init__(config, *args, **kwargs)
        if config.tie_word_embeddings:
            self.lm_head = self.model.embed_tokens


class NoWindowTrunk(Trunk):
    """A trunk whose class in SGLang 0.5.23 ignores `sliding_window`.

    Raises:
        ValueError: sequences can be longer than the window.
    """

    def __init__(self, config: Any, *args: Any, **kwargs: Any):
        # In shorter sequences the window has no effect, so SGLang's answers are correct.
        window = config.sliding_window
        server_args: Any = get_server_args()
        longest = server_args.context_length or config.max_position_embeddings
        if window is not None and window < longest:
            raise ValueError(
                f"sliding_window {window} would be ignored, and sequences can have {longest} tokens: "
                f"limit them with --context-length {window} (swiftlite: --max_model_len {window})"
            )
        super().__init__(config, *args, **kwargs)


class Olmo2ForCausalLM(SharingTrunk, olmo2.Olmo2ForCausalLM):
    """The trunk of an OLMo 2 or OLMo 3 checkpoint with an MTP head.

    Raises:
        ValueError: config.json of an OLMo 3 has the rotary settings of each kind of layer, as transformers 5 writes
            them. SGLang 0.5.23 ignores them, and computes with a base of 10,000.
    """

    def __init__(self, config: Any, *args: Any, **kwargs: Any):
        if config.model_type == "olmo3" and config.rope_theta == 10_000:
            raise ValueError("rope_parameters by kind of layer are ignored: use rope_theta and rope_scaling")
        super().__init__(config, *args, **kwargs)


class Qwen2MoeForCausalLM(SharingTrunk, qwen2_moe.Qwen2MoeForCausalLM):
    """The trunk of a checkpoint with an MTP head. SGLang 0.5.23 ignores `tie_word_embeddings`.

    Raises:
        ValueError: a layer has no experts. SGLang builds experts in all layers.
    """

    def __init__(self, config: Any, *args: Any, **kwargs: Any):
        if config.mlp_only_layers or config.decoder_sparse_step != 1:
            raise ValueError("Qwen2 MoE with layers without experts is not supported")
        super().__init__(config, *args, **kwargs)
        if config.tie_word_embeddings:
            self.lm_head = self.model.embed_tokens


class SeedOssForCausalLM(Trunk, qwen2.Qwen2ForCausalLM):
    """The trunk of a Seed-OSS checkpoint, with SGLang's class for Qwen2.

    SGLang 0.5.23 has no class for Seed-OSS. Its class for Qwen2 has the same biases and supports head_dim.

    Raises:
        ValueError: the checkpoint has no biases on q, k and v, so these biases of Qwen2's class would remain random.
    """

    def __init__(self, config: Any, *args: Any, **kwargs: Any):
        if not config.attention_bias:
            raise ValueError("Seed-OSS with attention_bias false is not supported")
        super().__init__(config, *args, **kwargs)


class SmolLM3ForCausalLM(Trunk, llama.LlamaForCausalLM):
    """The trunk of a SmolLM3 checkpoint, with SGLang's class for Llama. SGLang 0.5.23 has no class for SmolLM3."""

    def __init__(self, config: Any, *args: Any, **kwargs: Any):
        super().__init__(config, *args, **kwargs)
        layers: Any = self.model.layers
        for layer, is_rotary in zip(layers, config.no_rope_layers, strict=False):
            if not is_rotary:
                layer.self_attn.rotary_emb = NoRotaryEmbedding()


class MtpHead(nn.Module):
    """The MTP head. Its parameters have the names of the checkpoint's tensors.

    Args:
        layer: a decoder layer of the same class as the trunk's layers.
        embedding_multiplier: factor of embeddings.
        norm: class of the norms.
    """

    def __init__(self, config: Any, layer: nn.Module, embedding_multiplier: float, norm: Any):
        super().__init__()
        self.pre_fc_norm_embedding = norm(config.hidden_size, eps=config.rms_norm_eps)
        self.pre_fc_norm_hidden = norm(config.hidden_size, eps=config.rms_norm_eps)
        # torch's layer, which no quantization_config concerns: files have the projection in the dtype of the model.
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self.layers = nn.ModuleList([layer])
        self.norm = norm(config.hidden_size, eps=config.rms_norm_eps)
        self.embedding_multiplier = embedding_multiplier
        # Other layers of SGLang keep the residual in the batch.
        self.layer_returns_residual = "residual" in inspect.signature(layer.forward).parameters

    def forward(
        self,
        embedding_TH: torch.Tensor,
        positions_T: torch.Tensor,
        hidden_TH: torch.Tensor,
        forward_batch: ForwardBatch,
    ) -> torch.Tensor:
        """Return the state [T, H] after the head's output norm."""
        embedding_TH = embedding_TH * self.embedding_multiplier
        parts = (self.pre_fc_norm_embedding(embedding_TH), self.pre_fc_norm_hidden(hidden_TH))
        fused_TH = self.fc(torch.cat(parts, dim=-1))
        if self.layer_returns_residual:
            state_TH, residual_TH = self.layers[0](
                positions=positions_T, hidden_states=fused_TH, forward_batch=forward_batch, residual=None
            )
            return self.norm(state_TH, residual_TH)[0]
        # As at the entry of a trunk (layer_boundary/residual/batch.py: start): layers add to the batch's residual.
        residual_batch.start(forward_batch)
        state_TH = self.layers[0](positions=positions_T, hidden_states=fused_TH, forward_batch=forward_batch)
        return residual_batch.final_norm(state_TH, forward_batch, self.norm)


class MtpDraft(nn.Module):
    """A draft model that SGLang's EAGLE worker runs at every draft step.

    Its input is the trunk's state or the head's state.

    Raises:
        ValueError: the checkpoint has several heads. They are not supported, because SGLang does not pass the number of
            the draft step.
    """

    layer_class: ClassVar[Any]
    norm_class: ClassVar[Any] = RMSNorm
    expert_matrices: ClassVar[tuple[str, ...]] = ()
    """As in `PluginClasses`."""
    packed_modules_mapping = PACKED_MODULES

    def __init__(self, config: Any, quant_config: QuantizationConfig | None = None, prefix: str = ""):
        super().__init__()
        if heads_of(config).layers != 1:
            raise ValueError(
                f"{type(self).__name__} supports one MTP head, but config.json declares {heads_of(config).layers}"
            )
        self.config = config
        # SGLang connects the residuals of layers when their stack is closed; here, one layer is the whole stack.
        with layer_stack():
            layer = self._make_layer(quant_config)
        self.mtp = MtpHead(config, layer, self.embedding_multiplier, self.norm_class)
        # `set_embed_and_head` replaces both by those of the trunk.
        self.embed_tokens = VocabParallelEmbedding(config.vocab_size, config.hidden_size)
        self.lm_head = ParallelLMHead(config.vocab_size, config.hidden_size, quant_config=quant_config)
        self.logits_processor = LogitsProcessor(config, logit_scale=1.0 / getattr(config, "logits_scaling", 1.0))

    def _make_layer(self, quant_config: QuantizationConfig | None) -> nn.Module:
        """Create a decoder layer of the trunk's kind. Some classes of SGLang require the number of the layer."""
        # The prefix is the name in files, with which SGLang looks modules up in the lists of quantization_config.
        arguments: dict[str, Any] = {"config": self.config, "quant_config": quant_config, "prefix": "mtp.layers.0"}
        if "layer_id" in inspect.signature(self.layer_class).parameters:
            arguments["layer_id"] = 0
        return self.layer_class(**arguments)

    @property
    def embedding_multiplier(self) -> float:
        """Factor of embeddings."""
        return getattr(self.config, "embedding_multiplier", 1.0)

    @torch.no_grad()
    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, forward_batch: ForwardBatch
    ) -> LogitsProcessorOutput:
        """Return the logits of the drafts, and the state for the next step.

        Args:
            input_ids: [T], the token after each position.
            positions: [T], positions in the trunk.
            forward_batch: `forward_batch.spec_info` contains the state [T, H] of the trunk after its final norm or,
                from the second step on, of the head.
        """
        hidden: Any = forward_batch.spec_info
        state = self.mtp(self.embed_tokens(input_ids), positions, hidden.hidden_states, forward_batch)
        return self.logits_processor(input_ids, state, self.lm_head, forward_batch)

    def expert_mapping(self) -> ExpertMapping:
        """Return how SGLang's fused parameters of experts are filled; empty without experts."""
        if not self.expert_matrices:
            return []
        gate, up, down = self.expert_matrices
        return FusedMoE.make_expert_params_mapping(gate, down, up, self.config.num_experts)

    def load_weights(self, weights: Weights) -> set[str]:
        """Load the head from HF tensors, and return the names of the filled parameters, as `fill` does."""
        # Embedding and output layer come from the trunk (`set_embed_and_head`).
        parameters = {name: tensor for name, tensor in self.named_parameters() if name.startswith("mtp.")}
        is_fused = self.packed_modules_mapping is FUSED_MODULES
        return fill(parameters, weights, 1, default_weight_loader, self.expert_mapping(), is_fused=is_fused)

    def set_embed_and_head(self, embed: nn.Parameter, head: torch.Tensor) -> None:
        """Use the trunk's embedding and output layer, which SGLang's EAGLE worker passes.

        Raises:
            ValueError: the checkpoint has a draft vocabulary, but `head` does not consist of the rows of this
                vocabulary.
        """
        num_drafted = len(heads_of(self.config).draft_vocab)
        if num_drafted and len(head) != num_drafted:
            raise ValueError(
                f"the head has a draft vocabulary of {num_drafted} tokens: add --speculative-token-map with its file"
            )
        del self.lm_head.weight  # `head` can be a slice, which is not a parameter
        self.embed_tokens.weight, self.lm_head.weight = embed, head


class Ernie4_5_MoeForCausalLMMTP(ernie4_eagle.Ernie4_5_MoeForCausalLMMTP):
    """MTP draft model for ERNIE 4.5 with experts: SGLang's, with the trunk's final norm as output norm.

    SGLang's class (ernie4_eagle.py of 0.5.23) computes logits without a norm, unlike Baidu's training code.
    """

    def __init__(self, config: Any, *args: Any, **kwargs: Any):
        super().__init__(config, *args, **kwargs)
        self.model.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    @torch.no_grad()
    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, forward_batch: ForwardBatch
    ) -> LogitsProcessorOutput:
        """Return the logits of the drafts, and the state before the norm for the next step."""
        model: Any = self.model
        state = model(input_ids, positions, forward_batch)
        return self.logits_processor(
            input_ids, model.norm(state), self.lm_head, forward_batch, hidden_states_before_norm=state
        )

    def load_weights(self, weights: Weights) -> None:
        """Load the head, and the trunk's final norm, which SGLang's class ignores."""
        super().load_weights(without_final_norm(self, weights, default_weight_loader, set()))


class Exaone4Layer(exaone4.Exaone4DecoderLayer):
    """A layer of EXAONE 4 without a window. It has rotary embeddings only if no layer of the trunk has a window."""

    def __init__(self, config: Any, quant_config: QuantizationConfig | None = None, prefix: str = ""):
        config = _exaone4_config(config)
        if config.sliding_window is not None:
            config.sliding_window_pattern = "G"
        super().__init__(config, 0, quant_config, prefix)


def _count_own_token(model: nn.Module) -> None:
    """Let windows of Step-3.5 contain `sliding_window` tokens, as in transformers and vLLM.

    SGLang's attention sees `sliding_window_size` tokens before each token, and the token itself. The classes of
    Step-3.5 in SGLang 0.5.23 pass `sliding_window` without subtracting 1.
    """
    for module in model.modules():
        if isinstance(module, RadixAttention) and module.sliding_window_size > 0:
            module.sliding_window_size -= 1


class Step3p5ForCausalLM(step3p5.Step3p5ForCausalLM):
    """The trunk of Step-3.5: SGLang's, with windows of `sliding_window` tokens."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        _count_own_token(self)


SGLANGS_HEAD = 45
"""The layer whose settings SGLang's class of an MTP head of Step-3.5 reads."""


class Step3p5Head(step3p5_mtp.Step3p5AMultiTokenPredictor):
    """An MTP head of Step-3.5: SGLang's, with the settings of config.json for its own layer.

    In SGLang 0.5.23, every head has the settings of layer 45, which is the first head of the published model.
    """

    def __init__(self, config: Any, number: int, quant_config: QuantizationConfig | None = None, prefix: str = ""):
        own = deepcopy(config)
        layer = config.num_hidden_layers + number
        for name in ("layer_types", "rope_theta", "partial_rotary_factors", "swiglu_limits", "swiglu_limits_shared"):
            values = getattr(config, name)
            # SGLang's class reads entry 45, and subtracts the number of layers from 45 for the layer of the KV cache.
            setattr(own, name, [values[layer]] * (SGLANGS_HEAD + 1))
        own.num_hidden_layers = SGLANGS_HEAD
        own.moe_layers_enum = str(SGLANGS_HEAD + 2)  # no head has experts, and no layer follows
        super().__init__(own, quant_config, prefix)
        _count_own_token(self)


class Step3p5MTP(step3p5_mtp.Step3p5MTP):
    """MTP draft model for Step-3.5: SGLang's, with the settings of config.json for each head."""

    def __init__(
        self,
        config: Any,
        quant_config: QuantizationConfig | None = None,
        draft_model_idx: int | None = None,
        prefix: str = "",
    ):
        # Not SGLang's constructor, which would build its own head with the settings of layer 45.
        nn.Module.__init__(self)
        self.config, self.quant_config = config, quant_config
        self.draft_model_idx = draft_model_idx or 0
        self.model = Step3p5Head(config, self.draft_model_idx, quant_config, add_prefix("model", prefix))
        self.logits_processor = LogitsProcessor(config)
        self.lm_head = self.model.lm_head


class Gemma3Layer(gemma3_causal.Gemma3DecoderLayer):
    """A layer of Gemma 3 that sees all tokens, with its own rotary embeddings."""

    def __init__(self, config: Any, quant_config: QuantizationConfig | None = None, prefix: str = ""):
        config = changed(config, layer_types=["full_attention"])
        super().__init__(0, config, quant_config, prefix)
        config.rope_parameters = config.rope_parameters["full_attention"]  # as SGLang's model does
        self.rotary_emb = gemma3_causal.Gemma3RotaryEmbedding(config=config)

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        positions: torch.Tensor,
        hidden_states: torch.Tensor,
        forward_batch: ForwardBatch,
        residual: torch.Tensor | None,
    ) -> Any:
        """Return the output [T, H] of the MLP, and the state [T, H] that it is to be added to."""
        rotary_emb = self.rotary_emb(hidden_states, positions[None])
        return super().forward(positions, hidden_states, rotary_emb, rotary_emb, forward_batch, residual)


class Gemma3ForCausalLMMTP(MtpDraft):
    """MTP draft model for Gemma 3."""

    layer_class = Gemma3Layer
    norm_class = gemma3_causal.Gemma3RMSNorm

    @property
    def embedding_multiplier(self) -> float:
        # Like SGLang's, rounded to the model's precision, which is torch's default while the model is built.
        return torch.tensor(self.config.hidden_size**0.5, device="cpu").item()


class GptOssLayer(gpt_oss.GptOssDecoderLayer):
    """A layer of gpt-oss without a window."""

    def __init__(self, config: Any, quant_config: QuantizationConfig | None = None, prefix: str = ""):
        if quant_config is not None and quant_config.get_name() == "mxfp4":
            quant_config = None  # of the trunk; experts of heads are plain
        super().__init__(changed(config, layer_types=["full_attention"]), 0, quant_config, prefix)


class GptOssForCausalLMMTP(MtpDraft):
    """MTP draft model for gpt-oss."""

    layer_class = GptOssLayer

    def expert_mapping(self) -> ExpertMapping:
        mapping = FusedMoE.make_expert_params_mapping_fused(
            "gate_up_proj", "down_proj", "gate_up_proj_bias", "down_proj_bias"
        )
        return [(joined, part, None, shard) for joined, part, shard in mapping]

    def load_weights(self, weights: Weights) -> set[str]:
        layer: Any = self.mtp.layers[0]
        rank, size = gpt_oss.get_group_rank_size(layer.self_attn.qkv_proj.tp_group)
        return super().load_weights(own_sinks(self._as_loaded(weights), rank, size))

    def _as_loaded(self, weights: Weights) -> Iterator[tuple[str, torch.Tensor]]:
        """Transpose the matrices of experts, and keep the biases that are added to sums of ranks on the first rank."""
        layer: Any = self.mtp.layers[0]
        rank = layer.mlp.experts.moe_tp_rank
        for name, tensor in weights:
            if name.startswith("mtp.") and name.endswith((".gate_up_proj", ".down_proj")):
                tensor = tensor.mT
            elif name.startswith("mtp.") and name.endswith(".down_proj_bias") and rank != 0:
                tensor = torch.zeros_like(tensor)
            yield name, tensor


class MiMoV2MTP(WindowOfOthers, mimo_v2_nextn.MiMoV2MTP):
    """MTP draft model for MiMo-V2-Flash. SGLang's class loads all heads into the same parameters.

    Args:
        draft_model_idx: number of the head in SGLang's multi-layer mode, which selects its tensors; otherwise None.
    """

    def __init__(
        self,
        config: Any,
        quant_config: QuantizationConfig | None = None,
        draft_model_idx: int | None = None,
        prefix: str = "",
    ):
        super().__init__(config, quant_config, draft_model_idx, prefix)
        self._is_first = draft_model_idx is None

    def load_weights(self, weights: Weights, *args: Any, **kwargs: Any) -> None:
        """Load the head with number `draft_model_idx`, or the first one."""
        if self._is_first:
            weights = _without_later_heads(weights)
        super().load_weights(weights, *args, **kwargs)


def _without_later_heads(weights: Weights) -> Iterator[tuple[str, torch.Tensor]]:
    for name, tensor in weights:
        if not name.startswith("model.mtp.layers.") or name.startswith("model.mtp.layers.0."):
            yield name, tensor


class Olmo2Layer(olmo2.Olmo2DecoderLayer):
    """A layer of OLMo 2, or of OLMo 3 without a window."""

    def __init__(self, config: Any, quant_config: QuantizationConfig | None = None, prefix: str = ""):
        super().__init__(changed(config, layer_types=["full_attention"]), 0, quant_config, prefix)


class SmolLM3ForCausalLMMTP(MtpDraft):
    """MTP draft model for SmolLM3, with the decoder layer of Llama like the trunk."""

    layer_class = llama.LlamaDecoderLayer

    def __init__(self, config: Any, *args: Any, **kwargs: Any):
        super().__init__(config, *args, **kwargs)
        if not config.no_rope_layers[config.num_hidden_layers - 1]:
            layer: Any = self.mtp.layers[0]
            layer.self_attn.rotary_emb = NoRotaryEmbedding()


def _class(name: str) -> type:
    return globals().get(name) or class_of(name, PLUGIN_DRAFTS, "sglang.srt.models", globals())


# Classes that consist only of names in the file of a family are made here.
# SGLang's registry reads this name in each module of the package (models/registry.py: import_model_classes).
EntryClass = [_class(name) for name in dict.fromkeys([*DRAFTS, *DRAFTS.values()])]
EntryClass += [Ernie4_5_MoeForCausalLMMTP, MiMoV2FlashForCausalLM, MiMoV2MTP, Step3p5ForCausalLM, Step3p5MTP]
