"""A list of all families, by the `model_type` of Hugging Face."""

from dataclasses import replace
from functools import partial
from pathlib import Path

from swiftlite.base.errors import UserError
from swiftlite.base.heads import kind_of
from swiftlite.bridge.hf_config import has_tensors
from swiftlite.data.image_sizes import ImageSizes
from swiftlite.families import dense
from swiftlite.families.architecture import Architecture
from swiftlite.families.dense import refuse
from swiftlite.families.drafters import is_published
from swiftlite.families.family import Family, HfConfig
from swiftlite.families.models.deepseek_v3 import DEEPSEEK_V3
from swiftlite.families.models.deepseek_v32 import DEEPSEEK_V32
from swiftlite.families.models.ernie4_5_moe import ERNIE4_5_MOE
from swiftlite.families.models.exaone4 import EXAONE4, EXAONE4_5
from swiftlite.families.models.gemma3 import GEMMA3, GEMMA3_TEXT
from swiftlite.families.models.gemma4 import GEMMA4, GEMMA4_TEXT, GEMMA4_UNIFIED
from swiftlite.families.models.glm4_moe import GLM4_MOE
from swiftlite.families.models.glm4_moe_lite import GLM4_MOE_LITE
from swiftlite.families.models.glm_moe_dsa import GLM_MOE_DSA
from swiftlite.families.models.gpt_oss import GPT_OSS
from swiftlite.families.models.granite import GRANITE
from swiftlite.families.models.hy_v3 import HY_V3
from swiftlite.families.models.kimi_k2 import KIMI_K2, KIMI_K25
from swiftlite.families.models.llama import LLAMA
from swiftlite.families.models.mimo import MIMO
from swiftlite.families.models.mimo_v2_flash import MIMO_V2_FLASH
from swiftlite.families.models.minimax_m2 import MINIMAX_M2
from swiftlite.families.models.mistral import MISTRAL
from swiftlite.families.models.mistral3 import MISTRAL3
from swiftlite.families.models.mixtral import MIXTRAL
from swiftlite.families.models.nemotron_h import NEMOTRON_H
from swiftlite.families.models.olmo2 import OLMO2
from swiftlite.families.models.olmo3 import OLMO3
from swiftlite.families.models.phi3 import PHI3
from swiftlite.families.models.qwen2 import QWEN2
from swiftlite.families.models.qwen2_5_vl import QWEN2_5_VL
from swiftlite.families.models.qwen2_moe import QWEN2_MOE
from swiftlite.families.models.qwen3 import QWEN3
from swiftlite.families.models.qwen3_5 import QWEN3_5, QWEN3_5_MOE, QWEN3_5_MOE_TEXT, QWEN3_5_TEXT
from swiftlite.families.models.qwen3_moe import QWEN3_MOE
from swiftlite.families.models.qwen3_next import QWEN3_NEXT
from swiftlite.families.models.qwen3_vl import QWEN3_VL, QWEN3_VL_MOE
from swiftlite.families.models.seed_oss import SEED_OSS
from swiftlite.families.models.smollm3 import SMOLLM3
from swiftlite.families.models.step3p5 import STEP3P5, STEP3P7
from swiftlite.families.rank import Rank
from swiftlite.families.reward_model import is_reward_model
from swiftlite.families.values import rope_problems, value_problems
from swiftlite.families.vision import channels_of

FAMILIES: dict[str, Family] = {
    "deepseek_v3": DEEPSEEK_V3,
    "deepseek_v32": DEEPSEEK_V32,
    "ernie4_5_moe": ERNIE4_5_MOE,
    "exaone4": EXAONE4,
    "exaone4_5": EXAONE4_5,
    "gemma3": GEMMA3,
    "gemma3_text": GEMMA3_TEXT,
    "gemma4": GEMMA4,
    "gemma4_text": GEMMA4_TEXT,
    "gemma4_unified": GEMMA4_UNIFIED,
    "glm4_moe": GLM4_MOE,
    "glm4_moe_lite": GLM4_MOE_LITE,
    "glm_moe_dsa": GLM_MOE_DSA,
    "gpt_oss": GPT_OSS,
    "granite": GRANITE,
    "hy_v3": HY_V3,
    "kimi_k2": KIMI_K2,
    "kimi_k25": KIMI_K25,
    "llama": LLAMA,
    "mimo": MIMO,
    "mimo_v2_flash": MIMO_V2_FLASH,
    "minimax_m2": MINIMAX_M2,
    "mistral": MISTRAL,
    "mistral3": MISTRAL3,
    "mixtral": MIXTRAL,
    "nemotron_h": NEMOTRON_H,
    "olmo2": OLMO2,
    "olmo3": OLMO3,
    "phi3": PHI3,
    "qwen2": QWEN2,
    "qwen2_5_vl": QWEN2_5_VL,
    "qwen2_moe": QWEN2_MOE,
    "qwen3": QWEN3,
    "qwen3_5": QWEN3_5,
    "qwen3_5_moe": QWEN3_5_MOE,
    "qwen3_5_moe_text": QWEN3_5_MOE_TEXT,
    "qwen3_5_text": QWEN3_5_TEXT,
    "qwen3_moe": QWEN3_MOE,
    "qwen3_next": QWEN3_NEXT,
    "qwen3_vl": QWEN3_VL,
    "qwen3_vl_moe": QWEN3_VL_MOE,
    "seed_oss": SEED_OSS,
    "smollm3": SMOLLM3,
    "step3p5": STEP3P5,
    "step3p7": STEP3P7,
}


