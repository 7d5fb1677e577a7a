"""Step-3.5-Flash: sliding windows in three of four layers, a gate per attention head, and experts after dense layers.

Layers with a window have more attention heads and other rotary embeddings than the layers without one. Norms multiply
by 1 + weight. In the last layers, outputs of gate and up are limited. Three MTP heads, which are dense and have a
window, have output layers of their own. They read the states of the trunk and of the previous head before the norms, as
in the draft classes of vLLM 0.32 and SGLang 0.5.23.

transformers 5 has this model as the language model of Step-3.7 (`step3p7`), whose tensors have the same names, next to
those of a vision tower. Lists of config.json have an entry for each layer, followed by one for each head.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from swiftlite.base.drafting import Drafting
from swiftlite.base.heads import Heads
from swiftlite.bridge.join import PadEnd
from swiftlite.bridge.rows import Row
from swiftlite.families import dense, moe
from swiftlite.families.architecture import Outside
from swiftlite.families.attention import GroupedQueryAttention
from swiftlite.families.family import Family, HfConfig, MtpLayout
from swiftlite.families.layer import Layer
from swiftlite.families.mlp import Mlp
from swiftlite.families.rope import ROPE_KEYS
from swiftlite.families.serving.convention import Convention, Serving
from swiftlite.families.values import rope_problems, value_problems
from swiftlite.families.windows import FULL, KINDS, WINDOW

_STATED = (
    "head_dim",
    "moe_intermediate_size",
    "moe_num_experts",
    "moe_router_scaling_factor",
    "moe_top_k",
    "num_attention_groups",
    "share_expert_dim",
    "sliding_window",
)
# Only these values are computed, whatever config.json says, by at least one of transformers, vLLM and SGLang.
_ASSUMED = {
    "moe_router_activation": "sigmoid",
    "need_fp32_gate": True,
    "norm_expert_weight": True,
    "use_head_wise_attn_gate": True,
    "use_moe_router_bias": True,
}
_LISTS = ("layer_types", "partial_rotary_factors", "rope_theta", "swiglu_limits", "swiglu_limits_shared")
_NAMES = {
    "mlp.gate.e_score_correction_bias": "moe.router_bias",
    "mlp.gate.": "moe.gate.",
    "mlp.experts.": "moe.experts.",
    "mlp.shared_experts.": "share_expert.",
}
"""Names of the tensors of a mixture of experts, within a layer."""


def _check(hf_config: HfConfig) -> None:
    problems = dense.missing_numbers(hf_config, _STATED)
    of_trunk = dense.problems_of(
        _in_llama_words(hf_config),
        layer_types=KINDS,
        att_impl_type=("GQA", None),
        attention_bias=(False, None),
        mlp_bias=(False, None),
        gating=(True, "per-head", None),
        query_pre_attn_scalar=(hf_config.get("head_dim"), None),
        sink=(False, None),
        tie_word_embeddings=(False, None),
        use_bidirectional_attention=(False, None),
        use_moe=(True, None),
        use_rope_layers=([], None),
        zero_centered=(True, None),
        **dict.fromkeys(_KEYS_OF_TRANSFORMERS, (None,)),
    )
    problems += [problem.replace("num_key_value_heads", "num_attention_groups") for problem in of_trunk]
    for key, value in _ASSUMED.items():
        if hf_config.get(key) != value:
            problems.append(f"{key} {hf_config.get(key)!r} is not supported; it must be {value!r}")
    if not problems:
        problems += _list_problems(hf_config)
    if not problems:
        problems += _attention_problems(hf_config) + _rope_problems(hf_config) + _mixture_problems(hf_config)
    if not problems:
        problems += _head_problems(hf_config)
    dense.refuse(hf_config, problems)


_KEYS_OF_TRANSFORMERS = ("mlp_layer_types", "num_sliding_attention_heads", "per_layer_config", "rope_parameters")
"""Keys that only transformers writes and reads."""


def _in_llama_words(hf_config: HfConfig) -> dict[str, Any]:
    """Return the config of the trunk with the keys of Llama, without the lists of rotary settings."""
    words = {key: value for key, value in hf_config.items() if key not in ("rope_theta", "rope_scaling")}
    layers, kinds = hf_config.get("num_hidden_layers"), hf_config.get("layer_types")
    words |= {"num_key_value_heads": hf_config.get("num_attention_groups")}
    words |= {"layer_types": kinds[:layers] if isinstance(kinds, list) else kinds}
    return {"rms_norm_eps": 1e-5, **words}


def _list_problems(hf_config: HfConfig) -> list[str]:
    layers = hf_config["num_hidden_layers"]
    problems = [
        f"{key} is not a list with an entry for each of {layers} layers (num_hidden_layers)"
        for key in _LISTS
        if not isinstance(hf_config.get(key), list) or len(hf_config[key]) < layers
    ]
    if problems:
        return problems
    rotary = ("rope_theta", "partial_rotary_factors")
    return [f"{key} has an entry that is not a number" for key in rotary if None in hf_config[key]]


def _attention_problems(hf_config: HfConfig) -> list[str]:
    problems = []
    other = hf_config.get("attention_other_setting")
    if not isinstance(other, dict) or not isinstance(other.get("num_attention_heads"), int):
        return ["attention_other_setting lacks num_attention_heads, those of layers with a window"]
    groups = hf_config["num_attention_groups"]
    expected = {"attention_type": WINDOW, "num_attention_groups": groups, "head_dim": hf_config["head_dim"]}
    for key, value in expected.items():
        if other.get(key) != value:
            problems.append(f"attention_other_setting: {key} {other.get(key)!r} is not supported; it must be {value!r}")
    heads = other["num_attention_heads"]
    problems += [
        f"attention_other_setting: {problem}" for problem in value_problems({"num_attention_heads": heads}, {})
    ]
    if heads % groups:
        stated = f"attention_other_setting: num_attention_heads {heads}"
        problems.append(f"{stated} is not a multiple of num_attention_groups {groups}")
    if hf_config["sliding_window"] < 1:
        problems.append(f"sliding_window {hf_config['sliding_window']} is not positive")
    return problems


def _rope_problems(hf_config: HfConfig) -> list[str]:
    problems = []
    for key in ("rope_theta", "partial_rotary_factors"):
        for kind in KINDS:
            values = {value for value, of in zip(hf_config[key], hf_config["layer_types"], strict=False) if of == kind}
            if len(values) > 1:
                problems.append(f"{key} differs between layers with {kind} (layer_types): {sorted(values)}")
            if key == "partial_rotary_factors" and not values <= {0.5, 1}:
                problems.append(f"{key} {sorted(values)} is not supported; they can only be 0.5 or 1")
    scaling = hf_config.get("rope_scaling") or {}
    problems += [f"rope_scaling: {problem}" for problem in rope_problems(scaling)]
    if "type" in scaling:
        problems.append("rope_scaling: type is not supported; use rope_type")
    if scaling.get("rope_type") == "longrope":
        problems.append("rope_scaling: rope_type 'longrope' is not supported, as in transformers")
    if scaling and hf_config.get("yarn_only_types") != [FULL]:
        problems.append(f"yarn_only_types {hf_config.get('yarn_only_types')!r} is not supported; it must be [{FULL!r}]")
    return problems


def _mixture_problems(hf_config: HfConfig) -> list[str]:
    problems = moe.topk_problems(hf_config, "moe_num_experts", "moe_top_k")
    numbers, layers = _mixtures(hf_config), hf_config["num_hidden_layers"]
    if not numbers or not numbers <= set(range(layers)):
        problems.append(
            f"moe_layers_enum {hf_config.get('moe_layers_enum')!r} does not consist of numbers below "
            f"num_hidden_layers {layers}, separated by commas"
        )
    return problems


def _head_problems(hf_config: HfConfig) -> list[str]:
    problems = []
    layers, heads = hf_config["num_hidden_layers"], Heads.from_config(hf_config).layers
    kinds, limits = hf_config["layer_types"], hf_config["swiglu_limits_shared"]
    problems += [
        f"layer_types: {kind!r} of an MTP head is not supported; it can only be {WINDOW!r}"
        for kind in kinds[layers : layers + heads]
        if kind != WINDOW
    ]
    problems += [
        f"swiglu_limits_shared {limit} of an MTP head is not supported; it can only be 0"
        for limit in limits[layers : layers + heads]
        if limit
    ]
    trunk = [_layer(hf_config, number) for number in range(layers)]
    head = _head_layer(hf_config)
    if head.attention not in [layer.attention for layer in trunk]:
        problems.append(f"layer_types has no {WINDOW!r}, the attention of the MTP heads")
    if head.mlp not in [layer.mlp for layer in trunk]:
        problems.append(
            "moe_layers_enum leaves no layer without experts and with 0 in swiglu_limits_shared, like the MTP heads"
        )
    return problems


def _mixtures(hf_config: HfConfig) -> set[int]:
    """Return the numbers of the layers with experts; empty for an invalid list."""
    stated = hf_config.get("moe_layers_enum")
    if not isinstance(stated, str):
        return set()
    try:
        return {int(number) for number in stated.split(",")}
    except ValueError:
        return set()


def _layer(hf_config: HfConfig, number: int) -> Layer:
    attention = _attention(hf_config, hf_config["layer_types"][number])
    limit = hf_config["swiglu_limits_shared"][number] or None
    if number not in _mixtures(hf_config):
        return Layer(attention, replace(dense.mlp(hf_config), limit=limit))
    mixture = moe.experts_of(
        hf_config,
        "moe_num_experts",
        "moe_top_k",
        shared_ffn=hf_config["share_expert_dim"],
        expert_bias=True,
        limit=hf_config["swiglu_limits"][number] or None,
        shared_limit=limit,
        hf_is_stacked=True,
        router={
            **moe.SIGMOID_ROUTER,
            "moe_router_topk_scaling_factor": hf_config["moe_router_scaling_factor"],
        },
        router_is_float32=True,  # as in engines
    )
    return Layer(attention, mixture, _NAMES)


def _head_layer(hf_config: HfConfig) -> Layer:
    """Return the decoder layer of MTP heads: with a window, without experts."""
    return Layer(_attention(hf_config, WINDOW), Mlp(hf_config["hidden_size"], hf_config["intermediate_size"]))


def _attention(hf_config: HfConfig, kind: str) -> GroupedQueryAttention:
    attention = dense.attention(_in_llama_words(hf_config), qk_norm=True, rope=int(kind == FULL))  # index in KINDS
    rotary = {each: _rotary(hf_config, each) for each in KINDS}
    attention = replace(
        attention,
        rotary=rotary[kind],
        rope_start=rotary[WINDOW] if kind == FULL else 0,
        head_gate=True,
        hf_groups="num_attention_groups",
    )
    if kind == FULL:
        return attention
    return replace(
        attention,
        heads=hf_config["attention_other_setting"]["num_attention_heads"],
        window=hf_config["sliding_window"],
        hf_heads="attention_other_setting.num_attention_heads",
    )


def _rotary(hf_config: HfConfig, kind: str) -> int:
    """Return the number of rotary channels of a head in layers of this kind."""
    return int(hf_config["head_dim"] * _of_kind(hf_config, "partial_rotary_factors", kind))


def _of_kind(hf_config: HfConfig, key: str, kind: str) -> float:
    """Return the value of a list of config.json for layers of this kind; 1 without such layers."""
    pairs = zip(hf_config["layer_types"], hf_config[key], strict=False)
    return next((value for of, value in pairs if of == kind), 1)


def _rope(hf_config: HfConfig, kind: str) -> dict[str, Any]:
    """Return the rotary settings of a kind of layer, with the names of other families."""
    words = _in_llama_words(hf_config)
    settings = {"rope_type": "default"}
    if kind == FULL:
        settings |= hf_config.get("rope_scaling") or {}
    settings |= {
        "rope_theta": _of_kind(hf_config, "rope_theta", kind),
        "partial_rotary_factor": _of_kind(hf_config, "partial_rotary_factors", kind),
    }
    return {key: words[key] for key in ROPE_KEYS if key in words} | {"rope_parameters": settings}


def _outside(hf_config: HfConfig) -> Outside:
    plain = dense.outside(_in_llama_words(hf_config))
    return replace(
        plain,
        mcore_config={**plain.mcore_config, "layernorm_zero_centered_gamma": True},
        ropes=tuple(_rope(hf_config, kind) for kind in KINDS),
        head_layer=_head_layer(hf_config),
        heads_have_output_layers=True,
    )


def _frame_rows(hf_config: HfConfig, head: int) -> list[Row]:
    rows = moe.frame_rows(hf_config, head, output_norm="transformer.shared_head.norm")
    name = f"{moe.NEXT_LAYER_HEADS.block(hf_config, head)}transformer.shared_head.output.weight"
    shape = (hf_config["vocab_size"], hf_config["hidden_size"])
    return [*rows, Row(f"mtp.layers.{head}.output_layer.weight", {name: shape}, PadEnd())]


def _lists_with_heads(hf_config: HfConfig, number: int) -> dict[str, Sequence[Any]]:
    """Return the lists of config.json with entries for this number of heads."""
    layers = hf_config["num_hidden_layers"]
    ends = {key: _of_kind(hf_config, key, WINDOW) for key in ("partial_rotary_factors", "rope_theta")}
    ends |= {"layer_types": WINDOW, "swiglu_limits": 0.0, "swiglu_limits_shared": 0.0}
    return {key: [*hf_config[key][:layers], *[ends[key]] * number] for key in _LISTS}


STEP3P5 = Family(
    name="step3p5",
    check=_check,
    layer=_layer,
    outside=_outside,
    mtp=MtpLayout(
        moe.NEXT_LAYER_HEADS.head_of,
        moe.NEXT_LAYER_HEADS.block,
        _frame_rows,
        drafting=Drafting(takes_before_norm=True, recycles_before_norm=True, chains_before_norm=True),
        config=_lists_with_heads,
    ),
    norm_start=0.0,
    memory_names={own: name for name, own in _NAMES.items()},
    numbers_by_layer={
        "partial_rotary_factors": (1e-6, 1.0),
        "rope_theta": (1e-6, 1e30),
        "swiglu_limits": (0.0, 1e6),
        "swiglu_limits_shared": (0.0, 1e6),
    },
    serving=Serving(
        vllm=Convention("Step3p5MTP", block="model.layers.{layer}.mtp_block.", has_own_names=True),
        sglang=Convention(
            "Step3p5MTP",
            drafting=Drafting(takes_before_norm=True, recycles_before_norm=True, chains_before_norm=True),
            block="model.mtp_block.",
            plain=("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj"),
        ),
        transformers="swiftlite.engines.transformers.step3p5:trunk_of",
    ),
    tiny={
        "num_key_value_heads": 2,  # vLLM does not support a single one
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "share_expert_dim": 32,
        "moe_router_scaling_factor": 1.5,
        "sliding_window": 8,
        "pad_token_id": 0,
        "rope_parameters": {
            "full_attention": {
                "rope_type": "llama3",
                "factor": 2.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 32.0,
                "original_max_position_embeddings": 64,
                "rope_theta": 5000000.0,
                "partial_rotary_factor": 0.5,
            },
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0},
        },
    },
)
STEP3P7 = replace(
    STEP3P5,
    name="step3p7",
    language_model=("model.", "lm_head."),
    serving=Serving(transformers=STEP3P5.serving.transformers),
)
