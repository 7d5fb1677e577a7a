"""Describe the model in a GGUF file that another program wrote: config.json and tokenizer.json from its metadata.

Only architectures that llama.cpp drafts in are read (`architectures.py`). The family is the one whose computation is
that of the file: a `glm4moe` with only dense layers is read as Llama, Qwen2 or Qwen3.
"""

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from swiftlite.base.errors import UserError
from swiftlite.gguf.drafters import check_has_trunk
from swiftlite.gguf.tokenizer import DIGITS, GPT2, PRE_TOKENIZERS

Config = dict[str, Any]
_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4  # llama.cpp's types of tokens
_SIGMOID = 2  # llama.cpp's number of the gating function
_BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}


class Metadata:
    """The metadata of a file, by key without the name of the architecture.

    Args:
        values: all metadata.
        tensors: names of all tensors.
    """

    def __init__(self, values: Mapping[str, Any], tensors: set[str]):
        self.values, self.tensors = values, tensors
        self.architecture = str(values.get("general.architecture", ""))

    def get(self, key: str, default: Any = None) -> Any:
        return self.values.get(f"{self.architecture}.{key}", default)

    def need(self, key: str) -> Any:
        """Return a value.

        Raises:
            UserError: the key is missing.
        """
        value = self.get(key)
        if value is None:
            raise UserError(f"{self.architecture}.{key} is missing in the GGUF file", "use the model's safetensors")
        return value

    @property
    def heads(self) -> int:
        return self.get("nextn_predict_layers", 0)

    @property
    def layers(self) -> int:
        """Number of the trunk's layers."""
        return self.need("block_count") - self.heads

    @property
    def tokens(self) -> list[str]:
        """The texts of all tokens."""
        tokens = self.values.get("tokenizer.ggml.tokens")
        if tokens is None:
            raise UserError("tokenizer.ggml.tokens is missing in the GGUF file", "use the model's safetensors")
        return tokens

    def has(self, suffix: str, layer: int = 0) -> bool:
        """Return whether a layer has a tensor."""
        return f"blk.{layer}.{suffix}" in self.tensors


def config_of(metadata: Metadata) -> Config:
    """Return the content of config.json.

    Raises:
        UserError: the architecture is not supported, or a key is missing.
    """
    read = _READERS.get(metadata.architecture)
    if read is None:
        check_has_trunk(metadata.architecture)
        supported = ", ".join(_READERS)
        raise UserError(
            f"GGUF files of the architecture {metadata.architecture!r} are not read with MTP heads",
            f"supported: {supported}; or use the model's safetensors",
        )
    config: Config = {
        "vocab_size": len(metadata.tokens),
        "hidden_size": metadata.need("embedding_length"),
        "num_hidden_layers": metadata.layers,
        "num_attention_heads": metadata.need("attention.head_count"),
        "intermediate_size": metadata.get("feed_forward_length", 0),
        "max_position_embeddings": metadata.need("context_length"),
        "rms_norm_eps": _short(metadata.need("attention.layer_norm_rms_epsilon")),
        "hidden_act": "silu",
        "tie_word_embeddings": "output.weight" not in metadata.tensors,
        "rope_parameters": _rope(metadata),
        "dtype": "bfloat16",
    }
    for name in ("bos", "eos", "pad"):
        key = {"pad": "padding"}.get(name, name)
        if (number := metadata.values.get(f"tokenizer.ggml.{key}_token_id")) is not None:
            config[f"{name}_token_id"] = number
    return config | read(metadata)


def _short(number: float) -> float:
    """Return the decimal number with the fewest digits that a float32 stands for."""
    return float(f"{number:.6g}")


