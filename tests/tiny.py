"""Write tiny random Hugging Face models with MTP tensors in a tenth of a second.

`make_tiny_hf` writes the files that a user would have: config.json, model.safetensors, tokenizer. All numbers are
random, including the weights of norms, so that a swapped norm, a lost bias or a permuted head changes the results.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Exaone4Config,
    Exaone4ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    Gemma4ForCausalLM,
    Gemma4TextConfig,
    Gemma4UnifiedForCausalLM,
    Gemma4UnifiedTextConfig,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3_5ForCausalLM,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHBlock
from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLVisionConfig
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VisionTransformerPretrainedModel
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5VisionConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5VisionModel
from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLVisionConfig
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionModel
from transformers.models.qwen3_vl_moe.configuration_qwen3_vl_moe import Qwen3VLMoeVisionConfig
from transformers.models.qwen3_vl_moe.modeling_qwen3_vl_moe import Qwen3VLMoeVisionModel
from transformers.models.step3p7.configuration_step3p7 import Step3p7TextConfig

from swiftlite.engines.transformers.step3p5 import Step3p5ForCausalLM
from swiftlite.families import FAMILIES
from swiftlite.families.serving.index import CONVENTIONS

# transformers has no MiMo, whose trunk is Qwen2's, and no Kimi-K2, which is DeepSeek-V3. Of wrappers, these are the
# classes of the language model.
_OWN_CLASSES: dict[str, tuple[type, type]] = {
    "exaone4_5": (Exaone4Config, Exaone4ForCausalLM),
    "gemma3": (Gemma3TextConfig, Gemma3ForCausalLM),
    "gemma4": (Gemma4TextConfig, Gemma4ForCausalLM),
    "gemma4_unified": (Gemma4UnifiedTextConfig, Gemma4UnifiedForCausalLM),
    "kimi_k2": (DeepseekV3Config, DeepseekV3ForCausalLM),
    "kimi_k25": (DeepseekV3Config, DeepseekV3ForCausalLM),
    "mimo": (Qwen2Config, Qwen2ForCausalLM),
    "mistral3": (MistralConfig, MistralForCausalLM),
    "qwen2_5_vl": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3_vl": (Qwen3Config, Qwen3ForCausalLM),
    "qwen3_vl_moe": (Qwen3MoeConfig, Qwen3MoeForCausalLM),
    "qwen3_5": (Qwen3_5TextConfig, Qwen3_5ForCausalLM),
    "qwen3_5_moe": (Qwen3_5MoeTextConfig, Qwen3_5MoeForCausalLM),
    **dict.fromkeys(("step3p5", "step3p7"), (Step3p7TextConfig, Step3p5ForCausalLM)),
}


def _classes_of(family: str) -> tuple[type, type]:
    """Return transformers' classes of a family's config and model."""
    if family in _OWN_CLASSES:
        return _OWN_CLASSES[family]
    config_class: Any = CONFIG_MAPPING[family]
    model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING[config_class]
    return config_class, model_class


CLASSES = {family: _classes_of(family) for family in FAMILIES}
OWN_SIZES = {name: dict(family.tiny) for name, family in FAMILIES.items() if family.tiny}
"""Settings of tiny models of these families, in addition to the sizes of all families."""
DSA = ("deepseek_v32", "glm_moe_dsa")
"""Families with indexers. vLLM and SGLang compute them on GPUs only."""
LATENT = ("deepseek_v3", "glm4_moe_lite", "kimi_k2", "kimi_k25", *DSA)
STEP = ("step3p5", "step3p7")
GEMMA4 = ("gemma4", "gemma4_text", "gemma4_unified")
GEMMA4_E: dict[str, Any] = {
    "num_hidden_layers": 6,
    "layer_types": ["sliding_attention", "full_attention"] * 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_global_key_value_heads": None,
    "attention_k_eq_v": False,
    "hidden_size_per_layer_input": 16,
    "vocab_size_per_layer_input": 128,
    "num_kv_shared_layers": 3,
    "use_double_wide_mlp": True,
}
"""Sizes of a Gemma 4 like E2B. Layers 3 and 5 read the keys of layer 1, layer 4 those of layer 2."""
STACKED_TRUNK = ("qwen3_vl_moe", *GEMMA4)
"""Families with stacks of experts in files of the trunk, and without in those of heads."""
COPIED_TOWER = ("gemma3", "kimi_k25", "mistral3")
"""Families whose language model has the prefix `language_model.` in files."""
WRAPPED = (
    "exaone4_5",
    "gemma4",
    "gemma4_unified",
    "step3p7",
    "qwen3_5",
    "qwen3_5_moe",
    "qwen2_5_vl",
    "qwen3_vl",
    "qwen3_vl_moe",
    *COPIED_TOWER,
)
"""Families whose files contain a vision tower in addition to the language model."""
TEXT_PREFIX = dict.fromkeys(WRAPPED, "model.language_model") | {"qwen2_5_vl": "model", "step3p7": "model"}
TEXT_PREFIX |= dict.fromkeys(COPIED_TOWER, "language_model.model")
"""Prefixes of the language model's tensors in these families' files."""
WINDOWED = ("gemma3", "gemma3_text", *GEMMA4, "olmo3", *STEP)
"""Families whose layers with and without a window have different rotary embeddings."""
KIND_OF_HEADS: dict[str, str] = {
    **dict.fromkeys(WINDOWED, "full_attention"),
    **dict.fromkeys(("mimo_v2_flash", *STEP), "sliding_attention"),
}
"""Of families with several rotary embeddings, the kind of layer with that of the heads, by transformers' name."""
WINDOWED_HEADS = ("exaone4_5", "mimo_v2_flash", *STEP)
"""Families whose heads have a sliding window, although not all layers have one."""
CANNOT_DRAFT = {
    engine: tuple(name for name, family in FAMILIES.items() if convention(family) is None)
    for engine, convention in CONVENTIONS.items()
}
"""Families whose heads an engine cannot use for drafting."""
ONLY_IN_TRANSFORMERS = ("exaone4_5", "kimi_k25", "mistral3", "step3p7")
"""Families whose heads only transformers uses for drafting."""
LLAMACPP_SIZES: dict[str, dict[str, Any]] = {
    "nemotron_h": {"layers_block_type": ["linear_attention", "moe", "full_attention", "moe"]}
}
"""Sizes of tiny models that llama.cpp runs, where others have layers that it does not have next to each other."""
ONLY_IN_VLLM = ("gemma3", *GEMMA4, "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe")
"""Families whose MTP heads SGLang and llama.cpp cannot use for drafting."""
HYBRID = ("qwen3_next", "qwen3_5", "qwen3_5_moe", "qwen3_5_text", "qwen3_5_moe_text")
WITHOUT_GATES = ("nemotron_h",)
"""Families with experts without gates, which vLLM computes on GPUs only."""
ALIKE = ("qwen3_5_moe", "qwen3_5_text", "qwen3_5_moe_text")
"""Families that slow tests omit, because their layers are those of Qwen3-Next and their names those of Qwen3.5."""
# The smallest latent attention that vLLM takes on a CPU, for make_tiny_hf(family="deepseek_v3", **VLLM_LATENT_SIZES).
# Engines norm latents with rms_norm_eps, transformers with 1e-6 whatever config.json says.
VLLM_LATENT_SIZES: dict[str, Any] = {
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "rms_norm_eps": 1e-6,
}
VLLM_INDEXER_SIZES = {"index_n_heads": 64, "index_head_dim": 128}
"""The sizes of indexers that vLLM loads."""
# On a CPU, vLLM takes values of another size than keys only in latent attention.
VLLM_VALUE_SIZES: dict[str, Any] = {"v_head_dim": 32}
# The smallest linear attention that vLLM takes on a CPU.
VLLM_LINEAR_SIZES: dict[str, Any] = {"linear_key_head_dim": 128, "linear_value_head_dim": 128}
# Families whose heads repeat the trunk's embedding and output layer.
HEADS_WITH_COPIES = ("glm4_moe", *LATENT)
# Families whose heads are numbered after the trunk's layers.
NEXT_LAYER_HEADS = (*HEADS_WITH_COPIES, "hy_v3", *STEP)
WITH_OWN_OUTPUT = STEP
"""Families whose heads have output layers of their own."""
NEVER_TIED = ("mimo_v2_flash", "mixtral", "nemotron_h", *STEP)
"""Families whose output layer is never tied: engines do not support it. Tests of tied ones have untied ones instead."""
WITH_SHARED_NORM = ("ernie4_5_moe",)
"""Families whose heads have no output norm of their own, but the trunk's final norm."""
# What transformers has in memory under other names than the files have.
HUB_NAMES: dict[str, dict[str, str]] = {
    "hy_v3": {
        "mlp.e_score_correction_bias": "mlp.expert_bias",
        "mlp.gate.": "mlp.router.gate.",
        "mlp.shared_experts.": "mlp.shared_mlp.",
    },
    "ernie4_5_moe": {"mlp.gate.moe_statics.": "mlp.moe_statics."},
    "mimo_v2_flash": {"self_attn.sinks": "self_attn.attention_sink_bias"},
    "step3p5": {
        "mlp.gate.weight": "moe.gate.weight",
        "mlp.gate.e_score_correction_bias": "moe.router_bias",
        "mlp.shared_experts.": "share_expert.",
        "mlp.experts.": "moe.experts.",
    },
    "minimax_m2": {"mlp.": "block_sparse_moe.", ".gate_proj.": ".w1.", ".up_proj.": ".w3.", ".down_proj.": ".w2."},
}
HUB_NAMES["mixtral"] = HUB_NAMES["minimax_m2"]
HUB_NAMES["step3p7"] = HUB_NAMES["step3p5"]
HUB_NAMES["nemotron_h"] = {"model.": "backbone."}
CHATML = """\
{%- for message in messages %}
    {%- if message['role'] == 'assistant' %}
        {{- '<|im_start|>assistant\\n' }}
        {%- generation %}{{- message['content'] }}
        {%- for call in message['tool_calls'] or [] %}{{- '<tool_call>' + (call.function | tojson) }}{%- endfor %}
        {{- '<|im_end|>' }}{%- endgeneration %}
        {{- '\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
CORPUS = [
    "The quick brown fox jumps over the lazy dog.",
    "What does this function do? It returns the sum of its arguments.",
]


def make_tiny_tokenizer(vocab_size: int = 320) -> PreTrainedTokenizerFast:
    """Return a byte-level BPE tokenizer, which preserves any text, with a ChatML template that marks the assistant's
    tokens.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        chat_template=CHATML,
        pad_token="<|endoftext|>",
        eos_token="<|im_end|>",
        additional_special_tokens=["<|im_start|>"],
        clean_up_tokenization_spaces=False,
    )


