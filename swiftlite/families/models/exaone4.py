"""EXAONE 4: a Llama with norms of queries and keys, and of outputs of attention and MLP instead of inputs.

If some layers have a sliding window, the others have no rotary embeddings. MTP heads have no window.

EXAONE 4.5 is the same with a vision tower and an MTP head. Its head has the attention of the first layer, with a
window, because vLLM and SGLang number the head's layer 0.
"""

from dataclasses import replace
from typing import Any

from swiftlite.families import dense, windows
from swiftlite.families.architecture import Outside
from swiftlite.families.family import HfConfig
from swiftlite.families.layer import Layer
from swiftlite.families.serving import sglang, vllm
from swiftlite.families.serving.convention import PluginClasses, Serving
from swiftlite.families.windows import FULL, KINDS, WINDOW
from swiftlite.families.wrapped import nested

_NO_BIAS = (False, None)


def _check(hf_config: HfConfig) -> None:
    problems = dense.problems_of(
        hf_config,
        layer_types=KINDS,
        # vLLM reads these, transformers does not.
        attention_bias=_NO_BIAS,
        bias=_NO_BIAS,
        mlp_bias=_NO_BIAS,
        logit_scale=(1, None),
    )
    problems += dense.missing_numbers(hf_config, ["num_key_value_heads"])  # the default in transformers is 32
    problems += windows.common_window_problems(hf_config)
    if "sliding_window" not in hf_config:
        problems.append("sliding_window is missing; it can be null")
    problems += dense.base_problems(hf_config)
    if not problems:
        problems = _layer_problems(hf_config)
    dense.refuse(hf_config, problems)


def _layer_problems(hf_config: HfConfig) -> list[str]:
    """Return a problem (one line) if programs differ in which layers have a window, or rotary embeddings.

    SGLang reads only `sliding_window_pattern`, other programs `layer_types`. vLLM applies rotary embeddings to all
    layers if none has a window, and transformers if `sliding_window` is null.
    """
    kinds, num_layers = hf_config.get("layer_types"), hf_config["num_hidden_layers"]
    if hf_config["sliding_window"] is None:
        if kinds != [FULL] * num_layers:
            return [f"layer_types must have {FULL!r} for every layer, because sliding_window is null"]
        return []
    pattern, interval = hf_config.get("sliding_window_pattern"), _interval(hf_config)
    is_known = isinstance(interval, int) and pattern in (interval, "G".rjust(interval, "L"))
    if not is_known or not 1 < interval <= num_layers:
        return [
            f"sliding_window_pattern {pattern!r} is not supported; it can be an integer from 2 to {num_layers} "
            "(num_hidden_layers), or 'LG', 'LLG', 'LLLG' and so on, where only 'G' has no window"
        ]
    if kinds is None and isinstance(pattern, str):
        return [f"layer_types is missing, which transformers requires for sliding_window_pattern {pattern!r}"]
    if kinds not in (None, windows.layer_types({"num_hidden_layers": num_layers}, interval)):
        return [f"layer_types does not repeat sliding_window_pattern {pattern!r}, from which SGLang reads it"]
    return []


def _interval(hf_config: HfConfig) -> Any:
    """Return n if every n-th layer has no window, unless the value is invalid."""
    pattern = hf_config.get("sliding_window_pattern")
    return len(pattern) if isinstance(pattern, str) else pattern


def _layer(hf_config: HfConfig, number: int) -> Layer:
    attention, window = dense.attention(hf_config, qk_norm=True), hf_config["sliding_window"]
    if window is not None:
        has_window = windows.layer_types(hf_config, _interval(hf_config))[number] == WINDOW
        attention = replace(attention, window=window) if has_window else replace(attention, rotary=0)
    return Layer(attention, dense.mlp(hf_config), has_input_norms=False, has_output_norms=True)


def _outside_of_4_5(hf_config: HfConfig) -> Outside:
    return replace(dense.outside(hf_config), head_layer=_layer(hf_config, 0))


EXAONE4 = dense.family(
    name="exaone4",
    check=_check,
    layer=_layer,
    serving=Serving(
        vllm=vllm.plugin(PluginClasses("Exaone4ForCausalLM", trunk="exaone4:Exaone4ForCausalLM")),
        sglang=sglang.plugin(PluginClasses("Exaone4ForCausalLM", layer="Exaone4Layer"), needs_gpu_backend=True),
    ),
    tiny={"sliding_window": 8, "sliding_window_pattern": 2},
)
EXAONE4_5 = nested(
    replace(EXAONE4, outside=_outside_of_4_5),
    "exaone4_5",
    Serving(transformers="swiftlite.engines.transformers.language_models:exaone4"),
)