def _rope(metadata: Metadata) -> Config:
    rope: Config = {"rope_theta": _short(metadata.get("rope.freq_base", 10000.0)), "rope_type": "default"}
    kind = metadata.get("rope.scaling.type")
    if kind in (None, "none"):
        return rope
    rope |= {"rope_type": kind, "factor": _short(metadata.need("rope.scaling.factor"))}
    if original := metadata.get("rope.scaling.original_context_length"):
        rope["original_max_position_embeddings"] = original
    for key in ("beta_fast", "beta_slow"):
        if (value := metadata.get(f"rope.scaling.yarn_{key}")) is not None:
            rope[key] = _short(value)
    if (multiplier := metadata.get("rope.scaling.yarn_log_multiplier")) is not None:
        # llama.cpp divides it by 0.1. Models of this architecture have the same number for both scales.
        rope |= {"mscale": _short(multiplier / 0.1), "mscale_all_dim": _short(multiplier / 0.1)}
    return rope


def not_read_by_transformers(metadata: Metadata, rope_factors: Sequence[float]) -> Config:
    """Return the values of config.json that transformers 5.19 does not read from a file.

    Args:
        rope_factors: divisors of the rotary frequencies, which files of Llama 3.1 and later contain; empty if the file
            has none.

    Raises:
        UserError: config.json cannot state how the file scales rotary positions.
    """
    values: Config = {}
    if (size := metadata.get("attention.key_length")) is not None:
        values["head_dim"] = size
    kind = metadata.get("rope.scaling.type")
    if kind in ("linear", "yarn") and not rope_factors:
        values["rope_parameters"] = _rope(metadata)
    elif kind in (None, "none") and rope_factors:
        values["rope_parameters"] = _rope(metadata) | _llama3(metadata, rope_factors)
    elif kind not in (None, "none"):
        raise UserError(f"the scaling {kind!r} of rotary positions is not read", "use the model's safetensors")
    return values


def _llama3(metadata: Metadata, factors: Sequence[float]) -> Config:
    """Return the parameters of `llama3` scaling from which a file's factors were computed.

    Published models of Llama 3.1 to 3.3 have different factors only.
    """
    rope: Config = {"rope_type": "llama3", "factor": _short(max(factors)), "original_max_position_embeddings": 8192}
    rope |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    base = metadata.get("rope.freq_base", 10000.0)
    for place, factor in enumerate(factors):
        wavelength = 2 * math.pi * base ** (place / len(factors))
        # 0 for wavelengths that are divided by the whole factor, 1 for those that stay.
        kept = min(1.0, max(0.0, (8192 / wavelength - 1.0) / 3.0))
        if not math.isclose(factor, 1 / ((1 - kept) / rope["factor"] + kept), rel_tol=1e-4):
            raise UserError("the factors rope_freqs.weight are not those of Llama 3", "use the model's safetensors")
    return rope


