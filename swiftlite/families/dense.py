"""Define the architecture of Llama, which all dense families share: RMSNorm, grouped-query attention, SwiGLU.

The only optional biases are those of q, k and v. A family passes its differences as arguments; `llama.py` is the
simplest family.
"""

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from swiftlite.base.errors import UserError
from swiftlite.base.heads import depth_key
from swiftlite.bridge.encoding.quantization import quantization_problem
from swiftlite.bridge.join import COPY, Join
from swiftlite.bridge.rows import Row
from swiftlite.families.architecture import Outside
from swiftlite.families.attention import GroupedQueryAttention
from swiftlite.families.family import Family, HfConfig, MtpLayout
from swiftlite.families.layer import Layer
from swiftlite.families.mlp import Mlp

_REQUIRED = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "rms_norm_eps",
    "max_position_embeddings",
)

IN_WRAPPER = "model.language_model."
"""Prefix of the names of a language model in files of a vision-language model."""

# Keys of config.json that change the computation, with the supported values, which do not.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "attention_dropout": (0, None),
    "pretraining_tp": (1, None),
    "partial_rotary_factor": (1, None),
    "use_sliding_window": (False, None),
}


def check(hf_config: HfConfig, **neutral: tuple[Any, ...]) -> None:
    """Reject unsupported settings of dense families.

    Args:
        neutral: further keys of the family, with their supported values, which must include the default.

    Raises:
        UserError: there are unsupported settings; the error lists all of them.
    """
    refuse(hf_config, problems_of(hf_config, **neutral))


def problems_of(
    hf_config: HfConfig,
    *,
    reads: Collection[str] = (),
    layer_types: Collection[str] = ("full_attention",),
    **neutral: tuple[Any, ...],
) -> list[str]:
    """Return a problem (one line) for every setting that is invalid, or changes the computation and is not supported.

    Keys that are not known to change the computation are ignored, as in transformers.

    Args:
        reads: keys of NEUTRAL for which the family supports every value.
        layer_types: supported kinds of layers, by transformers' names.
        neutral: further keys of the family, with their supported values, which must include the default.
    """
    problems = missing_numbers(hf_config, _REQUIRED)
    problems += [
        f"{key} {hf_config[key]!r} is not supported; it can only be {' or '.join(repr(value) for value in values)}"
        for key, values in {**NEUTRAL, **neutral}.items()
        if key in hf_config and hf_config[key] not in values and key not in reads
    ]
    if problem := quantization_problem(hf_config):
        problems.append(problem)
    whole, nested = hf_config.get("partial_rotary_factor"), rope_parameters(hf_config).get("partial_rotary_factor")
    if "partial_rotary_factor" not in reads and nested not in (1, None):
        problems.append(f"rope_parameters: partial_rotary_factor {nested} is not supported; it can only be 1")
    if None not in (whole, nested) and whole != nested:
        problems.append(f"partial_rotary_factor {whole}, but rope_parameters has {nested}")
    depth = hf_config.get(depth_key(hf_config))
    if depth is not None and (not isinstance(depth, int) or depth < 0):
        problems.append(f"{depth_key(hf_config)} {depth!r} is not a valid number of layers")
    known = " and ".join(repr(kind) for kind in layer_types)
    other_layers = set(hf_config.get("layer_types") or []) - set(layer_types)
    verb = "is" if len(layer_types) == 1 else "are"
    problems += [f"layer_types has {kind!r}; only {known} {verb} supported" for kind in sorted(other_layers)]
    kinds, num_layers = hf_config.get("layer_types"), hf_config.get("num_hidden_layers")
    if kinds is not None and len(kinds) != num_layers:
        problems.append(f"layer_types has {len(kinds)} entries, num_hidden_layers is {num_layers}")
    if not problems:
        heads, groups = hf_config["num_attention_heads"], num_query_groups(hf_config)
        if heads % groups:
            problems.append(f"num_attention_heads {heads} is not a multiple of num_key_value_heads {groups}")
        if not hf_config.get("head_dim") and hf_config["hidden_size"] % heads:
            problems.append(f"hidden_size {hf_config['hidden_size']} is not a multiple of num_attention_heads {heads}")
    return problems


