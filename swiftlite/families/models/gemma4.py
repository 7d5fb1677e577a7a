"""Gemma 4: sliding windows alternate with full attention, which has larger heads, fewer heads of keys, and another
rotary embedding.

Values are normalized, and in full attention can be the projected keys. Attention scores have no factor. Norms are also
behind attention and MLP, and each layer multiplies its output by a number. In 26B-A4B, experts are computed next to the
MLP. Embeddings are multiplied by the square root of their size. Logits have a cap. MTP heads have full attention.

`gemma4` are the models with towers for images and sound, `gemma4_unified` is the 12B, which projects patches of images
and frames of sound without a tower.

In E2B and E4B, each layer has an input of its own, from a second embedding of the token and a projection of the first.
The last layers read the keys and values of the last layer of the same kind before them, and in E2B have an MLP of twice
the width. Published files also have the unused matrices of keys and values of these layers, which are copied. MTP heads
have keys and values of their own, and no further input.
"""

import re
from dataclasses import replace

from swiftlite.families import dense, windows
from swiftlite.families.architecture import Outside
from swiftlite.families.attention import GroupedQueryAttention
from swiftlite.families.experts_and_mlp import ExpertsAndMlp
from swiftlite.families.family import HfConfig
from swiftlite.families.gemma4_layers import INTERVAL, key_layers, kinds_of_layers, of_full_layers
from swiftlite.families.layer import Layer
from swiftlite.families.mlp import Mlp
from swiftlite.families.models.qwen3_moe import mixture
from swiftlite.families.serving import vllm
from swiftlite.families.serving.convention import Convention, PluginClasses, Serving
from swiftlite.families.wrapped import nested

_BASES: windows.Bases = {windows.WINDOW: (None, 10_000.0), windows.FULL: (None, 1_000_000.0)}
_ACTIVATION = "gelu_pytorch_tanh"
_NAMES = {"mlp.gate.": "router.proj.", "mlp.experts.": "experts."}
# Keys whose defaults in transformers are not derived from other keys, or differ between programs.
_STATED = ("head_dim", "num_key_value_heads")
_OF_EXPERTS = ("num_experts", "top_k_experts", "moe_intermediate_size")
_UNREAD = re.compile(r"model\.(?:language_model\.)?layers\.(\d+)\.self_attn\.(?:k_proj|v_proj|k_norm|v_norm)\.")


def _full_layers(hf_config: HfConfig) -> list[str]:
    """Return the numbers of layers with full attention, as keys of `per_layer_config`."""
    return [str(number) for number, kind in enumerate(kinds_of_layers(hf_config)) if kind == windows.FULL]


def _check(hf_config: HfConfig) -> None:
    problems = dense.missing_numbers(hf_config, _STATED)
    problems += windows.problems_of(
        hf_config,
        _BASES,
        INTERVAL,
        takes_proportional=True,
        hidden_activation=(_ACTIVATION,),
        hidden_act=(_ACTIVATION, None),
        attention_bias=(False, None),
        attn_logit_softcapping=(None,),
        use_bidirectional_attention=("vision", None),
    )
    if "hidden_size_per_layer_input" not in hf_config:
        problems.append("hidden_size_per_layer_input is missing, which transformers would take for 256")
    stated = hf_config.get("rope_parameters")
    if not isinstance(stated, dict) or any(kind not in stated for kind in windows.KINDS):
        problems.append(f"rope_parameters has no settings for {' or for '.join(map(repr, windows.KINDS))}")
    if not problems:
        problems += _layer_problems(hf_config) + _expert_problems(hf_config) + _problems_of_e_models(hf_config)
    dense.refuse(hf_config, problems)