def last_of_head(config: Any) -> int:
    """Return the number of the last layer in a head of Nemotron-H; 1 for other families."""
    return len(layers_of_head(config)) - 1 if hasattr(config, "layers_block_type") else 1


def mtp_names(family: str, depth_index: int, num_layers: int = 2, last: int = 1) -> tuple[dict[str, str], str]:
    """Return the tensor names of one MTP head: embedding_norm, hidden_norm, projection and output_norm; and its block's
    prefix.

    Args:
        num_layers: number of the trunk's layers, after which GLM-4.5's heads are numbered.
        last: `last_of_head`.
    """
    k = depth_index
    if family == "mimo":
        head = f"model.mtp_layers.{k}."
        parts, block = ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm"), head
    elif family == "ernie4_5_moe":
        names = {"embedding_norm": "emb_norm", "hidden_norm": "hidden_norm", "projection": "linear_proj"}
        return {role: f"model.mtp_{part}.{k}.weight" for role, part in names.items()}, f"model.mtp_block.{k}."
    elif family == "mimo_v2_flash":
        head = block = f"model.mtp.layers.{k}."
        parts = ("enorm", "hnorm", "eh_proj", "final_layernorm")
    elif family in NEXT_LAYER_HEADS:
        head = block = hub_name(family, f"model.layers.{num_layers + k}.")
        output_norm = {"hy_v3": "final_layernorm", **dict.fromkeys(STEP, "transformer.shared_head.norm")}
        parts = ("enorm", "hnorm", "eh_proj", output_norm.get(family, "shared_head.norm"))
    elif family == "nemotron_h":
        head = block = "mtp.layers." if k == 0 else f"mtp.heads.{k}.layers."
        parts = ("0.enorm", "0.hnorm", "0.eh_proj", f"{last}.final_layernorm")
    else:
        head = "mtp." if k == 0 else f"mtp.heads.{k}."
        parts, block = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm"), f"mtp.layers.{k}."
    roles = ("embedding_norm", "hidden_norm", "projection", "output_norm")
    return {role: f"{head}{part}.weight" for role, part in zip(roles, parts, strict=True)}, block


