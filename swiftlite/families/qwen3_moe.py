"""Qwen3 MoE: Qwen3's attention, a softmax router without bias, no shared experts; published without MTP heads."""

from typing import Any

from swiftlite.bridge.rows import Row
from swiftlite.families import dense, moe
from swiftlite.families.family import Family, HfConfig


def _num_experts(hf_config: HfConfig) -> int | None:
    """The hub's config.json says num_experts; transformers 5 writes num_local_experts."""
    return hf_config.get("num_experts", hf_config.get("num_local_experts"))


def _is_moe_layer(hf_config: HfConfig, layer: int) -> bool:
    step, dense_layers = hf_config.get("decoder_sparse_step", 1), hf_config.get("mlp_only_layers") or []
    return layer not in dense_layers and (layer + 1) % step == 0


def _check(hf_config: HfConfig) -> None:
    problems = dense.problems_of(hf_config, attention_bias=(False, None))
    problems += dense.missing_numbers(hf_config, ("num_experts_per_tok", "moe_intermediate_size"))
    experts = _num_experts(hf_config)
    if not isinstance(experts, int) or experts < 1:
        problems.append(f"num_experts {experts!r} is not a number of experts")
    if not problems:
        assert experts
        topk = hf_config["num_experts_per_tok"]
        if not 0 < topk <= experts:
            problems.append(f"num_experts_per_tok {topk} is not between 1 and num_experts {experts}")
        if not any(_is_moe_layer(hf_config, layer) for layer in range(hf_config["num_hidden_layers"])):
            problems.append("decoder_sparse_step and mlp_only_layers leave no layer with experts")
        if topk == 1 and hf_config.get("norm_topk_prob", False):
            problems.append("norm_topk_prob True is not supported with num_experts_per_tok 1: no router would learn")
    dense.refuse(hf_config, problems)


def _transformer_config(hf_config: HfConfig) -> dict[str, Any]:
    return dense.transformer_config(hf_config, qk_norm=True) | {
        "num_moe_experts": _num_experts(hf_config),
        "moe_layer_freq": [int(_is_moe_layer(hf_config, layer)) for layer in range(hf_config["num_hidden_layers"])],
        "moe_ffn_hidden_size": hf_config["moe_intermediate_size"],
        "moe_router_topk": hf_config["num_experts_per_tok"],
        "moe_router_score_function": "softmax",
        # Softmax over the chosen scores is softmax over all, divided by the sum over the chosen.
        "moe_router_pre_softmax": not hf_config.get("norm_topk_prob", False),
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": "aux_loss",
        "moe_grouped_gemm": False,
    }


def _layer_rows(hf_config: HfConfig, layer: int) -> list[Row]:
    if not _is_moe_layer(hf_config, layer):
        return dense.layer_rows(hf_config, layer, qk_norm=True)
    hidden, experts = hf_config["hidden_size"], _num_experts(hf_config)
    assert experts
    return [
        *dense.attention_rows(hf_config, qk_norm=True),
        *dense.norm_rows(hf_config),
        moe.router_row(experts, hidden),
        *moe.expert_rows(experts, hidden, hf_config["moe_intermediate_size"]),
    ]


QWEN3_MOE = Family(
    name="qwen3_moe",
    check=_check,
    transformer_config=_transformer_config,
    layer_rows=_layer_rows,
    outer_rows=dense.outer_rows,
    mtp=dense.QWEN3_NEXT_HEADS,
    is_derived=dense.is_derived,
)