def _problems_of_e_models(hf_config: HfConfig) -> list[str]:
    kinds, vocab = kinds_of_layers(hf_config), hf_config.get("vocab_size_per_layer_input")
    size, shared = (hf_config.get(key) or 0 for key in ("hidden_size_per_layer_input", "num_kv_shared_layers"))
    problems = []
    if size and vocab != hf_config["vocab_size"]:
        problems.append(f"vocab_size_per_layer_input {vocab!r} is not vocab_size, {hf_config['vocab_size']}")
    if shared >= len(kinds) or not set(kinds) <= set(kinds[: len(kinds) - shared]):
        problems.append(f"num_kv_shared_layers {shared} leaves a kind of layer (layer_types) without keys and values")
    return problems


def _check_unified(hf_config: HfConfig) -> None:
    # transformers' class has none of these; vLLM would make them of these keys.
    of_others = ("enable_moe_block", "num_experts", "hidden_size_per_layer_input")
    has_more = [key for key in of_others if hf_config.get(key)]
    dense.refuse(hf_config, [f"{key} {hf_config[key]!r} is not supported for the 12B" for key in has_more])
    _check({"hidden_size_per_layer_input": 0, **hf_config})


def _layer_problems(hf_config: HfConfig) -> list[str]:
    last = kinds_of_layers(hf_config)[-1]
    if last != windows.FULL:
        return [f"layer_types: the last layer is {last!r}; transformers would make it {windows.FULL!r}"]
    stated, of_full = hf_config.get("per_layer_config"), of_full_layers(hf_config)
    if stated is not None and stated != dict.fromkeys(_full_layers(hf_config), of_full):
        return [f"per_layer_config differs between the layers with {windows.FULL!r}, or has others"]
    known = {"head_dim", "num_key_value_heads"}
    size = of_full.get("head_dim")
    if not isinstance(size, int) or size < 1 or of_full.keys() - known:
        return [f"global_head_dim is missing, or per_layer_config has other keys than {' and '.join(sorted(known))}"]
    heads, groups = hf_config["num_attention_heads"], of_full.get("num_key_value_heads", 1)
    if not isinstance(groups, int) or groups < 1 or heads % groups:
        return [f"num_attention_heads {heads} is not a multiple of num_global_key_value_heads {groups}"]
    return []


def _expert_problems(hf_config: HfConfig) -> list[str]:
    if not hf_config.get("enable_moe_block"):
        if hf_config.get("num_experts") is not None:  # of which vLLM makes experts
            return ["num_experts is set, but enable_moe_block is not true"]
        return []
    problems = dense.missing_numbers(hf_config, _OF_EXPERTS)
    if not problems and not 1 < hf_config["top_k_experts"] <= hf_config["num_experts"]:
        topk, experts = hf_config["top_k_experts"], hf_config["num_experts"]
        problems.append(f"top_k_experts {topk} is not between 2 and num_experts {experts}")
    return problems


def _attention(hf_config: HfConfig, number: int) -> GroupedQueryAttention:
    is_full = kinds_of_layers(hf_config)[number] == windows.FULL
    own = of_full_layers(hf_config) if is_full else {}
    key_layer = key_layers(hf_config)[number]
    return replace(
        windows.attention({**hf_config, **own}, number, INTERVAL),
        scale=1.0,
        keys_are_values=is_full and bool(hf_config.get("attention_k_eq_v")),
        value_norm=True,
        key_layer=None if key_layer == number else key_layer,
        keeps_keys=key_layer == number and bool(hf_config.get("num_kv_shared_layers")),
        rope_start=hf_config["head_dim"] if is_full else 0,
        hf_groups="num_global_key_value_heads" if "num_key_value_heads" in own else "num_key_value_heads",
    )


def _mlp(hf_config: HfConfig, number: int) -> Mlp | ExpertsAndMlp:
    mlp = replace(dense.mlp(hf_config), activation=_ACTIVATION)
    if hf_config.get("use_double_wide_mlp") and key_layers(hf_config)[number] != number:
        mlp = replace(mlp, ffn=2 * mlp.ffn)
    if not hf_config.get("enable_moe_block"):
        return mlp
    # `NormedRouter` divides the scores by their sum.
    own = {"num_experts_per_tok": hf_config["top_k_experts"], "norm_topk_prob": False}
    return ExpertsAndMlp(mlp, replace(mixture({**hf_config, **own}), activation=_ACTIVATION))


