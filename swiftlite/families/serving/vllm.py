"""Conventions of vLLM 0.32.

Training uses the inputs that vLLM passes to heads by default, so they are defined once, in the family's file.
"""

from dataclasses import replace

from swiftlite.families import Family
from swiftlite.families.serving.convention import Convention, Matching

MATCHING = Matching("vLLM", reads_files=True, compares_parts=False)
_NEXT_LAYER = "model.layers.{layer}."
_FUSION = ("mtp.fc",)
# HF model_type -> convention without inputs. Classes with names that end in MTPModel are those of swiftlite's plugin
# (models.py, image_models.py), which run each head at its step only on a GPU.
_LINES = {
    "ernie4_5_moe": Convention("Ernie4_5_MoeMTP", "one", block=_NEXT_LAYER),
    "exaone4": Convention("Exaone4MTPModel"),
    "gemma3_text": Convention("Gemma3MTPModel"),
    "gpt_oss": Convention("GptOssMTPModel"),
    "granite": Convention("GraniteMTPModel"),
    "llama": Convention("LlamaMTPModel"),
    "mimo_v2_flash": Convention("MiMoV2MTP", "first", block="model.mtp.layers.{head}.", plain=("self_attn.o_proj",)),
    "minimax_m2": Convention("MiniMaxM2MTPModel", renames={"block_sparse_moe.": "mlp."}),
    "mistral": Convention("MistralMTPModel"),
    "olmo2": Convention("Olmo2MTPModel"),
    "olmo3": Convention("Olmo3MTPModel"),
    "phi3": Convention("Phi3MTPModel"),
    "qwen2": Convention("Qwen2MTPModel"),
    "qwen2_5_vl": Convention("Qwen2_5_VLMTPModel"),
    "qwen2_moe": Convention("Qwen2MoeMTPModel"),
    "qwen3": Convention("Qwen3MTPModel"),
    "mimo": Convention("MiMoMTP", "first", block=_NEXT_LAYER),  # it asserts that the draft step is 0
    "qwen3_moe": Convention("Qwen3MoeMTPModel", quantizes=("mtp.layers.{head}.mlp.gate",)),
    "qwen3_vl": Convention("Qwen3VLMTPModel"),
    "seed_oss": Convention("SeedOssMTPModel"),
    "smollm3": Convention("SmolLM3MTPModel"),
    "step3p5": Convention("Step3p5MTP", block="model.layers.{layer}.mtp_block."),
    # These classes support several heads, but this was not measured; published models have one.
    "glm4_moe": Convention("Glm4MoeMTP", "first", block=_NEXT_LAYER),
    "glm4_moe_lite": Convention("Glm4MoeLiteMTP", "first", block=_NEXT_LAYER),
    "deepseek_v3": Convention("DeepSeekMTP", "first", block=_NEXT_LAYER),
    # On GPUs; vLLM does not support sparse attention on CPUs, so this was read from its code.
    "deepseek_v32": Convention("DeepseekV32MTP", "first", block=_NEXT_LAYER),
    "glm_moe_dsa": Convention("DeepseekV32MTP", "first", block=_NEXT_LAYER),
    "hy_v3": Convention("HYV3MTP", "first", block=_NEXT_LAYER),
    # All heads share one projection and one set of norms.
    "qwen3_next": Convention("Qwen3NextMTP", "first", quantizes=_FUSION),
    "qwen3_5": Convention("Qwen3_5MTP", "first", quantizes=_FUSION),
    "qwen3_5_text": Convention("Qwen3_5MTP", "first", quantizes=_FUSION),
    "qwen3_5_moe": Convention("Qwen3_5MoeMTP", "first", quantizes=_FUSION),
    "qwen3_5_moe_text": Convention("Qwen3_5MoeMTP", "first", quantizes=_FUSION),
}


def convention(family: Family) -> Convention | None:
    """Return the convention with which vLLM runs the heads of a family; None if it was not measured."""
    line = _LINES.get(family.name)
    if line is None:
        return None
    return replace(line, drafting=family.mtp.drafting)
