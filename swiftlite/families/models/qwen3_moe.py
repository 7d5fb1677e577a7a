"""Qwen3 MoE: Qwen3's attention, a softmax router without bias, and no shared experts.

It was published without MTP heads.
"""

from swiftlite.families import dense, moe
from swiftlite.families.family import HfConfig
from swiftlite.families.layer import Layer
from swiftlite.families.mlp import MixtureOfExperts, Mlp
from swiftlite.families.serving import sglang, vllm
from swiftlite.families.serving.convention import Convention, PluginClasses, Serving


def _is_moe_layer(hf_config: HfConfig, layer: int) -> bool:
    step, dense_layers = hf_config.get("decoder_sparse_step") or 1, hf_config.get("mlp_only_layers") or []
    return layer not in dense_layers and (layer + 1) % step == 0


def _check(hf_config: HfConfig) -> None:
    # Qwen3-Coder states that there is no shared expert.
    problems = dense.problems_of(hf_config, attention_bias=(False, None), shared_expert_intermediate_size=(0, None))
    dense.refuse(hf_config, problems + mixture_problems(hf_config))


def mixture_problems(hf_config: HfConfig) -> list[str]:
    """Return a problem (one line) for each setting of the experts that megatron-core does not support."""
    problems = dense.missing_numbers(hf_config, ("num_experts_per_tok", "moe_intermediate_size", "num_hidden_layers"))
    experts = hf_config.get("num_experts", hf_config.get("num_local_experts"))
    if not isinstance(experts, int) or experts < 1:
        problems.append(f"num_experts {experts!r} is not a valid number of experts")
    if not problems:
        topk = hf_config["num_experts_per_tok"]
        if not 0 < topk <= experts:
            problems.append(f"num_experts_per_tok {topk} is not between 1 and num_experts {experts}")
        if not any(_is_moe_layer(hf_config, layer) for layer in range(hf_config["num_hidden_layers"])):
            problems.append("decoder_sparse_step and mlp_only_layers leave no layer with experts")
        if topk == 1 and hf_config.get("norm_topk_prob", False):
            problems.append(
                "norm_topk_prob True is not supported with num_experts_per_tok 1: the router would not learn"
            )
    return problems


def _layer(hf_config: HfConfig, number: int) -> Layer:
    return Layer(dense.attention(hf_config, qk_norm=True), mlp(hf_config, number))


def mlp(hf_config: HfConfig, number: int) -> Mlp | MixtureOfExperts:
    """Return the MLP of decoder layer `number` (from 0): a mixture of experts or dense, as `decoder_sparse_step`
    specifies.
    """
    if _is_moe_layer(hf_config, number):
        return mixture(hf_config)
    return dense.mlp(hf_config)


def mixture(hf_config: HfConfig) -> MixtureOfExperts:
    """Return the mixture of experts with the sizes of a config.json, without shared experts."""
    # config.json on the hub has the first key, and transformers writes the second one.
    return moe.experts_of(
        hf_config,
        "num_experts" if "num_experts" in hf_config else "num_local_experts",
        router={
            "moe_router_score_function": "softmax",
            # Softmax over the selected scores equals softmax over all scores, divided by the sum of the selected ones.
            "moe_router_pre_softmax": not hf_config.get("norm_topk_prob", False),
            # The router computes logits in the model's precision, as in transformers and vLLM; bfloat16 logits are then
            # bitwise identical. In float32, 2 of 576 tokens of a tiny model were routed to other experts than in
            # engines.
            "moe_router_dtype": None,
            "moe_router_load_balancing_type": "aux_loss",
        },
    )


QWEN3_MOE = dense.family(
    name="qwen3_moe",
    check=_check,
    layer=_layer,
    serving=Serving(
        vllm=vllm.plugin(
            PluginClasses("Qwen3MoeForCausalLM", trunk="qwen3_moe:Qwen3MoeForCausalLM"),
            quantizes=("mtp.layers.{head}.mlp.gate",),
        ),
        sglang=Convention("Qwen3MoeForCausalLMMTP", "first", block=sglang.FIRST_LAYER),
        llamacpp="hy_v3",
    ),
    tiny={
        **moe.TINY,
        "num_experts": 4,
    },
)
