"""Define code that families with experts share: above all GLM-4.5 and DeepSeek-V3.

These two have a sigmoid router with a bias for the selection of experts (not for their weights), shared experts, dense
first layers, and MTP heads stored as additional decoder layers. See also `models/glm4_moe.py`.
"""

import re
from typing import Any

from swiftlite.base.drafting import Drafting
from swiftlite.bridge.rows import Row
from swiftlite.families import dense
from swiftlite.families.family import HfConfig, MtpLayout
from swiftlite.families.mlp import MixtureOfExperts, Mlp

SIGMOID_ROUTER = {
    "moe_router_score_function": "sigmoid",
    "moe_router_dtype": "fp32",
    "moe_router_load_balancing_type": "aux_loss",
}
"""Settings of a router with sigmoids and a bias."""

TINY = {"num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
"""Settings of `Family.tiny` that many families have."""

_REQUIRED = ("n_routed_experts", "num_experts_per_tok", "moe_intermediate_size")


def topk_problems(hf_config: HfConfig, experts_key: str, topk_key: str = "num_experts_per_tok") -> list[str]:
    """Return a problem if the number of experts per token is invalid, for routers whose weights are divided by their
    sum: with one expert, every weight is 1.
    """
    experts, topk = hf_config[experts_key], hf_config[topk_key]
    if not 0 < topk <= experts:
        return [f"{topk_key} {topk} is not between 1 and {experts_key} {experts}"]
    if topk == 1:
        return [f"{topk_key} 1 is not supported: every weight would be 1, and the router would not learn"]
    return []


def mlp(hf_config: HfConfig, number: int) -> Mlp | MixtureOfExperts:
    """Return the MLP of decoder layer `number`: dense in the first `first_k_dense_replace` layers, then a mixture."""
    if number < first_k_dense_replace(hf_config):
        return dense.mlp(hf_config)
    return mixture(hf_config)


def first_k_dense_replace(hf_config: HfConfig) -> int:
    """Return the number of dense layers before the first mixture. The default is 1, as for GLM-4.5 in transformers."""
    return hf_config.get("first_k_dense_replace", 1)


def num_shared(hf_config: HfConfig) -> int:
    """Return the number of shared experts. They are computed as one MLP."""
    return hf_config.get("n_shared_experts", 1)


def mixture(hf_config: HfConfig) -> MixtureOfExperts:
    """Return the mixture of experts with the sizes of a config.json.

    The computation is that of transformers: scores are sigmoids in float32, the bias is added only for the selection,
    and the selected scores are divided by their sum (+ 1e-20) and multiplied by `routed_scaling_factor`.
    """
    groups, chosen = None, None
    if _is_grouped(hf_config):
        groups, chosen = _groups(hf_config)
    return experts_of(
        hf_config,
        "n_routed_experts",
        shared_ffn=hf_config["moe_intermediate_size"] * num_shared(hf_config),
        expert_bias=True,
        router={
            **SIGMOID_ROUTER,
            "moe_router_num_groups": groups,
            "moe_router_group_topk": chosen,
            "moe_router_topk_scaling_factor": hf_config.get("routed_scaling_factor", 1.0),
            "moe_router_load_balancing_type": "seq_aux_loss",  # as in both papers
        },
    )


def experts_of(
    hf_config: HfConfig,
    number: str,
    topk: str = "num_experts_per_tok",
    ffn: str = "moe_intermediate_size",
    **options: Any,
) -> MixtureOfExperts:
    """Return a mixture of experts whose sizes have these keys in config.json.

    Args:
        options: further fields of `MixtureOfExperts`.
    """
    sizes = {"experts": hf_config[number], "topk": hf_config[topk], "ffn": hf_config[ffn]}
    return MixtureOfExperts(hidden=hf_config["hidden_size"], **sizes, **options)


def num_dense_of_types(hf_config: HfConfig) -> int:
    """Return the number of dense layers in `mlp_layer_types`; they come first. The default is 1, as in transformers."""
    kinds = hf_config.get("mlp_layer_types")
    if kinds is None:
        return 1
    return kinds.count("dense")


def layer_type_problems(hf_config: HfConfig) -> list[str]:
    """Return a problem (one line) for each invalid value of `mlp_layer_types`, and of `first_k_dense_replace`, which
    engines read.
    """
    layers, num_dense = hf_config["num_hidden_layers"], num_dense_of_types(hf_config)
    problems = []
    kinds = hf_config.get("mlp_layer_types")
    if kinds not in (None, ["dense"] * num_dense + ["sparse"] * (layers - num_dense)):
        problems.append(f"mlp_layer_types must list 'dense' layers, then 'sparse' ones, {layers} in total")
    stated = hf_config.get("first_k_dense_replace", num_dense)
    if stated != num_dense:
        source = "mlp_layer_types has"
        if kinds is None:
            source = "transformers' default without mlp_layer_types is"
        problems.append(f"first_k_dense_replace {stated}, but {source} {num_dense} dense layers")
    return problems


def mixture_problems(hf_config: HfConfig) -> list[str]:
    """Return a problem (one line) for each setting of the experts that megatron-core does not support."""
    stated = [key for key in ("first_k_dense_replace", "n_shared_experts", "routed_scaling_factor") if key in hf_config]
    problems = dense.missing_numbers(hf_config, (*_REQUIRED, *stated))
    if problems:
        return problems
    experts, topk = hf_config["n_routed_experts"], hf_config["num_experts_per_tok"]
    layers, dense_layers = hf_config.get("num_hidden_layers") or 0, first_k_dense_replace(hf_config)
    if not 0 < topk <= experts:
        problems.append(f"num_experts_per_tok {topk} is not between 1 and n_routed_experts {experts}")
    if not 0 <= dense_layers < layers:
        problems.append(f"first_k_dense_replace {dense_layers} leaves no layer of {layers} with experts")
    if num_shared(hf_config) < 1:
        problems.append(f"n_shared_experts {num_shared(hf_config)} is not supported; it can only be 1 or more")
    if not hf_config.get("routed_scaling_factor", 1.0) > 0:
        problems.append(f"routed_scaling_factor {hf_config['routed_scaling_factor']} is not above 0")
    if bool(hf_config.get("norm_topk_prob", True)) is not (topk > 1):
        # topk_routing_with_score_function divides by the sum only if there are several scores.
        problems.append(
            f"norm_topk_prob {hf_config.get('norm_topk_prob', True)} is not supported with num_experts_per_tok {topk}"
        )
    if _is_grouped(hf_config):
        groups, chosen = _groups(hf_config)
        if experts % groups or experts // groups < 2 or not 0 < chosen <= groups:
            problems.append(f"n_group {groups}, topk_group {chosen} are invalid for n_routed_experts {experts}")
        # transformers ranks groups by their best 2 experts, but megatron-core by their best topk // topk_group.
        elif topk // chosen != 2:
            problems.append(f"topk_group {chosen} is not supported with num_experts_per_tok {topk}; use {topk // 2}")
    return problems


def _is_grouped(hf_config: HfConfig) -> bool:
    """Return whether a token's experts are limited to some groups of experts."""
    groups, chosen = _groups(hf_config)
    return chosen != groups


def _groups(hf_config: HfConfig) -> tuple[int, int]:
    """Return the number of groups of experts, and the number of groups that a token can use; both are 1 by default."""
    return hf_config.get("n_group") or 1, hf_config.get("topk_group") or 1


# Heads of GLM-4.5 and DeepSeek-V3 are stored as decoder layers, numbered after the trunk's last layer.

_LAYER_KEY = re.compile(r"model\.layers\.(\d+)\.")


def _head_of(hf_config: HfConfig, hf_key: str) -> int | None:
    match = _LAYER_KEY.match(hf_key)
    if match is None:
        return None
    head = int(match.group(1)) - hf_config["num_hidden_layers"]
    if head < 0:
        return None
    return head


def _prefix(hf_config: HfConfig, head: int) -> str:
    return f"model.layers.{hf_config['num_hidden_layers'] + head}."


def frame_rows(hf_config: HfConfig, head: int, output_norm: str = "shared_head.norm") -> list[Row]:
    """Return the bridge rows of a head's projection and norms."""
    return dense.frame_rows(hf_config, head, _prefix(hf_config, head), ("eh_proj", "enorm", "hnorm", output_norm))


def _copies(hf_config: HfConfig, head: int) -> dict[str, str]:
    prefix = _prefix(hf_config, head)
    return {
        f"{prefix}embed_tokens.weight": "model.embed_tokens.weight",
        f"{prefix}shared_head.head.weight": "lm_head.weight",
    }


NEXT_LAYER_HEADS = MtpLayout(_head_of, _prefix, frame_rows, _copies, Drafting(zeroes_first_embedding=True))
