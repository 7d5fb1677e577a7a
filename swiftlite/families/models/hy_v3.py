"""HY-V3: Qwen3's attention with GLM-4.5's experts and heads, under different names.

Names of parameters in transformers differ from names of tensors in files (conversion_mapping.py of 5.16), see
`memory_names`.
"""

from dataclasses import replace
from functools import partial
from typing import Any

from swiftlite.families import dense, moe
from swiftlite.families.family import HfConfig, no_copies
from swiftlite.families.layer import Layer
from swiftlite.families.serving import sglang, vllm
from swiftlite.families.serving.convention import Convention, Serving

# Keys of config.json of HY-V3, and the corresponding keys of GLM-4.5.
_GLM_KEYS = {
    "num_experts": "n_routed_experts",
    "num_shared_experts": "n_shared_experts",
    "router_scaling_factor": "routed_scaling_factor",
}
_HF_NAMES = {
    "mlp.gate.e_score_correction_bias": "mlp.expert_bias",
    "mlp.gate.": "mlp.router.gate.",
    "mlp.shared_experts.": "mlp.shared_mlp.",
}
_MEMORY_NAMES = {
    "mlp.expert_bias": "mlp.e_score_correction_bias",
    "mlp.router.gate.": "mlp.gate.",
    "mlp.shared_mlp.": "mlp.shared_experts.",
}


def _in_glm_words(hf_config: HfConfig) -> dict[str, Any]:
    """Return the config with the keys of its mixture of experts renamed to the corresponding keys of GLM-4.5."""
    words = {glm: hf_config[own] for own, glm in _GLM_KEYS.items() if own in hf_config}
    fixed = {"norm_topk_prob": True, "n_group": 1, "topk_group": 1}
    return {**hf_config, **words, **fixed, "first_k_dense_replace": moe.num_dense_of_types(hf_config)}


def _check(hf_config: HfConfig) -> None:
    problems = dense.problems_of(
        hf_config, attention_bias=(False, None), mlp_bias=(False, None), qk_norm=(True,), route_norm=(True,)
    )
    problems += dense.missing_numbers(hf_config, (*_GLM_KEYS, "moe_intermediate_size"))
    problems += dense.base_problems(hf_config)
    if not problems:
        problems += [_in_own_words(line) for line in moe.mixture_problems(_in_glm_words(hf_config))]
        problems += _contradictions(hf_config)
    dense.refuse(hf_config, problems)


def _in_own_words(problem: str) -> str:
    for own, glm in {**_GLM_KEYS, "route_norm": "norm_topk_prob"}.items():
        problem = problem.replace(glm, own)
    return problem


def _contradictions(hf_config: HfConfig) -> list[str]:
    """Return a problem (one line) per contradiction between the keys that transformers and engines read.

    transformers reads `mlp_layer_types` and `moe_intermediate_size`; engines read the same values from two other
    keys.
    """
    problems = moe.layer_type_problems(hf_config)
    ffn = hf_config["moe_intermediate_size"]
    if hf_config.get("expert_hidden_dim", ffn) != ffn:
        problems.append(f"expert_hidden_dim {hf_config['expert_hidden_dim']}, but moe_intermediate_size {ffn}")
    return problems


def _layer(hf_config: HfConfig, number: int) -> Layer:
    return Layer(dense.attention(hf_config, qk_norm=True), moe.mlp(_in_glm_words(hf_config), number), _HF_NAMES)


HY_V3 = dense.family(
    name="hy_v3",
    check=_check,
    layer=_layer,
    # As in GLM-4.5, but the output norm has Megatron's name.
    mtp=replace(
        moe.NEXT_LAYER_HEADS, frame_rows=partial(moe.frame_rows, output_norm="final_layernorm"), copies=no_copies
    ),
    memory_names=_MEMORY_NAMES,
    serving=Serving(
        vllm=vllm.next_layer("HYV3MTP"),
        sglang=Convention("HYV3ForCausalLMNextN", "first", block=sglang.DECODER),
        llamacpp="hy_v3",
    ),
    tiny={
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "num_shared_experts": 1,
        "router_scaling_factor": 1.5,
        "rope_theta": 10000.0,
        "first_k_dense_replace": 1,  # from here on for engines
        "expert_hidden_dim": 32,
        "qk_norm": True,
        "route_norm": True,
        "num_nextn_predict_layers": 0,
    },
)
