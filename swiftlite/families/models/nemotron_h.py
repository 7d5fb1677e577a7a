"""Nemotron-H and Nemotron 3 (Nano, Super, Ultra) and 3.5: each layer is one of Mamba-2, attention, an MLP or experts.

Attention has no rotary embeddings. MLPs and experts have no gate, and the square of relu as activation. In Super and
Ultra, experts read latent states. The block of an MTP head has two layers of files: attention, then experts. In models
without experts, it is attention only.
"""

from dataclasses import replace
from typing import Any

from swiftlite.base.heads import REMOVE
from swiftlite.bridge.rows import Row
from swiftlite.families import dense, moe
from swiftlite.families.absent import NoAttention, NoMlp
from swiftlite.families.architecture import Outside
from swiftlite.families.attention import GroupedQueryAttention
from swiftlite.families.family import Family, HfConfig, MtpLayout
from swiftlite.families.layer import Layer
from swiftlite.families.mamba import Mamba2
from swiftlite.families.mlp import RELU2, MixtureOfExperts, Mlp
from swiftlite.families.serving.convention import Convention, Serving

_MAMBA, _ATTENTION, _MLP, _MOE = "linear_attention", "full_attention", "mlp", "moe"
_LETTERS = {"M": _MAMBA, "*": _ATTENTION, "-": _MLP, "E": _MOE}
_OLD_NAMES = {"mamba": _MAMBA, "attention": _ATTENTION}
_KINDS, _PATTERN = "layers_block_type", "hybrid_override_pattern"
_HEAD_SIZE = 128
"""Size of an attention head in all programs if config.json does not state `head_dim`."""
_SIZES = ("mamba_num_heads", "mamba_head_dim", "ssm_state_size", "n_groups", "conv_kernel", "num_key_value_heads")
_SHARED = "moe_shared_expert_intermediate_size"
# Keys that only the class in the model's repository reads, with other names in transformers and engines.
_ALIASES = ("mamba_n_groups", "mamba_d_conv", "mamba_expand", "mamba_conv_bias", "mamba_dt_limit")
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "mlp_hidden_act": (RELU2,),
    "mamba_hidden_act": ("silu",),
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "use_bias": (False, None),
    "mamba_proj_bias": (False, None),
    "use_conv_bias": (True, None),
    "residual_in_fp32": (False, None),
    "hidden_dropout": (0, None),
    "sliding_window": (None,),
    "tie_word_embeddings": (False, None),  # ignored by transformers and vLLM
    "n_shared_experts": (1, None),  # vLLM multiplies the width of shared experts by it, and transformers does not
    **dict.fromkeys(_ALIASES, (None,)),
}


def _kinds(hf_config: HfConfig, prefix: str = "") -> list[str]:
    """Return the kinds of layers, by transformers' names. As in transformers, a list precedes a pattern.

    Args:
        prefix: that of the keys, for the layers of MTP heads.
    """
    stated, names = hf_config.get(prefix + _KINDS), _OLD_NAMES
    if stated is None:
        stated, names = hf_config.get(prefix + _PATTERN) or "", _LETTERS
    return [names.get(name, name) for name in stated]


def _kinds_of_heads(hf_config: HfConfig) -> list[str]:
    """Return the kinds of the layers of an MTP head. As in transformers, a pattern precedes a list that is the
    default."""
    default = [_ATTENTION, _MOE]
    stated = _kinds({**hf_config, f"mtp_{_PATTERN}": None}, "mtp_")
    if stated not in ([], default):
        return stated
    return _kinds({**hf_config, f"mtp_{_KINDS}": None}, "mtp_") or default


def _built_in_heads(hf_config: HfConfig) -> list[str]:
    return [_ATTENTION] + [_MOE] * _has_experts(hf_config)


def _check(hf_config: HfConfig) -> None:
    problems = _layer_problems(hf_config)
    dense.refuse(hf_config, problems)  # without which no layer is known
    problems += dense.missing_numbers(hf_config, _SIZES)
    common = dense.problems_of(_in_common_words(hf_config), **_NEUTRAL)
    problems += [problem.replace("rms_norm_eps", "layer_norm_epsilon") for problem in common]
    if not problems:
        problems += _mamba_problems(hf_config) + _size_problems(hf_config)
    if not problems and _has_experts(hf_config):
        problems += _expert_problems(hf_config)
    if not problems and hf_config.get("num_nextn_predict_layers"):
        stated, built = _kinds_of_heads(hf_config), _built_in_heads(hf_config)
        if stated != built:
            problems.append(f"the layers of MTP heads (mtp_{_KINDS}) are {stated}; only {built} is supported")
    dense.refuse(hf_config, problems)


