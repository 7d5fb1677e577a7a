"""MiMo-V2-Flash: windows with sinks in most layers, values of another size than keys, and experts.

Layers with a window have other rotary embeddings and more key-value heads than the others. The decoder layer of a head
has the attention of layers with a window, and no experts.

Published files have the keys that vLLM and SGLang read (`hybrid_layer_pattern`, `swa_rope_theta` and so on).
transformers reads other keys (`layer_types`, `rope_parameters`), whose defaults are the values of the published model,
and ignores the former. config.json must therefore have the former, and both must describe the same model. The published
config.json does not declare its 3 heads: set `num_nextn_predict_layers`.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from swiftlite.bridge.rows import Row
from swiftlite.families import dense, moe, windows
from swiftlite.families.architecture import Outside
from swiftlite.families.family import Family, HfConfig, MtpLayout
from swiftlite.families.layer import Layer
from swiftlite.families.mlp import MixtureOfExperts, Mlp
from swiftlite.families.serving import sglang
from swiftlite.families.serving.convention import Convention, Serving
from swiftlite.families.windows import FULL, KINDS, WINDOW

_STATED = (
    "head_dim",
    "v_head_dim",
    "num_key_value_heads",
    "swa_num_attention_heads",
    "swa_num_key_value_heads",
    "swa_head_dim",
    "swa_v_head_dim",
    "swa_rope_theta",
    "rope_theta",
    "partial_rotary_factor",
    "sliding_window",
    "sliding_window_size",
    "attention_value_scale",
    "layernorm_epsilon",
    "n_routed_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
)
# Engines ask for these; transformers computes with these values whatever config.json says.
_ASSUMED = {"add_swa_attention_sink_bias": True, "scoring_func": "sigmoid", "topk_method": "noaux_tc"}
# What transformers computes with if config.json has only the keys that engines read.
_DEFAULTS = {"rms_norm_eps": 1e-5, "rope_theta": 5_000_000, "swa_rope_theta": 10_000, "partial_rotary_factor": 0.334}
_BASES: windows.Bases = {WINDOW: ("swa_rope_theta", None), FULL: ("rope_theta", None)}
_SINKS = {"self_attn.sinks": "self_attn.attention_sink_bias"}
_HEAD_NAMES = _SINKS | {"post_attention_layernorm.": "pre_mlp_layernorm."}


def _check(hf_config: HfConfig) -> None:
    problems = dense.missing_numbers(hf_config, _STATED)
    # `_rotary_problems` checks the settings of both kinds of layers.
    others = {key: value for key, value in hf_config.items() if key not in ("rope_parameters", "rope_scaling")}
    problems += dense.problems_of(
        _with_epsilon(others),
        reads=("partial_rotary_factor",),
        layer_types=KINDS,
        attention_bias=(False, None),
        add_full_attention_sink_bias=(False, None),
        tie_word_embeddings=(False, None),  # ignored by engines
        n_shared_experts=(0, None),
        n_group=(1, None),
        topk_group=(1, None),
        norm_topk_prob=(True, None),
        routed_scaling_factor=(1, None),  # ignored by vLLM
    )
    for key, value in _ASSUMED.items():
        if hf_config.get(key) != value:
            problems.append(f"{key} {hf_config.get(key)!r} is not supported; it must be {value!r}")
    if not problems:
        problems += _size_problems(hf_config) + _layer_problems(hf_config) + _rotary_problems(hf_config)
        problems += moe.topk_problems(hf_config, "n_routed_experts")
    dense.refuse(hf_config, problems)


def _with_epsilon(hf_config: HfConfig) -> dict[str, Any]:
    """Return the config with transformers' name of `layernorm_epsilon`."""
    return {"rms_norm_eps": _DEFAULTS["rms_norm_eps"], **hf_config}