def missing_numbers(hf_config: HfConfig, keys: Sequence[str]) -> list[str]:
    """Return a problem (one line) for every key that is missing or not a number."""
    return [f"{key} is missing or not a number" for key in keys if not isinstance(hf_config.get(key), int | float)]


def refuse(hf_config: HfConfig, problems: Sequence[str]) -> None:
    """Raise one error that lists all problems; without problems, do nothing.

    Raises:
        UserError: there is a problem.
    """
    if problems:
        raise UserError(
            f"config.json (model_type {hf_config.get('model_type')!r}):\n  " + "\n  ".join(problems),
            "swiftlite would compute another model; if config.json was changed, copy it from the model's source again",
        )


def num_query_groups(hf_config: HfConfig) -> int:
    """Return the number of key-value heads. The default is one per attention head."""
    return hf_config.get("num_key_value_heads") or hf_config["num_attention_heads"]


def head_dim(hf_config: HfConfig) -> int:
    """Return the size of an attention head. The default is the hidden size divided by the number of heads."""
    return hf_config.get("head_dim") or hf_config["hidden_size"] // hf_config["num_attention_heads"]


def partial_rotary_factor(hf_config: HfConfig) -> float | None:
    """Return the share of each head's channels that are rotary; None if the config does not specify it.

    transformers 5 stores this share in `rope_parameters`.
    """
    return hf_config.get("partial_rotary_factor") or rope_parameters(hf_config).get("partial_rotary_factor")


def rope_parameters(hf_config: HfConfig) -> Mapping[str, Any]:
    """Return the config's settings of rotary embeddings (`rope_parameters` or `rope_scaling`), or an empty mapping."""
    return hf_config.get("rope_parameters") or hf_config.get("rope_scaling") or {}


def rope_theta(hf_config: HfConfig) -> Any:
    """Return the base of the rotary angles. As in transformers, a value in the rotary settings has precedence."""
    return rope_parameters(hf_config).get("rope_theta", hf_config.get("rope_theta"))


def base_problems(hf_config: HfConfig) -> list[str]:
    """Return a problem if `rope_theta` is missing or not a number, for families whose default is not 10,000."""
    if isinstance(rope_theta(hf_config), int | float):
        return []
    return ["rope_parameters: rope_theta is missing, and its default differs between readers"]


def partial_rotary_problems(hf_config: HfConfig) -> list[str]:
    """Return a problem if `partial_rotary_factor` is invalid, or missing.

    It must be set, because programs have different defaults.
    """
    factor = partial_rotary_factor(hf_config)
    if factor is None:
        return ["partial_rotary_factor is missing"]
    if not 0 < factor <= 1:
        return [f"partial_rotary_factor {factor} is not between 0 and 1"]
    return []


def layer(hf_config: HfConfig, number: int, *, qkv_bias: bool = False, qk_norm: bool = False) -> Layer:
    """Return decoder layer `number`. All layers are identical."""
    return Layer(attention(hf_config, qkv_bias=qkv_bias, qk_norm=qk_norm), mlp(hf_config))


def attention(
    hf_config: HfConfig,
    *,
    qkv_bias: bool = False,
    qk_norm: bool = False,
    output_gate: bool = False,
    window: int | None = None,
    rope: int | None = None,
) -> GroupedQueryAttention:
    """Return grouped-query attention with the sizes of a config.json."""
    size = head_dim(hf_config)
    return GroupedQueryAttention(
        hidden=hf_config["hidden_size"],
        heads=hf_config["num_attention_heads"],
        groups=num_query_groups(hf_config),
        head_dim=size,
        rotary=int(size * (partial_rotary_factor(hf_config) or 1)),
        qkv_bias=qkv_bias,
        qk_norm=qk_norm,
        output_gate=output_gate,
        window=window,
        rope=rope,
    )


def mlp(hf_config: HfConfig) -> Mlp:
    """Return the gated MLP with the sizes of a config.json."""
    return Mlp(hf_config["hidden_size"], hf_config["intermediate_size"])