def _in_common_words(hf_config: HfConfig) -> dict[str, Any]:
    """Return the config with the keys of Llama, as far as it states them otherwise."""
    own = {"rms_norm_eps": hf_config.get("layer_norm_epsilon"), "head_dim": _head_dim(hf_config)}
    return {"num_hidden_layers": len(_kinds(hf_config)), **hf_config, **own}


def _layer_problems(hf_config: HfConfig) -> list[str]:
    for key in (_PATTERN, f"mtp_{_PATTERN}"):
        if not isinstance(hf_config.get(key), str | None):
            return [f"{key} {hf_config[key]!r} is not a string"]
    kinds = _kinds(hf_config)
    if not kinds:
        return [f"{_KINDS} and {_PATTERN} are missing; one of them must state the kinds of layers"]
    problems = []
    pattern = hf_config.get(_PATTERN)
    if pattern is not None and _kinds({_PATTERN: pattern}) != kinds:
        problems.append(f"{_PATTERN} and {_KINDS} differ")
    if unknown := sorted({kind for kind in kinds if kind not in _LETTERS.values()}):
        problems.append(f"{_KINDS} has the unknown kinds {', '.join(map(repr, unknown))}")
    if _ATTENTION not in kinds:
        problems.append(f"{_KINDS} has no {_ATTENTION!r}, which MTP heads have")
    if hf_config.get("num_hidden_layers") not in (len(kinds), None):
        problems.append(f"num_hidden_layers {hf_config['num_hidden_layers']}, but {len(kinds)} kinds of layers")
    return problems


def _mamba_problems(hf_config: HfConfig) -> list[str]:
    heads, groups, limit = hf_config["mamba_num_heads"], hf_config["n_groups"], hf_config.get("time_step_limit")
    problems = []
    if heads % groups:
        problems.append(f"mamba_num_heads {heads} is not a multiple of n_groups {groups}")
    if limit is not None and not _is_no_limit(limit):
        problems.append(f"time_step_limit {limit} is not supported; it can only be 0 to infinity")
    return problems


def _is_no_limit(limit: Any) -> bool:
    """Return whether the lowest and highest time step are 0 and infinity, which Ultra writes as 1e308, and transformers
    as an object. Other limits are ignored by transformers and engines."""
    if not isinstance(limit, list) or len(limit) != 2 or limit[0] != 0:
        return False
    return limit[1] == {"__float__": "Infinity"} or (isinstance(limit[1], float) and limit[1] >= 1e300)


def _size_problems(hf_config: HfConfig) -> list[str]:
    size = _head_dim(hf_config)
    if hf_config.get("head_dim") is None and size != _HEAD_SIZE:
        return [f"attention_head_dim {size}, but without head_dim, transformers and vLLM take {_HEAD_SIZE}"]
    return []


def _expert_problems(hf_config: HfConfig) -> list[str]:
    problems = dense.missing_numbers(hf_config, (_SHARED,))
    return problems + moe.mixture_problems({**_in_common_words(hf_config), "first_k_dense_replace": 0})


def _head_dim(hf_config: HfConfig) -> int:
    return hf_config.get("head_dim") or hf_config.get("attention_head_dim") or _HEAD_SIZE


def _attention(hf_config: HfConfig) -> GroupedQueryAttention:
    return replace(dense.attention(_in_common_words(hf_config)), rotary=0)


def _mamba(hf_config: HfConfig) -> Mamba2:
    return Mamba2(
        hidden=hf_config["hidden_size"],
        heads=hf_config["mamba_num_heads"],
        head_dim=hf_config["mamba_head_dim"],
        groups=hf_config["n_groups"],
        state=hf_config["ssm_state_size"],
        kernel=hf_config["conv_kernel"],
    )


def _mixture(hf_config: HfConfig) -> MixtureOfExperts:
    return replace(
        moe.mixture(hf_config),
        shared_ffn=hf_config[_SHARED],
        latent=hf_config.get("moe_latent_size"),
        activation=RELU2,
    )


