"""Gemma 3: sliding windows alternate with full attention, which has other rotary embeddings.

Norms multiply by 1 + weight, and are also behind attention and MLP. Embeddings are multiplied by the square root of
their size. MTP heads have full attention. Soft caps, which Gemma 2 has, are not supported.

`gemma3` are the models with a vision tower, 4B to 27B.
"""

from dataclasses import replace

from swiftlite.families import dense, windows
from swiftlite.families.architecture import Outside
from swiftlite.families.family import HfConfig
from swiftlite.families.layer import Layer
from swiftlite.families.serving import sglang, vllm
from swiftlite.families.serving.convention import Convention, PluginClasses, Serving
from swiftlite.families.wrapped import wrapped

_BASES: windows.Bases = {windows.WINDOW: ("rope_local_base_freq", 10_000.0), windows.FULL: ("rope_theta", 1_000_000.0)}
# Sizes whose defaults in transformers are not derived from other sizes.
_STATED = ("head_dim", "num_key_value_heads", "query_pre_attn_scalar")


def _interval(hf_config: HfConfig) -> int:
    return hf_config.get("sliding_window_pattern") or 6


def _check(hf_config: HfConfig) -> None:
    interval = _interval(hf_config)
    if not isinstance(interval, int) or interval < 1:
        dense.refuse(hf_config, [f"sliding_window_pattern {interval!r} is not a positive integer"])
    problems = dense.missing_numbers(hf_config, _STATED)
    problems += windows.problems_of(
        hf_config,
        _BASES,
        interval,
        hidden_activation=("gelu_pytorch_tanh",),
        hidden_act=("gelu_pytorch_tanh", None),
        attention_bias=(False, None),
        attn_logit_softcapping=(None,),
        final_logit_softcapping=(None,),
        use_bidirectional_attention=(False, None),
    )
    dense.refuse(hf_config, problems)


def _layer(hf_config: HfConfig, number: int) -> Layer:
    attention = windows.attention(hf_config, number, _interval(hf_config))
    attention = replace(attention, scale=hf_config["query_pre_attn_scalar"] ** -0.5)
    return Layer(attention, replace(dense.mlp(hf_config), activation="gelu_pytorch_tanh"), has_output_norms=True)


def _outside(hf_config: HfConfig) -> Outside:
    plain = dense.outside(hf_config)
    return replace(
        plain,
        is_tied=hf_config.get("tie_word_embeddings", True),
        embedding_multiplier=hf_config["hidden_size"] ** 0.5,
        multiplies_in_embedding=True,
        ropes=tuple(windows.rope(hf_config, kind, _BASES) for kind in windows.KINDS),
        mcore_config={
            **plain.mcore_config,
            "layernorm_zero_centered_gamma": True,
            "activation_func": "gelu_pytorch_tanh",
        },
    )


GEMMA3_TEXT = dense.family(
    name="gemma3_text",
    check=_check,
    layer=_layer,
    outside=_outside,
    norm_start=0.0,
    serving=Serving(
        vllm=vllm.plugin(PluginClasses("Gemma3ForCausalLM", trunk="gemma3:Gemma3ForCausalLM")),
        sglang=sglang.plugin(PluginClasses("Gemma3ForCausalLM")),
    ),
    tiny={"sliding_window_pattern": 2, "sliding_window": 8, "query_pre_attn_scalar": 48},
)
_CLASSES = PluginClasses("Gemma3ForConditionalGeneration", trunk="gemma3_mm:Gemma3ForConditionalGeneration")
GEMMA3 = wrapped(
    GEMMA3_TEXT,
    "gemma3",
    Serving(
        vllm=Convention("Gemma3ImageMTPModel", classes=_CLASSES),
        transformers="swiftlite.engines.transformers.language_models:gemma3",
    ),
)