def embedded(trunk: Any, ids: torch.Tensor) -> torch.Tensor:
    """Return embeddings of ids as the first decoder layer of a transformers model reads them."""
    return trunk.get_input_embeddings()(ids) * getattr(trunk.config, "embedding_multiplier", 1.0)


def logits_of(trunk: Any, states: torch.Tensor) -> torch.Tensor:
    """Return the logits of a transformers model for states after its final norm."""
    logits = trunk.lm_head(states) / getattr(trunk.config, "logits_scaling", 1.0)
    cap = getattr(trunk.config.get_text_config(), "final_logit_softcapping", None)
    return logits if cap is None else torch.tanh(logits / cap) * cap


def random_mtp_tensors(model: Any, family: str, depth: int, std: float = 0.2) -> dict[str, torch.Tensor]:
    """Return `depth` random MTP heads with the family's names, in the dtype of `model`, a model of transformers."""
    hidden = model.config.hidden_size
    tensors = {}
    for k in range(depth):
        names, block = mtp_names(family, k, model.config.num_hidden_layers, last_of_head(model.config))
        tensors[names["projection"]] = torch.randn(hidden, 2 * hidden) * std
        for role, name in names.items():
            if role != "projection":
                tensors[name] = 1 + torch.randn(hidden) * std
        for suffix, tensor in head_in_files(family, head_block(model, family)).items():
            offset = 1.0 if "norm" in suffix else 0.0
            tensors[block + head_name(family, suffix)] = offset + torch.randn(tensor.shape) * std
        if family in HEADS_WITH_COPIES:  # the hub's files repeat the trunk's tensors in each head
            tensors[f"{block}embed_tokens.weight"] = model.get_input_embeddings().weight.detach().clone()
            tensors[f"{block}shared_head.head.weight"] = model.lm_head.weight.detach().clone()
        if family in WITH_OWN_OUTPUT:
            tensors[output_name(block)] = torch.randn(model.config.vocab_size, hidden) * std
    return {name: tensor.to(dtype_of(name, model)) for name, tensor in tensors.items()}