def _layer(hf_config: HfConfig, number: int) -> Layer:
    return Layer(
        _attention(hf_config, number),
        _mlp(hf_config, number),
        hf_names=_NAMES,
        has_output_norms=True,
        has_scalar=True,
        own_input=hf_config.get("hidden_size_per_layer_input") or 0,
    )


def _head_layer(hf_config: HfConfig) -> Layer:
    """Return the layer of MTP heads: that of the last layer with full attention whose keys are its own."""
    last_full = int(_full_layers(hf_config)[-1])
    return replace(_layer(hf_config, key_layers(hf_config)[last_full]), own_input=0)


def _is_unread(hf_config: HfConfig, hf_key: str) -> bool:
    """Return whether a tensor is an unused one of a layer that reads the keys and values of another."""
    found = _UNREAD.match(hf_key)
    number = int(found.group(1)) if found else -1
    return 0 <= number < len(kinds_of_layers(hf_config)) and key_layers(hf_config)[number] != number


def _outside(hf_config: HfConfig) -> Outside:
    plain = dense.outside(hf_config)
    of_full = {**hf_config, **of_full_layers(hf_config)}
    return replace(
        plain,
        is_tied=hf_config.get("tie_word_embeddings", True),
        embedding_multiplier=hf_config["hidden_size"] ** 0.5,
        multiplies_in_embedding=True,
        logits_cap=hf_config.get("final_logit_softcapping"),
        norms_round_last=True,
        head_layer=_head_layer(hf_config),
        own_inputs=hf_config.get("hidden_size_per_layer_input") or 0,
        ropes=(windows.rope(hf_config, windows.WINDOW, _BASES), windows.rope(of_full, windows.FULL, _BASES)),
        mcore_config={**plain.mcore_config, "activation_func": _ACTIVATION},
    )


_TEXT_CLASSES = PluginClasses("Gemma4ForCausalLM", trunk="gemma4:Gemma4ForCausalLM")
GEMMA4_TEXT = dense.family(
    name="gemma4_text",
    check=_check,
    layer=_layer,
    outside=_outside,
    is_unread=_is_unread,
    # In vLLM, Gemma4MTPModel is the architecture of assistants.
    serving=Serving(vllm=Convention("Gemma4HeadMTPModel", classes=_TEXT_CLASSES)),
    tiny={
        "sliding_window": 8,
        "global_head_dim": 64,
        "num_global_key_value_heads": 2,
        "attention_k_eq_v": True,
        "hidden_size_per_layer_input": 0,
        "final_logit_softcapping": 30.0,
    },
)
_CLASSES = PluginClasses("Gemma4ForConditionalGeneration", trunk="gemma4_mm:Gemma4ForConditionalGeneration")
GEMMA4 = nested(
    GEMMA4_TEXT,
    "gemma4",
    Serving(
        vllm=Convention("Gemma4ImageMTPModel", classes=_CLASSES),
        transformers="swiftlite.engines.transformers.language_models:gemma4",
    ),
    tiny={
        **GEMMA4_TEXT.tiny,
        "enable_moe_block": True,
        "num_experts": 4,
        "top_k_experts": 2,
        "moe_intermediate_size": 32,
    },
)
_UNIFIED = "Gemma4UnifiedForConditionalGeneration"
GEMMA4_UNIFIED = nested(
    GEMMA4_TEXT,
    "gemma4_unified",
    Serving(
        vllm=vllm.plugin(PluginClasses(_UNIFIED, f"gemma4_unified:{_UNIFIED}", draft_base="Gemma4ImageMTPModel")),
        transformers="swiftlite.engines.transformers.language_models:gemma4_unified",
    ),
    check=_check_unified,
    tiny={key: value for key, value in GEMMA4_TEXT.tiny.items() if key != "hidden_size_per_layer_input"},
)