def get(hf_config: HfConfig, hf_dir: str | Path | None = None) -> Family:
    """Return the family of a config.json, after checking that its settings are supported.

    Args:
        hf_dir: directory of the config, named in errors. Of a family whose files have different names of tensors, the
            result has those of the directory.

    Raises:
        UserError: the model_type is unknown, or a setting that changes the computation is not supported.
    """
    family = find(hf_config)
    if family is None:
        where = Path(hf_dir or ".") / "config.json"
        if is_published(hf_config):
            raise UserError(
                f"{where}: {hf_config['model_type']} is a drafter, not a model",
                "give its trunk with --model; to train the drafter, add --mtp_graft_from with its directory",
            )
        raise UserError(
            f"{where}: model_type {hf_config.get('model_type')!r} is not supported",
            f"supported: {', '.join(FAMILIES)}; docs/en/add-a-family.md shows how to add one",
        )
    try:
        refuse(hf_config, value_problems(hf_config, family.numbers_by_layer))
        family.check(hf_config)
        refuse(hf_config, _rope_problems(family, hf_config))
        if why := family.drafter(hf_config).why_not(family, hf_config):
            refuse(hf_config, [f"the model cannot have the drafter {kind_of(hf_config)!r}: {why}"])
    except UserError as error:
        if hf_dir is None:
            raise
        raise UserError(f"{Path(hf_dir)}/{error.problem}", error.hint) from None  # the message starts with config.json
    if family.renamed is not None and hf_dir is not None and has_tensors(Path(hf_dir), dense.IN_WRAPPER):
        return family.renamed
    return family


def _rope_problems(family: Family, hf_config: HfConfig) -> list[str]:
    """Return a problem (one line) for every rotary setting with which no frequencies can be computed."""
    problems: dict[str, None] = {}
    for settings in family.outside(hf_config).ropes or (hf_config,):
        # As in transformers, rope_scaling has precedence.
        key = "rope_scaling" if settings.get("rope_scaling") else "rope_parameters"
        problems |= dict.fromkeys(f"{key}: {problem}" for problem in rope_problems(settings.get(key) or {}))
    return list(problems)


def architecture_of(hf_config: HfConfig) -> Architecture:
    """Return the architecture of a config.json that the family has not checked; for estimates only.

    Raises:
        UserError: the model_type is unknown, or a size is missing.
    """
    family = find(hf_config)
    if family is None:
        problem = f"model_type {hf_config.get('model_type')!r}: its memory is unknown"
        raise UserError(problem, f"known: {', '.join(FAMILIES)}")
    architecture = _countable(family, hf_config)
    if architecture is None:
        problem = f"config.json (model_type {family.name!r}) lacks a size, so its memory is unknown"
        raise UserError(problem, "copy it from the model's source again")
    return with_drafter_sizes(architecture, family, hf_config)


def with_drafter_sizes(architecture: Architecture, family: Family, hf_config: HfConfig) -> Architecture:
    """Return the architecture with the sizes of the drafter that config.json declares."""
    sizes = family.drafter(hf_config).sizes
    if sizes is None:
        return architecture
    return replace(architecture, drafter=partial(sizes, family, hf_config))


def known_architecture(hf_config: HfConfig) -> Architecture | None:
    """Return the architecture of a config.json for rules; None if it is incomplete.

    The architecture is incomplete if config.json is missing, has an unknown model_type or does not contain a size, or
    declares a drafter that the model cannot have. One rule or the family reports this problem, and all other rules
    ignore it.
    """
    family = find(hf_config)
    if family is None or value_problems(hf_config, family.numbers_by_layer):
        return None
    architecture = _countable(family, hf_config)
    if architecture is None or family.drafter(hf_config).why_not(family, hf_config):
        return None
    return architecture


def _countable(family: Family, hf_config: HfConfig) -> Architecture | None:
    """Return the architecture; None if config.json does not contain a size that the memory estimate requires."""
    try:
        architecture = family.architecture(hf_config)
        architecture.outside.local_vocab(Rank())
        for layer in architecture.layers[:1]:
            architecture.mtp_block.parameters(Rank())
            layer.parameters(Rank())
        for part in architecture.sublayers:
            part.parameters(Rank())
            part.activation_bytes(Rank())
    except (KeyError, IndexError, TypeError, ZeroDivisionError):  # a size or a layer is missing, or not a number
        return None
    return architecture


def impossible_values(hf_config: HfConfig) -> list[str]:
    """Return a problem (one line) for every invalid value in the config.json of a known family."""
    family = find(hf_config)
    if family is None:
        return []
    return value_problems(hf_config, family.numbers_by_layer)


def find(hf_config: HfConfig) -> Family | None:
    """Return the family of a config.json that was not checked; None if it is unknown."""
    family = FAMILIES.get(str(hf_config.get("model_type")))
    if family is not None and is_reward_model(hf_config):
        return family.as_reward_model()
    return family


_SIZES_OF_IMAGES = ("patch_size", "temporal_patch_size", "spatial_merge_size")


def image_sizes(hf_config: HfConfig) -> ImageSizes | None:
    """Return the sizes of a model's image inputs; None for models without images, or whose config.json lacks a size.

    All families with a vision tower divide images, and count positions, in the same way (`data/image_inputs.py`).
    """
    family = find(hf_config)
    vision, image_token_id = hf_config.get("vision_config"), hf_config.get("image_token_id")
    if family is None or family.vision is None or not isinstance(vision, dict) or image_token_id is None:
        return None
    if any(key not in vision for key in _SIZES_OF_IMAGES):
        return None
    return ImageSizes(
        patch_size=vision["patch_size"],
        temporal_patch_size=vision["temporal_patch_size"],
        merge_size=vision["spatial_merge_size"],
        channels=channels_of(vision),
        image_token_id=image_token_id,
        vision_start_id=hf_config.get("vision_start_token_id"),
        vision_end_id=hf_config.get("vision_end_token_id"),
        video_token_id=hf_config.get("video_token_id"),
    )