def outside(hf_config: HfConfig) -> Outside:
    """Return the modules outside of the layers, and the settings that all layers share."""
    return Outside(
        num_layers=hf_config["num_hidden_layers"],
        hidden=hf_config["hidden_size"],
        vocab=hf_config["vocab_size"],
        is_tied=is_tied(hf_config),
        mcore_config={
            "layernorm_epsilon": hf_config.get("rms_norm_eps"),
            "normalization": "RMSNorm",
            "activation_func": "silu",
            "gated_linear_unit": True,
            "add_bias_linear": False,
            "init_method_std": hf_config.get("initializer_range") or 0.02,
        },
    )


def in_wrapper(outside: Outside) -> Outside:
    """Return the modules with the names that they have in files of a vision-language model."""
    return replace(
        outside,
        hf_layers=f"{IN_WRAPPER}layers.",
        hf_embedding=f"{IN_WRAPPER}embed_tokens.weight",
        hf_final_norm=f"{IN_WRAPPER}norm.weight",
    )


def is_tied(hf_config: HfConfig) -> bool:
    """Return whether the output layer shares the embedding. The default of dense families is False."""
    return bool(hf_config.get("tie_word_embeddings"))


def _frame_rows(hf_config: HfConfig, head: int) -> list[Row]:
    """Return the bridge rows of a head's projection and norms, with Qwen3-Next's names.

    Qwen3-Next has one projection and one set of norms for all heads. In swiftlite each head has separate ones, and
    those of heads after the first have the prefix `mtp.heads.{head}.`. A checkpoint with one head has exactly the names
    of Qwen3-Next.
    """
    prefix = "mtp." if head == 0 else f"mtp.heads.{head}."
    names = ("fc", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
    return frame_rows(hf_config, head, prefix, names)


def frame_rows(
    hf_config: HfConfig, head: int, prefix: str, names: tuple[str, str, str, str | None], join: Join = COPY
) -> list[Row]:
    """Return the bridge rows of a head's modules around its decoder layer.

    Args:
        prefix: prefix of the head in HF files.
        names: HF names, without the prefix, of the projection, the norms of embedding and state, and the output norm;
            None instead of the last one if the output norm is the trunk's final norm.
        join: how the projection's HF tensor becomes the Megatron parameter (`bridge/join.py`), for example with swapped
            halves.
    """
    hidden, mcore = hf_config["hidden_size"], f"mtp.layers.{head}."
    projection, embedding_norm, state_norm, output_norm = names
    rows = [
        Row(f"{mcore}eh_proj.weight", {f"{prefix}{projection}.weight": (hidden, 2 * hidden)}, join),
        Row(f"{mcore}enorm.weight", {f"{prefix}{embedding_norm}.weight": (hidden,)}),
        Row(f"{mcore}hnorm.weight", {f"{prefix}{state_norm}.weight": (hidden,)}),
    ]
    if output_norm is not None:
        rows.append(Row(f"{mcore}final_layernorm.weight", {f"{prefix}{output_norm}.weight": (hidden,)}))
    return rows


def numbered(pattern: str) -> Callable[[HfConfig, str], int | None]:
    """Return a function for `MtpLayout.head_of` that finds the number of the head in the name of a tensor.

    Args:
        pattern: regular expression of the beginning of the names. Its group is the number, 0 if it is empty or absent.
    """

    def head_of(hf_config: HfConfig, hf_key: str) -> int | None:
        match = re.match(pattern, hf_key)
        if match is None:
            return None
        return int(match.group(1) or 0)

    return head_of


# For families whose published models have no heads.
QWEN3_NEXT_HEADS = MtpLayout(
    numbered(r"mtp\.(?:(?:heads|layers)\.(\d+)\.)?"), lambda hf_config, head: f"mtp.layers.{head}.", _frame_rows
)

# The most frequent modules outside of the layers, and the names of heads for families whose published models have none.
family = partial(Family, outside=outside, mtp=QWEN3_NEXT_HEADS)