def head_block(model: Any, family: str) -> dict[str, torch.Tensor]:
    """Return tensors with the names and shapes of the decoder layer in a head, as in transformers' memory."""
    if family != "nemotron_h":
        return without_own_input(model.model.layers[head_layer(family, model.config)].state_dict())
    block = {}
    for place, number in enumerate(layers_of_head(model.config)):
        block |= {f"{place}.{name}": tensor for name, tensor in model.model.layers[number].state_dict().items()}
    return block


def final_norm(trunk: Any) -> Any:
    """Return the final norm of a transformers model."""
    return trunk.model.norm_f if hasattr(trunk.model, "norm_f") else trunk.model.norm


class TwoLayers(torch.nn.ModuleDict):
    """The block of a head of Nemotron-H: two of transformers' layers."""

    def __init__(self, config: Any):
        numbers = layers_of_head(config)
        super().__init__({str(place): NemotronHBlock(config, number) for place, number in enumerate(numbers)})

    def forward(self, hidden: torch.Tensor, **unused: Any) -> torch.Tensor:
        for layer in self.values():
            hidden = layer(hidden)
        return hidden


def output_name(block: str) -> str:
    """Return the name of a head's own output layer, given the prefix of its block."""
    return f"{block}transformer.shared_head.output.weight"


def head_layer(family: str, config: Any = None) -> int:
    """Return the index of the trunk's layer with the same kinds of attention and MLP as the heads.

    Args:
        config: transformers' config. A published Step-3.5 starts with another layer than a tiny one, and in some Gemma
            4 the last layers have no keys and values.
    """
    if family in GEMMA4 and config is not None:
        kinds = config.layer_types[: config.num_hidden_layers - config.num_kv_shared_layers]
        return len(kinds) - 1 - kinds[::-1].index("full_attention")
    if family in STEP and config is not None:
        kinds = zip(config.layer_types, config.mlp_layer_types, strict=True)
        return list(kinds).index(("sliding_attention", "dense"))
    return 0 if family in ("ernie4_5_moe", *WINDOWED_HEADS) else -1


