"""Granite 3: a Llama with multipliers of embeddings, residual branches, attention scores and logits."""

from dataclasses import replace

from swiftlite.families import dense
from swiftlite.families.architecture import Outside
from swiftlite.families.family import HfConfig
from swiftlite.families.layer import Layer
from swiftlite.families.serving import sglang, vllm
from swiftlite.families.serving.convention import PluginClasses, Serving

# The default of the multipliers is 1 in transformers, but no published model has that, so a missing one is an error.
_MULTIPLIERS = ("attention_multiplier", "embedding_multiplier", "logits_scaling", "residual_multiplier")


def _check(hf_config: HfConfig) -> None:
    # Published files state an attention dropout of 0.1. It does not change logits, and is not applied in training.
    problems = dense.problems_of(
        hf_config, attention_bias=(False, None), mlp_bias=(False, None), attention_dropout=(0, 0.1, None)
    )
    problems += dense.missing_numbers(hf_config, _MULTIPLIERS)
    dense.refuse(hf_config, problems)


def _layer(hf_config: HfConfig, number: int) -> Layer:
    attention = replace(dense.attention(hf_config), scale=hf_config["attention_multiplier"])
    return Layer(attention, dense.mlp(hf_config), residual_multiplier=hf_config["residual_multiplier"])


def _outside(hf_config: HfConfig) -> Outside:
    return replace(
        dense.outside(hf_config),
        embedding_multiplier=hf_config["embedding_multiplier"],
        logits_divisor=hf_config["logits_scaling"],
    )


# Names of the classes of vLLM and SGLang, whose modules have the same names.
_CLASSES = PluginClasses("GraniteForCausalLM", trunk="granite:GraniteForCausalLM", layer="granite:GraniteDecoderLayer")

GRANITE = dense.family(
    name="granite",
    check=_check,
    layer=_layer,
    outside=_outside,
    serving=Serving(
        vllm=vllm.plugin(_CLASSES),
        # SGLang's class does not hand out its embedding, which the heads share.
        sglang=sglang.plugin(replace(_CLASSES, trunk_base="SharingTrunk")),
    ),
    tiny={  # none is 1, so that each has an effect
        "attention_multiplier": 0.25,
        "embedding_multiplier": 3.0,
        "logits_scaling": 2.0,
        "residual_multiplier": 0.5,
    },
)
