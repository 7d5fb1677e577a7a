"""Gemma 3 (text): sliding windows alternate with full attention, which has other rotary embeddings.

Norms multiply by 1 + weight, and are also behind attention and MLP. Embeddings are multiplied by the square root of
their size. MTP heads have full attention. Soft caps, which Gemma 2 has, are not supported.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from swiftlite.families import dense
from swiftlite.families.architecture import Outside
from swiftlite.families.family import Family, HfConfig
from swiftlite.families.layer import Layer
from swiftlite.families.rope import ROPE_KEYS

_WINDOW, _FULL = "sliding_attention", "full_attention"
_KINDS = (_WINDOW, _FULL)
# Old files have bases of rotary angles instead of rope_parameters.
_BASES = {_WINDOW: ("rope_local_base_freq", 10_000.0), _FULL: ("rope_theta", 1_000_000.0)}
# Sizes whose defaults in transformers are not derived from other sizes.
_STATED = ("head_dim", "num_key_value_heads", "query_pre_attn_scalar", "sliding_window")


def _check(hf_config: HfConfig) -> None:
    rope = hf_config.get("rope_parameters")
    is_nested = rope is None or any(kind in rope for kind in _KINDS)
    # The checks of other families are those of one kind of rotary embedding.
    flat = {key: value for key, value in hf_config.items() if key != "rope_parameters"}
    problems = dense.missing_numbers(hf_config, _STATED)
    problems += dense.problems_of(
        flat,
        layer_types=_KINDS,
        hidden_activation=("gelu_pytorch_tanh",),
        hidden_act=("gelu_pytorch_tanh", None),
        attention_bias=(False, None),
        attn_logit_softcapping=(None,),
        final_logit_softcapping=(None,),
        use_bidirectional_attention=(False, None),
    )
    if not is_nested:
        problems.append(f"rope_parameters has settings for neither {' nor '.join(map(repr, _KINDS))}")
    elif rope is not None:
        problems += [
            f"rope_parameters: {kind} {rope[kind]!r} is not an object"
            for kind in _KINDS
            if not isinstance(rope.get(kind) or {}, dict)
        ]
    for kind in _KINDS if not problems else ():
        factor = _rope(hf_config, kind)["rope_parameters"].get("partial_rotary_factor")
        if factor not in (1, None):
            problems.append(f"rope_parameters: partial_rotary_factor {factor} is not supported; it can only be 1")
    if not problems:
        kinds, number = _layer_types(hf_config), hf_config["num_hidden_layers"]
        if len(kinds) != number:
            problems.append(f"layer_types has {len(kinds)} entries, num_hidden_layers is {number}")
        elif _FULL not in kinds:
            problems.append(f"layer_types has no {_FULL!r}, the attention of the MTP heads")
        if hf_config["sliding_window"] < 1:
            problems.append(f"sliding_window {hf_config['sliding_window']} is not positive")
    dense.refuse(hf_config, problems)


def _layer_types(hf_config: HfConfig) -> Sequence[str]:
    """Return the kind of each layer. By default, every `sliding_window_pattern`-th layer has full attention."""
    stated = hf_config.get("layer_types")
    if stated is not None:
        return stated
    interval = hf_config.get("sliding_window_pattern") or 6
    numbers = range(1, hf_config["num_hidden_layers"] + 1)
    return [_WINDOW if number % interval else _FULL for number in numbers]


def _rope(hf_config: HfConfig, kind: str) -> dict[str, Any]:
    """Return the rotary settings of a kind of layer, with the names of other families."""
    settings: dict[str, Any] = {"rope_type": "default"}
    if kind == _FULL:
        settings |= hf_config.get("rope_scaling") or {}
    settings |= (hf_config.get("rope_parameters") or {}).get(kind) or {}
    key, default = _BASES[kind]
    settings.setdefault("rope_theta", hf_config.get(key, default))
    sizes = {key: hf_config[key] for key in ROPE_KEYS if key in hf_config and not key.startswith("rope_")}
    return sizes | {"rope_parameters": settings}


def _layer(hf_config: HfConfig, number: int) -> Layer:
    kind = _layer_types(hf_config)[number]
    attention = dense.attention(
        hf_config,
        qk_norm=True,
        window=hf_config["sliding_window"] if kind == _WINDOW else None,
        rope=int(kind == _FULL),  # index in _KINDS
    )
    attention = replace(attention, scale=hf_config["query_pre_attn_scalar"] ** -0.5)
    return Layer(attention, replace(dense.mlp(hf_config), activation="gelu_pytorch_tanh"), has_output_norms=True)


def _outside(hf_config: HfConfig) -> Outside:
    plain = dense.outside(hf_config)
    return replace(
        plain,
        is_tied=hf_config.get("tie_word_embeddings", True),
        embedding_multiplier=hf_config["hidden_size"] ** 0.5,
        multiplies_in_embedding=True,
        ropes=tuple(_rope(hf_config, kind) for kind in _KINDS),
        mcore_config={
            **plain.mcore_config,
            "layernorm_zero_centered_gamma": True,
            "activation_func": "gelu_pytorch_tanh",
        },
    )


GEMMA3_TEXT = Family(
    name="gemma3_text",
    check=_check,
    layer=_layer,
    outside=_outside,
    mtp=dense.QWEN3_NEXT_HEADS,
    norm_start=0.0,
)
