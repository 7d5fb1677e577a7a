"""Trunks for transformers whose files have another `model_type`: Kimi-K2, and language models within wrappers."""

from typing import Any

from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Exaone4Config,
    Exaone4ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    Gemma4ForCausalLM,
    Gemma4TextConfig,
    Gemma4UnifiedForCausalLM,
    Gemma4UnifiedTextConfig,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
)

from swiftlite.families.resolved import HfModel

_PARTS = ("text_config", "vision_config", "audio_config")
_OF_FILES = ("model_type", "architectures", "auto_map", "quantization_config", *_PARTS)
"""Keys of config.json that do not describe the language model."""

Trunk = tuple[type[PreTrainedModel], PreTrainedConfig]


def deepseek_v3(model: HfModel) -> Trunk:
    """Return the class and the config of a trunk with the layers of DeepSeek-V3."""
    return DeepseekV3ForCausalLM, DeepseekV3Config(**_settings(model))


def exaone4(model: HfModel) -> Trunk:
    """Return the class and the config of a trunk with the layers of EXAONE 4."""
    return Exaone4ForCausalLM, Exaone4Config(**_settings(model))


def gemma3(model: HfModel) -> Trunk:
    """Return the class and the config of a trunk with the layers of Gemma 3."""
    return Gemma3ForCausalLM, Gemma3TextConfig(**_settings(model))


def gemma4(model: HfModel) -> Trunk:
    """Return the class and the config of a trunk with the layers of Gemma 4."""
    return Gemma4ForCausalLM, Gemma4TextConfig(**_settings(model))


def gemma4_unified(model: HfModel) -> Trunk:
    """Return the class and the config of a trunk with the layers of Gemma 4 12B."""
    return Gemma4UnifiedForCausalLM, Gemma4UnifiedTextConfig(**_settings(model))


def mistral(model: HfModel) -> Trunk:
    """Return the class and the config of a trunk with the layers of Mistral."""
    return MistralForCausalLM, MistralConfig(**_settings(model))


def _settings(model: HfModel) -> dict[str, Any]:
    return {key: value for key, value in model.config.items() if key not in _OF_FILES}
