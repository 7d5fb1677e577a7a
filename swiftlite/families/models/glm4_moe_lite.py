"""GLM-4.7-Flash: DeepSeek-V3's attention and mixture, with MTP heads that GLM-4.5's engines run.

transformers, and so swiftlite, norms the latents with an epsilon of 1e-6; vLLM and SGLang take `rms_norm_eps`, which is
1e-5 in GLM-4.7-Flash.

Which layers are dense stands in `mlp_layer_types`, and in `first_k_dense_replace` for engines.
"""

from swiftlite.families import dense, moe
from swiftlite.families.family import Family, HfConfig
from swiftlite.families.layer import Layer
from swiftlite.families.models import deepseek_v3, glm4_moe


def _num_dense(hf_config: HfConfig) -> int:
    """Dense layers, which come first; 1 in transformers when config.json does not say."""
    kinds = hf_config.get("mlp_layer_types")
    return 1 if kinds is None else kinds.count("dense")


def _check(hf_config: HfConfig) -> None:
    problems = deepseek_v3.problems_of(hf_config)
    if not problems:
        layers, num_dense = hf_config["num_hidden_layers"], _num_dense(hf_config)
        kinds = hf_config.get("mlp_layer_types")
        if kinds not in (None, ["dense"] * num_dense + ["sparse"] * (layers - num_dense)):
            problems.append(f"mlp_layer_types is not some 'dense', then 'sparse' up to {layers} layers")
        if num_dense >= layers:
            problems.append("mlp_layer_types leaves no layer with experts")
        if hf_config.get("first_k_dense_replace", num_dense) != num_dense:
            stated = hf_config["first_k_dense_replace"]
            problems.append(f"first_k_dense_replace {stated}, but mlp_layer_types has {num_dense} dense layers")
    dense.refuse(hf_config, problems)


def _layer(hf_config: HfConfig, number: int) -> Layer:
    is_dense = number < _num_dense(hf_config)
    mlp = dense.mlp(hf_config) if is_dense else moe.mixture(hf_config)
    return Layer(deepseek_v3.attention(hf_config), mlp)


GLM4_MOE_LITE = Family(
    name="glm4_moe_lite",
    check=_check,
    layer=_layer,
    outside=dense.outside,
    mtp=glm4_moe.HEADS,
)
