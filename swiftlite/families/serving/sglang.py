"""Conventions of SGLang 0.5.23, which differ from vLLM's for some families."""

from swiftlite.base.drafting import Drafting
from swiftlite.families import Family
from swiftlite.families.serving.convention import Convention, Matching

MATCHING = Matching("SGLang", reads_files=False, compares_parts=True)
_DECODER = "model.decoder."
# These classes give their layer the names of the trunk's first layer.
_FIRST_LAYER = "model.layers.0."
# HF model_type -> convention. The classes of MiniMax-M2 and Qwen2 MoE, and of dense families except MiMo, are those of
# swiftlite's plugin (models/dense.py).
_LINES = {
    "ernie4_5_moe": Convention(
        "Ernie4_5_MoeForCausalLMMTP",
        "first",
        Drafting(recycles_before_norm=True, zeroes_first_embedding=True),
        block="model.mtp_block.",
    ),
    "exaone4": Convention("Exaone4ForCausalLMMTP", "one"),
    "gemma3_text": Convention("Gemma3ForCausalLMMTP", "one"),
    "gpt_oss": Convention("GptOssForCausalLMMTP", "one"),
    "granite": Convention("GraniteForCausalLMMTP", "one"),
    "llama": Convention("LlamaForCausalLMMTP", "one"),
    # With windows, a second draft fails on a CPU; on GPUs it was not measured.
    "mimo_v2_flash": Convention("MiMoV2MTP", "first", drafts_once=True, block=_DECODER),
    "minimax_m2": Convention("MiniMaxM2ForCausalLMMTP", "one"),
    "mistral": Convention("MistralForCausalLMMTP", "one"),
    "olmo2": Convention("Olmo2ForCausalLMMTP", "one"),
    "olmo3": Convention("Olmo2ForCausalLMMTP", "one"),
    "phi3": Convention("Phi3ForCausalLMMTP", "one"),
    "qwen2": Convention("Qwen2ForCausalLMMTP", "one"),
    "qwen2_moe": Convention("Qwen2MoeForCausalLMMTP", "one"),
    "qwen3": Convention("Qwen3ForCausalLMMTP", "one"),
    "mimo": Convention("MiMoMTP", "last", Drafting(zeroes_first_embedding=True), block=""),
    "seed_oss": Convention("SeedOssForCausalLMMTP", "one"),
    "smollm3": Convention("SmolLM3ForCausalLMMTP", "one"),
    "step3p5": Convention(
        "Step3p5MTP",
        drafting=Drafting(takes_before_norm=True, recycles_before_norm=True, chains_before_norm=True),
        block="model.mtp_block.",
        plain=("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj"),
    ),
    "qwen3_moe": Convention("Qwen3MoeForCausalLMMTP", "first", block=_FIRST_LAYER),
    "glm4_moe": Convention("Glm4MoeForCausalLMNextN", "one", block=_DECODER),
    "glm4_moe_lite": Convention("Glm4MoeLiteForCausalLMNextN", "one", block=_DECODER),
    "deepseek_v3": Convention("DeepseekV3ForCausalLMNextN", "one", block=_DECODER),
    "deepseek_v32": Convention("DeepseekV3ForCausalLMNextN", "one", block=_DECODER),
    "glm_moe_dsa": Convention("GlmMoeDsaForCausalLMNextN", "one", block=_DECODER),
    "hy_v3": Convention("HYV3ForCausalLMNextN", "first", block=_DECODER),
    "qwen3_next": Convention("Qwen3NextForCausalLMMTP", "one", block=_FIRST_LAYER),
    "qwen3_5": Convention("Qwen3_5ForCausalLMMTP", "one"),
    "qwen3_5_text": Convention("Qwen3_5ForCausalLMMTP", "one"),
    "qwen3_5_moe": Convention("Qwen3_5ForCausalLMMTP", "one"),
    "qwen3_5_moe_text": Convention("Qwen3_5ForCausalLMMTP", "one"),
}


def convention(family: Family) -> Convention | None:
    """Return the convention with which SGLang runs the heads of a family; None if it was not measured."""
    return _LINES.get(family.name)
