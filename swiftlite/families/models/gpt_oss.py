"""gpt-oss: attention with sinks and biases, sliding windows in every second layer, and experts with biases.

It was published with experts in MXFP4, and without MTP heads. MTP heads have no window.
"""

from dataclasses import replace

from swiftlite.families import dense, moe
from swiftlite.families.architecture import Outside
from swiftlite.families.family import HfConfig
from swiftlite.families.layer import Layer
from swiftlite.families.mlp import CLAMPED_SWIGLU, MixtureOfExperts
from swiftlite.families.rope import has_default_scale
from swiftlite.families.serving import sglang, vllm
from swiftlite.families.serving.convention import PluginClasses, Serving
from swiftlite.families.windows import FULL, KINDS, WINDOW

# transformers' defaults are the sizes of gpt-oss-120b; programs have different defaults for the other keys.
_STATED = ("head_dim", "num_experts_per_tok", "num_key_value_heads", "num_local_experts", "sliding_window")
_YARN = ("beta_fast", "beta_slow", "factor", "original_max_position_embeddings")
_NAMES = {"mlp.gate.": "mlp.router."}
"""Names of the router's tensors, within a layer."""


def _check(hf_config: HfConfig) -> None:
    problems = dense.missing_numbers(hf_config, _STATED)
    problems += dense.problems_of(
        hf_config,
        layer_types=KINDS,
        attention_bias=(True,),
        # Engines do not read these.
        rms_norm_eps=(1e-5,),
        swiglu_alpha=(1.702,),
        swiglu_limit=(7.0,),
    )
    if not problems:
        problems = _layer_problems(hf_config) + _mixture_problems(hf_config) + _rope_problems(hf_config)
    dense.refuse(hf_config, problems)


def _layer_problems(hf_config: HfConfig) -> list[str]:
    layers = hf_config["num_hidden_layers"]
    alternating = [KINDS[number % 2] for number in range(layers)]
    problems = []
    if hf_config.get("layer_types", alternating) not in (None, alternating):
        problems.append(f"layer_types must alternate, as in engines: {WINDOW!r}, {FULL!r}, and so on")
    if layers < 2:
        problems.append(f"num_hidden_layers {layers} leaves no layer with {FULL!r}, the attention of the MTP heads")
    if hf_config["sliding_window"] < 1:
        problems.append(f"sliding_window {hf_config['sliding_window']} is not positive")
    return problems


def _mixture_problems(hf_config: HfConfig) -> list[str]:
    if problems := moe.topk_problems(hf_config, "num_local_experts"):
        return problems
    topk = hf_config["num_experts_per_tok"]
    # The name in files of OpenAI's own program, which the published config.json also has.
    if hf_config.get("experts_per_token", topk) != topk:
        return [f"experts_per_token {hf_config['experts_per_token']}, but num_experts_per_tok is {topk}"]
    return []


def _rope_problems(hf_config: HfConfig) -> list[str]:
    """Return a problem for every rotary setting that engines do not read: they always have YaRN."""
    settings = dense.rope_parameters(hf_config)
    if settings.get("rope_type") != "yarn":
        return [f"rope_parameters: rope_type {settings.get('rope_type')!r} is not supported; it can only be 'yarn'"]
    problems = [f"rope_parameters: {key} is missing" for key in _YARN if settings.get(key) is None]
    problems += dense.base_problems(hf_config)
    if not has_default_scale(settings):
        problems.append(
            f"rope_parameters: attention_factor {settings['attention_factor']!r} is ignored by engines, which use "
            "0.1 * log(factor) + 1"
        )
    ignored = sorted(settings.keys() & {"mscale", "mscale_all_dim"})
    problems += [f"rope_parameters: {key} {settings[key]!r} is ignored by engines" for key in ignored]
    return problems


def _layer(hf_config: HfConfig, number: int) -> Layer:
    window = None if number % 2 else hf_config["sliding_window"]
    attention = dense.attention(hf_config, qkv_bias=True, window=window)
    return Layer(replace(attention, output_bias=True, has_sinks=True), _mixture(hf_config), _NAMES)


def _mixture(hf_config: HfConfig) -> MixtureOfExperts:
    return moe.experts_of(
        hf_config,
        "num_local_experts",
        ffn="intermediate_size",
        has_biases=True,
        activation=CLAMPED_SWIGLU,
        hf_is_transposed=True,
        router={
            "moe_router_score_function": "softmax",
            "moe_router_pre_softmax": False,  # softmax over the scores of the selected experts
            "moe_router_dtype": None,  # logits in the model's precision, as in transformers
            "moe_router_load_balancing_type": "aux_loss",
        },
    )


def _outside(hf_config: HfConfig) -> Outside:
    outside = dense.outside(hf_config)
    config = {**outside.mcore_config, "activation_func": CLAMPED_SWIGLU, "add_bias_linear": True}
    return replace(outside, norms_round_last=True, rotary_rounds_last=True, mcore_config=config)


_CLASSES = PluginClasses("GptOssForCausalLM", trunk="gpt_oss:GptOssForCausalLM")

GPT_OSS = dense.family(
    name="gpt_oss",
    check=_check,
    layer=_layer,
    outside=_outside,
    serving=Serving(
        vllm=vllm.plugin(_CLASSES),
        sglang=sglang.plugin(_CLASSES),
    ),
    tiny={
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 8,
        "rope_parameters": {
            "rope_type": "yarn",
            "factor": 8.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 64,
            "rope_theta": 150000.0,
        },
    },
)