def _grouped_attention(metadata: Metadata) -> Config:
    heads = metadata.need("attention.head_count")
    return {
        "num_key_value_heads": metadata.get("attention.head_count_kv", heads),
        "head_dim": metadata.get("attention.key_length", metadata.need("embedding_length") // heads),
    }


def _partial_rotary(metadata: Metadata, config: Config) -> Config:
    return {"partial_rotary_factor": metadata.get("rope.dimension_count", config["head_dim"]) / config["head_dim"]}


def _experts_of_glm(metadata: Metadata) -> Config:
    """Return the keys of GLM-4.5 and DeepSeek-V3."""
    config = {
        "n_routed_experts": metadata.need("expert_count"),
        "num_experts_per_tok": metadata.need("expert_used_count"),
        "moe_intermediate_size": metadata.need("expert_feed_forward_length"),
        "n_shared_experts": metadata.need("expert_shared_count"),
        "first_k_dense_replace": metadata.get("leading_dense_block_count", 0),
        "routed_scaling_factor": _short(metadata.get("expert_weights_scale", 1.0)),
        "norm_topk_prob": bool(metadata.get("expert_weights_norm", False)),
        "num_nextn_predict_layers": metadata.heads,
        "n_group": 1,
        "topk_group": 1,
    }
    if groups := metadata.get("expert_group_count"):
        config |= {"n_group": groups, "topk_group": metadata.need("expert_group_used_count")}
    return config


def _glm4moe(metadata: Metadata) -> Config:
    attention = _grouped_attention(metadata)
    has_bias, has_norm = metadata.has("attn_q.bias"), metadata.has("attn_q_norm.weight")
    if metadata.get("leading_dense_block_count", 0) < metadata.layers:
        named = {"model_type": "glm4_moe", "attention_bias": has_bias, "use_qk_norm": has_norm}
        return named | attention | _partial_rotary(metadata, attention) | _experts_of_glm(metadata)
    # A dense model, see `architectures.py`.
    if has_norm:
        return attention | {"model_type": "qwen3", "attention_bias": False, "num_nextn_predict_layers": metadata.heads}
    model_type = "qwen2" if has_bias else "llama"
    return attention | {"model_type": model_type, "num_nextn_predict_layers": metadata.heads}


def _deepseek2(metadata: Metadata) -> Config:
    if metadata.get("expert_gating_func") != _SIGMOID:
        raise UserError("deepseek2 files are read only with sigmoid gating (expert_gating_func 2)", "use safetensors")
    rotary = metadata.need("rope.dimension_count")
    config = _experts_of_glm(metadata) | {
        "model_type": "deepseek_v3",
        "q_lora_rank": metadata.need("attention.q_lora_rank"),
        "kv_lora_rank": metadata.need("attention.kv_lora_rank"),
        "qk_nope_head_dim": metadata.need("attention.key_length_mla") - rotary,
        "qk_rope_head_dim": rotary,
        "v_head_dim": metadata.need("attention.value_length_mla"),
        "num_key_value_heads": metadata.need("attention.head_count"),
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "moe_layer_freq": 1,
    }
    if config["n_group"] == 1 and metadata.get("rope.scaling.type") is None:
        config["model_type"] = "glm4_moe_lite"
    return config


def _hy_v3(metadata: Metadata) -> Config:
    kinds = ["sparse" if metadata.has("ffn_gate_inp.weight", layer) else "dense" for layer in range(metadata.layers)]
    ffn = metadata.need("expert_feed_forward_length")
    config = _grouped_attention(metadata) | {
        "num_experts": metadata.need("expert_count"),
        "num_experts_per_tok": metadata.need("expert_used_count"),
        "moe_intermediate_size": ffn,
        "num_nextn_predict_layers": metadata.heads,
    }
    if metadata.get("expert_gating_func") != _SIGMOID:
        sparse = {"norm_topk_prob": bool(metadata.get("expert_weights_norm", False)), "decoder_sparse_step": 1}
        dense = [layer for layer, kind in enumerate(kinds) if kind == "dense"]
        return config | sparse | {"model_type": "qwen3_moe", "mlp_only_layers": dense}
    return config | {
        "model_type": "hy_v3",
        "num_shared_experts": metadata.need("expert_shared_feed_forward_length") // ffn,
        "router_scaling_factor": _short(metadata.get("expert_weights_scale", 1.0)),
        "expert_hidden_dim": ffn,
        "mlp_layer_types": kinds,
        "first_k_dense_replace": kinds.count("dense"),
        "qk_norm": True,
        "route_norm": True,
    }


def _hybrid(metadata: Metadata) -> Config:
    recurrent = metadata.get("attention.recurrent_layers")
    if recurrent is None:
        interval = metadata.get("full_attention_interval", 4)
        recurrent = [(layer + 1) % interval != 0 for layer in range(metadata.layers)]
    kinds = ["linear_attention" if flag else "full_attention" for flag in recurrent[: metadata.layers]]
    values, size = metadata.need("ssm.time_step_rank"), metadata.need("ssm.state_size")
    attention = _grouped_attention(metadata)
    config = attention | {
        "layer_types": kinds,
        "linear_num_key_heads": metadata.need("ssm.group_count"),
        "linear_num_value_heads": values,
        "linear_key_head_dim": size,
        "linear_value_head_dim": metadata.need("ssm.inner_size") // values,
        "linear_conv_kernel_dim": metadata.need("ssm.conv_kernel"),
        "attention_bias": False,
    }
    config |= _partial_rotary(metadata, attention)
    if metadata.get("expert_count"):
        config |= {
            "num_experts": metadata.need("expert_count"),
            "num_experts_per_tok": metadata.need("expert_used_count"),
            "moe_intermediate_size": metadata.need("expert_feed_forward_length"),
            "shared_expert_intermediate_size": metadata.need("expert_shared_feed_forward_length"),
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        }
    return config


def _qwen3next(metadata: Metadata) -> Config:
    return _hybrid(metadata) | {"model_type": "qwen3_next", "num_nextn_predict_layers": metadata.heads}


def _qwen35(metadata: Metadata) -> Config:
    model_type = "qwen3_5_moe_text" if metadata.get("expert_count") else "qwen3_5_text"
    return _hybrid(metadata) | {"model_type": model_type, "mtp_num_hidden_layers": metadata.heads}


_READERS = {
    "glm4moe": _glm4moe,
    "hy_v3": _hy_v3,
    "deepseek2": _deepseek2,
    "qwen3next": _qwen3next,
    "qwen35": _qwen35,
    "qwen35moe": _qwen35,
}


def tokenizer_files(metadata: Metadata) -> dict[str, str]:
    """Return the texts of tokenizer.json, tokenizer_config.json and the chat template, by file name.

    Raises:
        UserError: the tokenizer is not byte-level BPE with a known pre-tokenizer.
    """
    values = metadata.values
    pre = values.get("tokenizer.ggml.pre")
    pre_tokenizer = pre_tokenizer_of(metadata)
    if pre_tokenizer is None:
        known = ", ".join(sorted(PRE_TOKENIZERS.values()))
        raise UserError(
            f"the tokenizer of the GGUF file is not supported: model {values.get('tokenizer.ggml.model')!r}, "
            f"pre-tokenizer {pre!r}",
            f"supported: model gpt2 with {known}; or use the model's safetensors",
        )
    texts, types = metadata.tokens, values.get("tokenizer.ggml.token_type")
    if types is None:
        types = [_NORMAL] * len(texts)
    added = []
    for number, (text, kind) in enumerate(zip(texts, types, strict=True)):
        if kind in (_CONTROL, _USER_DEFINED):
            token = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
            added.append({"id": number, "content": text, **token, "special": kind == _CONTROL})
    content = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": pre_tokenizer,
        "post_processor": None,
        "decoder": _BYTES,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": pre in ("llama-bpe", "tekken"),  # as in llama.cpp
            "vocab": {text: number for number, text in enumerate(texts)},
            "merges": [merge.split(" ", 1) for merge in values.get("tokenizer.ggml.merges", ())],
        },
    }
    files = {"tokenizer.json": json.dumps(content, ensure_ascii=False)}
    config: Config = {"tokenizer_class": "PreTrainedTokenizerFast"}
    for name, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"), ("unk", "unknown")):
        number = values.get(f"tokenizer.ggml.{key}_token_id")
        if number is not None:
            config[f"{name}_token"] = texts[number]
    files["tokenizer_config.json"] = json.dumps(config, indent=2)
    if template := values.get("tokenizer.chat_template"):
        files["chat_template.jinja"] = str(template)
    return files


def pre_tokenizer_of(metadata: Metadata) -> Config | None:
    """Return the pre-tokenizer in tokenizer.json; None unless the tokenizer is byte-level BPE with a known one."""
    names = {name: expressions for expressions, name in PRE_TOKENIZERS.items()}
    expressions = names.get(str(metadata.values.get("tokenizer.ggml.pre")))
    if metadata.values.get("tokenizer.ggml.model") != "gpt2" or expressions is None:
        return None
    parts = [_pre_tokenizer(expression) for expression in expressions]
    if parts[-1]["type"] != "ByteLevel":  # which would encode bytes twice
        parts.append(_BYTES)
    return {"type": "Sequence", "pretokenizers": parts}


def _pre_tokenizer(expression: str) -> Config:
    if expression == GPT2:
        return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    if expression == DIGITS:
        return {"type": "Digits", "individual_digits": True}
    return {"type": "Split", "pattern": {"Regex": expression}, "behavior": "Isolated", "invert": False}