def _size_problems(hf_config: HfConfig) -> list[str]:
    """Return a problem for each size that differs between the keys of engines and what transformers computes."""
    computed = {
        "swa_num_attention_heads": ("num_attention_heads", hf_config["num_attention_heads"]),
        "swa_num_key_value_heads": ("2 * num_key_value_heads", 2 * hf_config["num_key_value_heads"]),
        "swa_head_dim": ("head_dim", hf_config["head_dim"]),
        "swa_v_head_dim": ("v_head_dim", hf_config["v_head_dim"]),
        "sliding_window_size": ("sliding_window", hf_config["sliding_window"]),
        "layernorm_epsilon": ("rms_norm_eps", _with_epsilon(hf_config)["rms_norm_eps"]),
    }
    problems = [
        f"{key} {hf_config[key]} is not supported; it must be {name}, {value}"
        for key, (name, value) in computed.items()
        if hf_config[key] != value
    ]
    heads, groups = hf_config["num_attention_heads"], hf_config["swa_num_key_value_heads"]
    if heads % groups:
        problems.append(f"num_attention_heads {heads} is not a multiple of swa_num_key_value_heads {groups}")
    if hf_config["v_head_dim"] > hf_config["head_dim"]:
        problems.append(f"v_head_dim {hf_config['v_head_dim']} is larger than head_dim {hf_config['head_dim']}")
    if hf_config["sliding_window"] < 1:
        problems.append(f"sliding_window {hf_config['sliding_window']} is not positive")
    return problems


def _layer_problems(hf_config: HfConfig) -> list[str]:
    """Return a problem for each list of kinds of layers that is invalid, or not what transformers computes."""
    num_layers = hf_config["num_hidden_layers"]
    by_default = [FULL if number == 0 or number % 6 == 5 else WINDOW for number in range(num_layers)]
    problems = []
    for key, kinds, hf_key, default in (
        ("hybrid_layer_pattern", (FULL, WINDOW), "layer_types", by_default),
        ("moe_layer_freq", ("dense", "sparse"), "mlp_layer_types", ["dense"] + ["sparse"] * (num_layers - 1)),
    ):
        stated, computed = hf_config.get(key), hf_config.get(hf_key)
        if computed is None:
            computed = default
        if not isinstance(stated, list) or len(stated) != num_layers or any(kind not in (0, 1) for kind in stated):
            problems.append(f"{key} must be 0 ({kinds[0]}) or 1 ({kinds[1]}) for each of {num_layers} layers")
        elif [kinds[number] for number in stated] != list(computed):
            problems.append(f"{key} differs from {hf_key}, which is {list(computed)}")
    if not problems:
        if 1 not in hf_config["hybrid_layer_pattern"]:
            problems.append("hybrid_layer_pattern has no layer with a window, the attention of the MTP heads")
        if 0 not in hf_config["moe_layer_freq"]:
            problems.append("moe_layer_freq has no layer without experts, the MLP of the MTP heads")
    return problems


def _rotary_problems(hf_config: HfConfig) -> list[str]:
    """Return a problem for each rotary setting that is not supported, or differs between the keys of engines and of
    transformers."""
    by_kind = hf_config.get("rope_parameters")
    if by_kind is None:
        by_kind = {FULL: {}, WINDOW: {}}
    if not all(isinstance(by_kind.get(kind), Mapping) for kind in KINDS):
        return [f"rope_parameters must have settings for {' and '.join(map(repr, KINDS))}"]
    problems = []
    for kind in KINDS:
        found, key = by_kind[kind], _BASES[kind][0]
        assert key is not None
        if found.get("rope_type", "default") != "default":
            problems.append(f"rope_parameters: rope_type {found['rope_type']!r} is not supported; use 'default'")
        for own_key, hf_key in ((key, "rope_theta"), ("partial_rotary_factor", "partial_rotary_factor")):
            computed = found.get(hf_key, _DEFAULTS[own_key])
            if hf_config[own_key] != computed:
                problems.append(
                    f"{own_key} {hf_config[own_key]}, but rope_parameters[{kind!r}] has {hf_key} {computed}"
                )
    if hf_config.get("rope_scaling") not in (None, hf_config.get("rope_parameters")):
        problems.append(f"rope_scaling {hf_config['rope_scaling']!r} is not supported; it can only be null")
    size, factor = hf_config["head_dim"], hf_config["partial_rotary_factor"]
    if not 0 < factor <= 1 or int(size * factor) % 2 or int(size * factor) == 0:
        problems.append(f"partial_rotary_factor {factor} of head_dim {size} is not an even number of channels")
    return problems