def _mlp(hf_config: HfConfig) -> Mlp:
    return replace(dense.mlp(hf_config), activation=RELU2)


def _names(first: str, second: str) -> dict[str, str]:
    """Return names in files: `first` is the prefix of the layer with attention, `second` of the one with the MLP."""
    return {
        "input_layernorm.": f"{first}norm.",
        "self_attn.": f"{first}mixer.",
        "mamba.": f"{first}mixer.",
        "post_attention_layernorm.": f"{second}norm.",
        "mlp.": f"{second}mixer.",
    }


def _layer(hf_config: HfConfig, number: int) -> Layer:
    kind, names = _kinds(hf_config)[number], _names("", "")
    if kind in (_MLP, _MOE):
        mlp = _mixture(hf_config) if kind == _MOE else _mlp(hf_config)
        return Layer(NoAttention(hf_config["hidden_size"]), mlp, names)
    attention = _attention(hf_config) if kind == _ATTENTION else _mamba(hf_config)
    return Layer(attention, NoMlp(), names)


def _has_experts(hf_config: HfConfig) -> bool:
    return _MOE in _kinds(hf_config)


def _head_layer(hf_config: HfConfig) -> Layer:
    """Return the layer of heads. vLLM's heads have attention and experts, or attention only, but no MLP."""
    mlp = _mixture(hf_config) if _has_experts(hf_config) else NoMlp()
    return Layer(_attention(hf_config), mlp, _names("0.", "1."))


def _outside(hf_config: HfConfig) -> Outside:
    plain = dense.outside(_in_common_words(hf_config))
    return replace(
        plain,
        hf_layers="backbone.layers.",
        hf_embedding="backbone.embeddings.weight",
        hf_final_norm="backbone.norm_f.weight",
        norms_round_last=True,
        head_layer=_head_layer(hf_config),
        mcore_config={
            **plain.mcore_config,
            "activation_func": RELU2,
            "gated_linear_unit": False,
        },
    )


def _prefix(hf_config: HfConfig, head: int) -> str:
    """Return the prefix of a head. Published models have one head, and vLLM runs only the first."""
    return "mtp.layers." if head == 0 else f"mtp.heads.{head}.layers."


def _frame_rows(hf_config: HfConfig, head: int) -> list[Row]:
    last = 1 if _has_experts(hf_config) else 0
    names = ("0.eh_proj", "0.enorm", "0.hnorm", f"{last}.final_layernorm")
    return dense.frame_rows(hf_config, head, _prefix(hf_config, head), names)


def _config_of_heads(hf_config: HfConfig, number: int) -> dict[str, Any]:
    """Return the layers of new heads, if config.json states others. Without experts, the default is another."""
    built = _built_in_heads(hf_config)
    if not number or _kinds_of_heads(hf_config) == built:
        return {}
    letters = {kind: letter for letter, kind in _LETTERS.items()}
    change: dict[str, Any] = {f"mtp_{_PATTERN}": "".join(letters[kind] for kind in built)}
    if f"mtp_{_KINDS}" in hf_config:  # a list that is not the default precedes the pattern
        change[f"mtp_{_KINDS}"] = REMOVE
    return change


NEMOTRON_H = Family(
    name="nemotron_h",
    check=_check,
    layer=_layer,
    outside=_outside,
    mtp=MtpLayout(dense.numbered(r"mtp\.(?:heads\.(\d+)\.)?"), _prefix, _frame_rows, config=_config_of_heads),
    serving=Serving(
        vllm=Convention("NemotronHMTP", "one", block="mtp.layers.", quantizes=("mtp.layers.0.eh_proj",)),
        sglang=Convention("NemotronHForCausalLMMTP", "one", block="mtp.layers.", quantizes=("mtp.layers.0.eh_proj",)),
        llamacpp="nemotron_h_moe",
    ),
    tiny={
        _KINDS: [_MAMBA, _ATTENTION, _MOE, _MLP],
        "mamba_num_heads": 4,
        "mamba_head_dim": 16,
        "ssm_state_size": 16,
        "n_groups": 2,
        "conv_kernel": 4,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        _SHARED: 48,
        "moe_latent_size": 48,
        "routed_scaling_factor": 1.5,
    },
)