def without_own_input(block: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors of a layer of Gemma 4 without those of its own input, which heads do not have."""
    return {name: tensor for name, tensor in block.items() if "per_layer" not in name}


def dtype_of(name: str, model: PreTrainedModel) -> torch.dtype:
    """Return the dtype of a tensor in transformers: the bias of GLM-4.5's router is always float32."""
    biases = ("e_score_correction_bias", "expert_bias", "router_bias")
    return torch.float32 if name.endswith(biases) else model.dtype


def as_in_files(family: str, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return tensors that transformers has in memory with the experts of files on the hub; those of gpt-oss, Step-3.5,
    Qwen3-VL and Gemma 4 are stacked.
    """
    if family in STEP:
        return per_matrix(tensors)
    if family == "qwen3_vl_moe":
        return transposed(tensors)
    return dict(tensors) if family in ("gpt_oss", *GEMMA4) else per_expert(tensors)


def head_in_files(family: str, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return tensors of a decoder layer that transformers has in memory with the experts of MTP heads in files."""
    return per_expert(tensors) if family in STACKED_TRUNK else as_in_files(family, tensors)


def per_matrix(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Split the stacks of gate and up, and give all stacks the names of matrices, as in files of Step-3.5."""
    result = {}
    for name, tensor in tensors.items():
        prefix, experts, stack = name.partition("mlp.experts.")
        if experts and stack == "gate_up_proj":
            gate, up = tensor.chunk(2, dim=1)
            result[f"{prefix}moe.gate_proj.weight"], result[f"{prefix}moe.up_proj.weight"] = gate.clone(), up.clone()
        elif experts:
            result[f"{prefix}moe.{stack}.weight"] = tensor
        else:
            result[name] = tensor
    return result


def transposed(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Transpose the matrices in stacks of experts."""
    stacks = ("experts.gate_up_proj", "experts.down_proj")
    return {name: tensor.mT.contiguous() if name.endswith(stacks) else tensor for name, tensor in tensors.items()}


def _is_transposed(name: str, tensors: Mapping[str, torch.Tensor]) -> bool:
    """Return whether a stack has transposed matrices, as in files of Qwen3-VL with experts."""
    prefix, experts, _ = name.partition("experts.")
    gate_up, down = (tensors.get(f"{prefix}{experts}{stack}") for stack in ("gate_up_proj", "down_proj"))
    return gate_up is not None and down is not None and gate_up.shape[2] == 2 * down.shape[1]


def per_expert(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Split stacked experts into tensors with the names of files on the hub. The stacks are those of transformers'
    memory, or those of files.
    """
    result = {}
    for name, tensor in tensors.items():
        prefix, experts, kind = name.partition("experts.")
        if kind.endswith("_bias") or f"{name}_bias" in tensors:  # of gpt-oss
            for number, expert in enumerate(tensor):
                result[f"{prefix}{experts}{number}.{kind}"] = (expert.T if expert.dim() == 2 else expert).clone()
        elif kind == "gate_up_proj":
            for number, expert in enumerate(tensor.mT if _is_transposed(name, tensors) else tensor):
                gate, up = expert.chunk(2)
                result[f"{prefix}{experts}{number}.gate_proj.weight"] = gate.clone()
                result[f"{prefix}{experts}{number}.up_proj.weight"] = up.clone()
        elif kind in ("down_proj", "up_proj"):
            for number, expert in enumerate(tensor.mT if _is_transposed(name, tensors) else tensor):
                result[f"{prefix}{experts}{number}.{kind}.weight"] = expert.clone()
        else:
            result[name] = tensor
    return result


def alternating(num_layers: int) -> list[str]:
    """Return the kinds of layers with and without a window in turn."""
    return ["full_attention" if number % 2 else "sliding_attention" for number in range(num_layers)]


def mimo_v2_flash(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of MiMo-V2-Flash that depend on other sizes: layers with a window in turn, the first without
    experts, value heads of another size, and twice as many key-value heads in layers with a window.
    """
    kinds, heads, size = alternating(values["num_hidden_layers"]), values["num_attention_heads"], values["head_dim"]
    value_size = values.get("v_head_dim", size * 3 // 4)
    return {
        "layer_types": kinds,
        "mlp_layer_types": ["sparse" if number else "dense" for number in range(len(kinds))],
        "v_head_dim": value_size,
        "hybrid_layer_pattern": [int(kind == "sliding_attention") for kind in kinds],  # from here on for engines
        "moe_layer_freq": [int(number > 0) for number in range(len(kinds))],
        "swa_num_attention_heads": heads,
        "swa_num_key_value_heads": 2 * values["num_key_value_heads"],
        "swa_head_dim": size,
        "swa_v_head_dim": value_size,
    }


def make_tiny_model(
    family: str = "qwen3", tied: bool = False, dtype: torch.dtype = torch.float32, **config
) -> PreTrainedModel:
    """Return a random transformers model: 2 layers, hidden size 64, 2 heads of size 32 in 1 group.

    `config` changes any of it.
    """
    config_class, model_class = CLASSES[family]
    values = {
        "vocab_size": 128,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,  # SGLang reads 1 as "layer 0 is the MTP layer"
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,  # the smallest that vLLM's CPU attention takes
        "max_position_embeddings": 512,
        "tie_word_embeddings": tied and family not in NEVER_TIED,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    values |= OWN_SIZES.get(family, {})
    values |= config
    values |= {"layer_types": alternating(values["num_hidden_layers"])} if family == "olmo3" else {}
    if family == "mimo_v2_flash":
        values |= mimo_v2_flash(values)
    if family in STEP:
        values |= lists_of_step(values) | config
    if family == "nemotron_h" and not config.keys() & {"layers_block_type"}:
        values["layers_block_type"] = kinds_of_nemotron_h(values["num_hidden_layers"])
    if family in LATENT:  # no groups of queries; transformers takes head_dim for that of the rotary part
        values |= {"num_key_value_heads": values["num_attention_heads"], "head_dim": values["qk_rope_head_dim"]}
    model = model_class(config_class(**values)).to(dtype).eval()
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.data = torch.randn(buffer.shape) * 0.1  # changes the choice of experts for some tokens
            if name.endswith("layer_scalar"):
                buffer.copy_(0.5 + torch.rand(1))
        for name, parameter in model.named_parameters():
            std = 0.5 if "embed" in name else 0.2  # large enough for logits to differ clearly between tokens
            if parameter.shape[-1] > 128 and parameter.dim() > 1:  # VLLM_LATENT_SIZES: attention would saturate
                std *= 8 / parameter.shape[-1] ** 0.5
            parameter.copy_((1.0 if "norm" in name else 0.0) + torch.randn(parameter.shape) * std)
    return model


def layers_of_head(config: Any) -> list[int]:
    """Return the numbers of trunk layers of Nemotron-H whose kinds are those of the layers in a head."""
    kinds = config.layers_block_type
    return [kinds.index(kind) for kind in ("full_attention", "moe") if kind in kinds]


def kinds_of_nemotron_h(num_layers: int) -> list[str]:
    """Return the kinds of layers: every kind, in turn. There are at least four."""
    kinds = ("linear_attention", "full_attention", "moe", "mlp")
    return [kinds[number % 4] for number in range(max(num_layers, 4))]


def lists_of_step(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the lists of Step-3.5. The first layer is dense, and has a window like the heads."""
    experts = values["num_hidden_layers"] - 1
    return {
        "layer_types": alternating(experts + 1),
        "mlp_layer_types": ["dense"] + ["sparse"] * experts,
        "num_sliding_attention_heads": 2 * values["num_attention_heads"],
        "swiglu_limits": [0.0] * (experts + 1),  # vLLM does not support a limit of experts on a CPU
        "swiglu_limits_shared": [0.0] + [1.5] * experts,
    }


def step3p5(sizes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config.json of a Step-3.5 with these sizes."""
    config = Step3p7TextConfig(**{**sizes, **OWN_SIZES["step3p5"], **lists_of_step(sizes)})
    return step_as_published(config.to_dict(), 0)


def write_hf(
    directory: Path,
    model: PreTrainedModel,
    family: str,
    mtp_tensors: dict,
    depth: int,
    packed_experts: bool = False,
) -> Path:
    """Write trunk, MTP tensors, and a config.json that declares `depth` heads.

    `mtp_tensors` and `depth` are separate, so that a test can write a checkpoint with a wrong config.json.
    """
    directory.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    tensors = tensors if packed_experts else as_in_files(family, tensors)
    if model.config.tie_word_embeddings:
        del tensors["lm_head.weight"]
    config: dict[str, Any] = model.config.to_dict() | {"architectures": [type(model).__name__]}
    tensors = {hub_name(family, name): tensor for name, tensor in tensors.items()}
    if family in WRAPPED:
        tensors |= carried_tensors(family)
    save_file(tensors | mtp_tensors, directory / "model.safetensors", metadata={"format": "pt"})
    if family == "mimo":
        config |= {"model_type": "mimo", "architectures": ["MiMoForCausalLM"]}
    if family == "kimi_k2":
        config["model_type"] = family
    if family == "olmo3":  # as published; SGLang reads nothing else
        settings = config.pop("rope_parameters")["full_attention"]
        config |= {"rope_theta": settings.pop("rope_theta"), "rope_scaling": settings}
    if family in STEP:
        config = step_as_published(config, depth)
    if family in GEMMA4:
        config = gemma4_as_published(config)
    if family == "nemotron_h":
        config["num_hidden_layers"] = len(config["layers_block_type"])
        # as published; SGLang reads no other names
        older = {"linear_attention": "mamba", "full_attention": "attention"}
        for key in ("layers_block_type", "mtp_layers_block_type"):
            config[key] = [older.get(kind, kind) for kind in config[key]]
        if "moe" not in config["layers_block_type"]:
            config["mtp_hybrid_override_pattern"] = "*"
    if depth or family in ("ernie4_5_moe", "mimo", *NEXT_LAYER_HEADS):
        config[depth_key(family)] = depth
    config["dtype"] = str(model.dtype).removeprefix("torch.")
    if family in WRAPPED:
        config = wrapped(config, family)
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    return directory


def step_as_published(config: dict[str, Any], depth: int) -> dict[str, Any]:
    """Return the config.json of Step-3.5 with the keys of published files, given the config of transformers."""
    kinds = config["layer_types"] + ["sliding_attention"] * depth
    ropes = config["rope_parameters"]
    full = dict(ropes["full_attention"])
    theta = {kind: ropes[kind]["rope_theta"] for kind in set(kinds)}
    factor = {kind: ropes[kind].get("partial_rotary_factor", 1.0) for kind in set(kinds)}
    for key in ("rope_theta", "partial_rotary_factor"):
        full.pop(key, None)
    sparse = [number for number, kind in enumerate(config["mlp_layer_types"]) if kind == "sparse"]
    groups, size = config["num_key_value_heads"], config["head_dim"]
    renamed = {"num_key_value_heads": "num_attention_groups", "n_routed_experts": "moe_num_experts"}
    renamed |= {"num_experts_per_tok": "moe_top_k"}
    only_in_transformers = ("rope_parameters", "per_layer_config", "mlp_layer_types", "num_sliding_attention_heads")
    kept = {key: value for key, value in config.items() if key not in only_in_transformers and "mtp_" not in key}
    if config["eos_token_id"] is None:  # vLLM would stop at tokens 2 and 3
        kept["eos_token_id"] = [config["vocab_size"]]
    return {renamed.get(key, key): value for key, value in kept.items()} | {
        "layer_types": kinds,
        "rope_theta": [theta[kind] for kind in kinds],
        "partial_rotary_factors": [factor[kind] for kind in kinds],
        "rope_scaling": full if full["rope_type"] != "default" else None,
        "yarn_only_types": ["full_attention"],
        "moe_layers_enum": ",".join(map(str, sparse)),
        "attention_other_setting": {
            "attention_type": "sliding_attention",
            "num_attention_heads": config["num_sliding_attention_heads"],
            "num_attention_groups": groups,
            "head_dim": size,
        },
        "swiglu_limits": config["swiglu_limits"] + [0.0] * depth,
        "swiglu_limits_shared": config["swiglu_limits_shared"] + [0.0] * depth,
        "use_head_wise_attn_gate": True,
        "use_moe_router_bias": True,
        "need_fp32_gate": True,
        "norm_expert_weight": True,
        "moe_router_activation": "sigmoid",
        "zero_centered": True,
    }


def gemma4_as_published(config: dict[str, Any]) -> dict[str, Any]:
    """Return the config.json of Gemma 4 with the keys of published files, given the config of transformers."""
    of_full = next(iter(config["per_layer_config"].values()))
    groups = of_full.get("num_key_value_heads")
    own = {"global_head_dim": of_full["head_dim"], "num_global_key_value_heads": groups}
    return {key: value for key, value in config.items() if key != "per_layer_config"} | own


def depth_key(family: str) -> str:
    """Return the key of config.json for the number of MTP heads."""
    return "mtp_num_hidden_layers" if family.startswith("qwen3_5") else "num_nextn_predict_layers"


def hub_name(family: str, name: str) -> str:
    """Return a tensor's name in files, given its name in transformers' language model."""
    for memory, hub in HUB_NAMES.get(family, {}).items():
        name = name.replace(memory, hub)
    if family in COPIED_TOWER and name == "lm_head.weight":
        return "language_model.lm_head.weight"
    return name.replace("model.", f"{TEXT_PREFIX[family]}.", 1) if family in WRAPPED else name


def head_name(family: str, name: str) -> str:
    """Return the name in files of a tensor in a head's decoder layer, given its name in transformers' layer."""
    if family == "mimo_v2_flash":
        name = name.replace("post_attention_layernorm", "pre_mlp_layernorm")
    return hub_name(family, name)


def memory_name(family: str, name: str) -> str:
    """Invert `hub_name`."""
    for memory, hub in HUB_NAMES.get(family, {}).items():
        name = name.replace(hub, memory)
    name = name.replace("pre_mlp_layernorm", "post_attention_layernorm")  # in heads of MiMo-V2-Flash
    if family in COPIED_TOWER and name == "language_model.lm_head.weight":
        return "lm_head.weight"
    return name.replace(f"{TEXT_PREFIX[family]}.", "model.", 1) if family in WRAPPED else name


def promise(hf_dir: Path, depth: int) -> None:
    """Change config.json to declare `depth` MTP heads, whatever the tensors are."""
    path = hf_dir / "config.json"
    config = json.loads(path.read_text())
    config.get("text_config", config)[depth_key(config["model_type"])] = depth
    path.write_text(json.dumps(config))


VISION = {"model.visual.blocks.0.weight": torch.arange(12.0).view(3, 4), "model.visual.merger.bias": torch.ones(5)}


ARCHITECTURES = {
    "exaone4_5": "Exaone4_5_ForConditionalGeneration",
    "gemma3": "Gemma3ForConditionalGeneration",
    "gemma4": "Gemma4ForConditionalGeneration",
    "gemma4_unified": "Gemma4UnifiedForConditionalGeneration",
    "kimi_k25": "KimiK25ForConditionalGeneration",
    "mistral3": "Mistral3ForConditionalGeneration",
    "qwen3_5": "Qwen3_5ForConditionalGeneration",
    "qwen3_5_moe": "Qwen3_5MoeForConditionalGeneration",
    "qwen2_5_vl": "Qwen2_5_VLForConditionalGeneration",
    "qwen3_vl": "Qwen3VLForConditionalGeneration",
    "qwen3_vl_moe": "Qwen3VLMoeForConditionalGeneration",
    "step3p7": "Step3p7ForConditionalGeneration",
}
"""transformers' classes of the families in `WRAPPED`."""


PIXTRAL = {"model_type": "pixtral", "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1}
PIXTRAL |= {"num_attention_heads": 1, "head_dim": 8, "image_size": 28, "patch_size": 14}
TOWERS = {"gemma3": PIXTRAL | {"model_type": "siglip_vision_model"}, "mistral3": PIXTRAL}
"""`vision_config` of towers that are copied, if transformers reads it."""


def carried_tensors(family: str) -> dict[str, torch.Tensor]:
    """Return the tensors outside of the language model in the files of a family in `WRAPPED`."""
    return {hf_name.replace("model.visual.", VISUAL_PREFIX[family]): tensor for hf_name, tensor in VISION.items()}


VISUAL_PREFIX = dict.fromkeys(WRAPPED, "model.visual.") | {"qwen2_5_vl": "visual.", "gemma4": "model.vision_tower."}
VISUAL_PREFIX |= {"gemma4_unified": "model.vision_embedder."}
VISUAL_PREFIX |= dict.fromkeys(COPIED_TOWER, "vision_tower.") | {"step3p7": "vision_model."}
"""Prefixes of the vision tower's tensors in these families' files."""


def wrapped(config: dict[str, Any], model_type: str) -> dict[str, Any]:
    """Return the config.json of a vision-language model that contains the given config of its language model."""
    vision = {"depth": 1, "hidden_size": 8, "num_heads": 1, "model_type": f"{model_type}_vision"}
    of_text = {"exaone4_5": "exaone4", "kimi_k25": "kimi_k2", "mistral3": "mistral", "step3p7": "step3p5"}
    config |= {"model_type": of_text.get(model_type, f"{model_type}_text")}
    return {
        "architectures": [ARCHITECTURES[model_type]],
        "model_type": model_type,
        "text_config": config,
        "tie_word_embeddings": config["tie_word_embeddings"],
        "vision_config": TOWERS.get(model_type, vision),
    }


VISION_TOWERS: dict[str, tuple[type, type]] = {
    "qwen3_5": (Qwen3_5VisionConfig, Qwen3_5VisionModel),
    "qwen3_5_moe": (Qwen3_5VisionConfig, Qwen3_5VisionModel),
    "qwen2_5_vl": (Qwen2_5_VLVisionConfig, Qwen2_5_VisionTransformerPretrainedModel),
    "qwen3_vl": (Qwen3VLVisionConfig, Qwen3VLVisionModel),
    "qwen3_vl_moe": (Qwen3VLMoeVisionConfig, Qwen3VLMoeVisionModel),
}
VISION_SIZES: dict[str, Any] = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "in_channels": 3,
    "patch_size": 4,
    "temporal_patch_size": 2,
    "spatial_merge_size": 2,
    "num_position_embeddings": 16,
}
# The rotary settings of a tiny model with images: 8 angles of each head turn, with different positions.
_AXES: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2]}
_AXES_OF_HALF: dict[str, Any] = {
    "partial_rotary_factor": 0.5,
    "rope_parameters": _AXES | {"partial_rotary_factor": 0.5, "mrope_interleaved": True},
}
_AXES_OF_QWEN3_VL = {"rope_parameters": _AXES | {"mrope_section": [6, 5, 5], "mrope_interleaved": True}}
AXES_OF_IMAGES: dict[str, dict[str, Any]] = {
    "qwen3_5": _AXES_OF_HALF,
    "qwen3_5_moe": _AXES_OF_HALF,
    "qwen2_5_vl": {"rope_parameters": _AXES | {"mrope_section": [6, 5, 5]}},
    "qwen3_vl": _AXES_OF_QWEN3_VL,
    "qwen3_vl_moe": _AXES_OF_QWEN3_VL,
}
# Windows of 2 x 2 outputs, and full attention in the last block. Outputs of both blocks for deepstack.
OWN_VISION_SIZES: dict[str, dict[str, Any]] = {
    "qwen2_5_vl": {"window_size": 16, "fullatt_block_indexes": [1]},
    "qwen3_vl": {"deepstack_visual_indexes": [0, 1]},
    "qwen3_vl_moe": {"deepstack_visual_indexes": [0, 1]},
}
IMAGE_TOKENS = {"image_token_id": 124, "video_token_id": 125, "vision_start_token_id": 126, "vision_end_token_id": 127}


def make_tiny_vision_hf(
    directory: Path, family: str = "qwen3_5", depth: int = 0, dtype: torch.dtype = torch.float32, **config
) -> Path:
    """Write a tiny random vision-language model with a tower; return its directory.

    Args:
        family, depth, dtype, config: as for `make_tiny_hf`.
    """
    make_tiny_hf(directory, family, depth, dtype=dtype, **{**AXES_OF_IMAGES[family], **config})
    path = directory / "config.json"
    content = json.loads(path.read_text())
    config_class, model_class = VISION_TOWERS[family]
    sizes = VISION_SIZES | OWN_VISION_SIZES.get(family, {}) | {"out_hidden_size": content["text_config"]["hidden_size"]}
    tower = model_class(config_class(**sizes)).to(dtype)
    tensors = load_file(directory / "model.safetensors")
    for name in carried_tensors(family):
        del tensors[name]
    for name, tensor in tower.state_dict().items():
        is_scale = name.endswith("weight") and ("norm" in name or "ln_q" in name)
        tensors[VISUAL_PREFIX[family] + name] = float(is_scale) + torch.randn(tensor.shape, dtype=dtype) * 0.2
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    vision = {**sizes, "model_type": config_class.model_type}
    path.write_text(json.dumps({**content, **IMAGE_TOKENS, "vision_config": vision}, indent=2) + "\n")
    return directory


def make_tiny_hf(
    directory: Path,
    family: str = "qwen3",
    depth: int = 0,
    tied: bool = False,
    dtype: torch.dtype = torch.float32,
    with_tokenizer: bool = False,
    seed: int = 0,
    packed_experts: bool = False,
    **config,
) -> Path:
    """Write a tiny random Hugging Face model; return its directory.

    Args:
        family: a key of CLASSES.
        depth: number of MTP heads, written with the family's names and declared in config.json.
        with_tokenizer: add a byte-level BPE tokenizer with a ChatML template, which determines the size of the
            vocabulary.
        packed_experts: write the trunk's experts stacked, as transformers has them in memory.
        config: changes of transformers' config, such as rope_scaling or num_hidden_layers.
    """
    directory = Path(directory)
    torch.manual_seed(seed)
    if with_tokenizer:
        tokenizer = make_tiny_tokenizer()
        ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
        config = {"vocab_size": len(tokenizer), **ids, **config}
        tokenizer.save_pretrained(directory)
    model = make_tiny_model(family, tied, dtype, **config)
    heads = random_mtp_tensors(model, family, depth)
    return write_hf(directory, model, family, heads, depth, packed_experts)
