"""ERNIE 4.5 with experts: softmax router with a bias, shared experts, dense first layers, and dense MTP heads.

Heads have no output norm of their own: like the trunk, they end with the trunk's final norm, as in Baidu's training
code. The draft classes of vLLM 0.32 and SGLang 0.5.23 omit this norm, and vLLM's rotates other channels together.
swiftlite's plugins correct both classes.
"""

from dataclasses import replace

from swiftlite.base.drafting import Drafting
from swiftlite.bridge.rows import Row
from swiftlite.families import dense, moe
from swiftlite.families.architecture import Outside
from swiftlite.families.family import Family, HfConfig, MtpLayout
from swiftlite.families.layer import Layer
from swiftlite.families.serving import vllm
from swiftlite.families.serving.convention import Convention, Serving

# transformers' defaults are the sizes of the 21B model.
_STATED = (
    "moe_num_experts",
    "moe_k",
    "moe_intermediate_size",
    "moe_num_shared_experts",
    "moe_layer_start_index",
    "num_key_value_heads",
)
_HF_NAMES = {"mlp.gate.e_score_correction_bias": "mlp.moe_statics.e_score_correction_bias"}


def _check(hf_config: HfConfig) -> None:
    problems = dense.missing_numbers(hf_config, _STATED)
    problems += dense.problems_of(
        hf_config,
        use_bias=(False, None),
        use_moe=(True, None),  # read by vLLM
        rope_is_neox_style=(False, None),  # read by SGLang
        moe_layer_interval=(1, None),  # engines count from other layers
        moe_norm_min=(1e-12, None),
    )
    problems += dense.base_problems(hf_config)
    if not problems:
        problems += _mixture_problems(hf_config)
    dense.refuse(hf_config, problems)


def _mixture_problems(hf_config: HfConfig) -> list[str]:
    problems = moe.topk_problems(hf_config, "moe_num_experts", "moe_k")
    start, end = hf_config["moe_layer_start_index"], _last_mixture(hf_config)
    if start < 1:
        problems.append(f"moe_layer_start_index {start} is not supported: MTP heads are like the dense first layers")
    if not start <= end < hf_config["num_hidden_layers"]:
        problems.append(f"moe_layer_start_index {start} and moe_layer_end_index {end} leave no layer with experts")
    return problems


def _last_mixture(hf_config: HfConfig) -> int:
    """Return the number of the last layer with experts; in config.json, -1 is the last layer, and the default."""
    end = hf_config.get("moe_layer_end_index")
    if end in (None, -1):
        return hf_config["num_hidden_layers"] - 1
    return end


def _layer(hf_config: HfConfig, number: int) -> Layer:
    attention = replace(dense.attention(hf_config), rope_interleave=True)
    if not hf_config["moe_layer_start_index"] <= number <= _last_mixture(hf_config):
        return Layer(attention, dense.mlp(hf_config))
    mixture = moe.experts_of(
        hf_config,
        "moe_num_experts",
        "moe_k",
        shared_ffn=hf_config["moe_intermediate_size"] * hf_config["moe_num_shared_experts"],
        expert_bias=True,
        router_is_float32=True,
        biases_softmax=True,
        router=moe.SIGMOID_ROUTER,  # without its sigmoid, see `BiasedSoftmaxRouter`
    )
    return Layer(attention, mixture, _HF_NAMES)


def _outside(hf_config: HfConfig) -> Outside:
    return replace(
        dense.outside(hf_config),
        is_tied=hf_config.get("tie_word_embeddings", True),
        rotary_rounds_last=True,
        head_layer=_layer(hf_config, 0),
        heads_share_final_norm=True,
    )


def _frame_rows(hf_config: HfConfig, head: int) -> list[Row]:
    names = (f"linear_proj.{head}", f"emb_norm.{head}", f"hidden_norm.{head}", None)
    return dense.frame_rows(hf_config, head, "model.mtp_", names)


ERNIE4_5_MOE = Family(
    name="ernie4_5_moe",
    check=_check,
    layer=_layer,
    outside=_outside,
    mtp=MtpLayout(
        dense.numbered(r"model\.mtp_\w*\.?(\d*)"),
        lambda hf_config, head: f"model.mtp_block.{head}.",
        _frame_rows,
        drafting=Drafting(recycles_before_norm=True, zeroes_first_embedding=True),
    ),
    memory_names={"mlp.moe_statics.": "mlp.gate.moe_statics."},
    serving=Serving(
        vllm=Convention("Ernie4_5_MoeMTP", "one", block=vllm.NEXT_LAYER, has_own_names=True),
        sglang=Convention(
            "Ernie4_5_MoeForCausalLMMTP",
            "first",
            Drafting(recycles_before_norm=True, zeroes_first_embedding=True),
            block="model.mtp_block.",
        ),
    ),
    tiny={
        "moe_num_experts": 4,
        "moe_k": 2,
        "moe_intermediate_size": 32,
        "moe_num_shared_experts": 2,
        "moe_layer_start_index": 1,  # the first layer is dense
        "rope_theta": 10000.0,
        "num_nextn_predict_layers": 0,
    },
)
