"""MiniMax-M2, M2.1, M2.5 and M2.7: experts in all layers, a sigmoid router with a bias, and partly rotary heads.

Queries and keys have one norm each for all heads together. config.json declares MTP modules (`num_mtp_modules`), but
their tensors were not published, so heads are new. vLLM 0.32 and SGLang 0.5.23 ignore tensors of layers after the
trunk's last one; swiftlite refuses them as unknown.
"""

from dataclasses import replace

from swiftlite.families import dense, moe
from swiftlite.families.architecture import Outside
from swiftlite.families.family import HfConfig
from swiftlite.families.layer import Layer
from swiftlite.families.rope import ROPE_KEYS
from swiftlite.families.serving import sglang, vllm
from swiftlite.families.serving.convention import PluginClasses, Serving

# transformers' defaults are the sizes of MiniMax-M2.
_STATED = ("num_local_experts", "num_experts_per_tok", "num_key_value_heads", "head_dim", "rotary_dim")
# transformers computes with these values whatever config.json says; engines have other defaults.
_ASSUMED = {"scoring_func": "sigmoid", "use_qk_norm": True, "use_routing_bias": True}
_MATRICES = ("w1", "w3", "w2")
_HF_NAMES = {
    "mlp.gate.e_score_correction_bias": "block_sparse_moe.e_score_correction_bias",
    "mlp.": "block_sparse_moe.",
}


def _check(hf_config: HfConfig) -> None:
    problems = dense.missing_numbers(hf_config, _STATED)
    problems += dense.problems_of(
        hf_config,
        reads=("partial_rotary_factor",),
        attention_bias=(False, None),  # read by vLLM
        qk_norm_type=("per_layer", None),  # read by SGLang
        sliding_window=(None,),  # read by vLLM
        shared_intermediate_size=(0, None),
        router_jitter_noise=(0, None),
    )
    for key, value in _ASSUMED.items():
        if hf_config.get(key) != value:
            problems.append(f"{key} {hf_config.get(key)!r} is not supported; it must be {value!r}")
    problems += dense.base_problems(hf_config)
    if not problems:
        problems += _layer_problems(hf_config) + _rotary_problems(hf_config)
        problems += moe.topk_problems(hf_config, "num_local_experts")
    dense.refuse(hf_config, problems)


def _layer_problems(hf_config: HfConfig) -> list[str]:
    layers, kinds = hf_config["num_hidden_layers"], hf_config.get("attn_type_list")
    if kinds not in (None, [1] * layers):
        return [f"attn_type_list must be 1 (full attention) for each of {layers} layers (num_hidden_layers)"]
    return []


def _rotary_problems(hf_config: HfConfig) -> list[str]:
    """Return a problem if `rotary_dim`, which engines read, is invalid, or differs from what transformers reads."""
    size, rotary, factor = hf_config["head_dim"], hf_config["rotary_dim"], dense.partial_rotary_factor(hf_config)
    if rotary % 2 or rotary > size:
        return [f"rotary_dim {rotary} is not an even number up to head_dim {size}"]
    if factor is not None and factor * size != rotary:
        return [f"rotary_dim {rotary} of head_dim {size}, but partial_rotary_factor (rope_parameters) is {factor}"]
    return []


def _layer(hf_config: HfConfig, number: int) -> Layer:
    attention = replace(
        dense.attention(hf_config, qk_norm=True, rope=0), rotary=hf_config["rotary_dim"], qk_norm_is_joint=True
    )
    mixture = moe.experts_of(
        hf_config,
        "num_local_experts",
        ffn="intermediate_size",
        expert_bias=True,
        hf_matrices=_MATRICES,
        hf_ffn="intermediate_size",
        router=moe.SIGMOID_ROUTER,
        router_is_float32=True,  # as in engines
    )
    return Layer(attention, mixture, _HF_NAMES)


def _outside(hf_config: HfConfig) -> Outside:
    settings = {key: hf_config[key] for key in ROPE_KEYS if key in hf_config}
    settings["partial_rotary_factor"] = hf_config["rotary_dim"] / hf_config["head_dim"]
    return replace(dense.outside(hf_config), ropes=(settings,))


MINIMAX_M2 = dense.family(
    name="minimax_m2",
    check=_check,
    layer=_layer,
    outside=_outside,
    memory_names={"block_sparse_moe.": "mlp."},
    serving=Serving(
        vllm=vllm.plugin(
            PluginClasses("MiniMaxM2ForCausalLM"), renames={"block_sparse_moe.": "mlp."}, has_own_names=True
        ),
        sglang=sglang.plugin(
            PluginClasses("MiniMaxM2ForCausalLM", layer="minimax_m2:MiniMaxM2DecoderLayer", expert_matrices=_MATRICES)
        ),
    ),
    tiny={
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "rotary_dim": 16,
        "rope_theta": 10000.0,
        "num_mtp_modules": 3,  # of config.json; they were not published
        "scoring_func": "sigmoid",  # from here on for engines
        "use_qk_norm": True,
        "use_routing_bias": True,
    },
)
