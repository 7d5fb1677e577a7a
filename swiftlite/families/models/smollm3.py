"""SmolLM3: a Llama in which every fourth layer has no rotary embeddings (`no_rope_layers`).

Despite its name, `no_rope_layers` is 1 for layers with rotary embeddings. Sliding windows and biases, which
transformers' class supports and published models do not use, are not supported. Like the last layer of published
models, heads have no rotary embeddings.
"""

from dataclasses import replace

from swiftlite.families import dense
from swiftlite.families.architecture import Outside
from swiftlite.families.family import HfConfig
from swiftlite.families.layer import Layer
from swiftlite.families.serving import sglang, vllm
from swiftlite.families.serving.convention import PluginClasses, Serving

# transformers' defaults differ from those of other families.
_STATED = ("num_key_value_heads",)


def _check(hf_config: HfConfig) -> None:
    # transformers' class has no pretraining_tp, which is 2 in published files.
    problems = dense.problems_of(
        hf_config, reads=("pretraining_tp",), attention_bias=(False, None), mlp_bias=(False, None)
    )
    problems += dense.missing_numbers(hf_config, _STATED)
    problems += dense.base_problems(hf_config)
    if not problems:
        problems += _rotary_problems(hf_config)
    dense.refuse(hf_config, problems)


def _rotary_problems(hf_config: HfConfig) -> list[str]:
    has_rotary, num_layers = _has_rotary(hf_config), hf_config["num_hidden_layers"]
    if len(has_rotary) != num_layers:
        return [f"no_rope_layers has {len(has_rotary)} entries, num_hidden_layers is {num_layers}"]
    return []


def _has_rotary(hf_config: HfConfig) -> list[bool]:
    """Return for each layer whether it has rotary embeddings."""
    stated = hf_config.get("no_rope_layers")
    if stated is not None:
        return [bool(entry) for entry in stated]
    interval = hf_config.get("no_rope_layer_interval", 4)
    return [number % interval != 0 for number in range(1, hf_config["num_hidden_layers"] + 1)]


def _layer(hf_config: HfConfig, number: int) -> Layer:
    layer = dense.layer(hf_config, number)
    if _has_rotary(hf_config)[number]:
        return layer
    return replace(layer, attention=replace(dense.attention(hf_config), rotary=0))


def _outside(hf_config: HfConfig) -> Outside:
    # Tied by default: published files do not have the key.
    return replace(dense.outside(hf_config), is_tied=hf_config.get("tie_word_embeddings", True))


SMOLLM3 = dense.family(
    name="smollm3",
    check=_check,
    layer=_layer,
    outside=_outside,
    serving=Serving(
        vllm=vllm.plugin(PluginClasses("SmolLM3ForCausalLM", trunk=vllm.TRANSFORMERS)),
        sglang=sglang.plugin(PluginClasses("SmolLM3ForCausalLM")),
    ),
    tiny={"no_rope_layer_interval": 2},
)