def _layer(hf_config: HfConfig, number: int) -> Layer:
    mlp = _mixture(hf_config) if hf_config["moe_layer_freq"][number] else dense.mlp(hf_config)
    kind = WINDOW if hf_config["hybrid_layer_pattern"][number] else FULL
    return _layer_of(hf_config, kind, mlp, _SINKS)


def _layer_of(hf_config: HfConfig, kind: str, mlp: Mlp | MixtureOfExperts, names: Mapping[str, str]) -> Layer:
    attention = replace(
        dense.attention(hf_config, rope=KINDS.index(kind)),
        v_head_dim=hf_config["v_head_dim"],
        value_scale=hf_config["attention_value_scale"],
    )
    if kind == WINDOW:
        attention = replace(
            attention,
            groups=hf_config["swa_num_key_value_heads"],
            hf_groups="swa_num_key_value_heads",
            window=hf_config["sliding_window"],
            has_sinks=True,
        )
    return Layer(attention, mlp, names)


def _mixture(hf_config: HfConfig) -> MixtureOfExperts:
    return moe.experts_of(
        hf_config,
        "n_routed_experts",
        expert_bias=True,
        router={**moe.SIGMOID_ROUTER, "moe_router_load_balancing_type": "seq_aux_loss"},
        router_is_float32=True,  # as in engines
    )


def _outside(hf_config: HfConfig) -> Outside:
    settings = tuple(windows.rope(hf_config, kind, _BASES) for kind in KINDS)
    head_layer = _layer_of(hf_config, WINDOW, dense.mlp(hf_config), _HEAD_NAMES)
    return replace(dense.outside(_with_epsilon(hf_config)), ropes=settings, head_layer=head_layer)


def _prefix(hf_config: HfConfig, head: int) -> str:
    return f"model.mtp.layers.{head}."


def _frame_rows(hf_config: HfConfig, head: int) -> list[Row]:
    return dense.frame_rows(hf_config, head, _prefix(hf_config, head), ("eh_proj", "enorm", "hnorm", "final_layernorm"))


MIMO_V2_FLASH = Family(
    name="mimo_v2_flash",
    check=_check,
    layer=_layer,
    outside=_outside,
    mtp=MtpLayout(dense.numbered(r"model\.mtp\.(?:layers\.(\d+))?"), _prefix, _frame_rows),
    memory_names={inner: memory for memory, inner in _HEAD_NAMES.items()},
    serving=Serving(
        vllm=Convention("MiMoV2MTP", "first", block="model.mtp.layers.{head}.", plain=("self_attn.o_proj",)),
        # With windows, a second draft fails on a CPU; on GPUs it was not measured.
        sglang=Convention("MiMoV2MTP", "first", drafts_once=True, block=sglang.DECODER),
    ),
    tiny={
        **moe.TINY,
        "n_routed_experts": 4,
        "attention_value_scale": 0.7,
        "sliding_window": 8,
        "rms_norm_eps": 1e-05,
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 50000.0, "partial_rotary_factor": 0.5},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0, "partial_rotary_factor": 0.5},
        },
        "partial_rotary_factor": 0.5,  # from here on for engines
        "rope_theta": 50000.0,
        "swa_rope_theta": 1000.0,
        "layernorm_epsilon": 1e-05,
        "sliding_window_size": 8,
        "add_swa_attention_sink_bias": True,
        "n_shared_experts": None,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "num_nextn_predict_layers": 0,
    },
)
