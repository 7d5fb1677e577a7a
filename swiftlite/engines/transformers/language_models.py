"""Trunks for transformers whose files have another `model_type`: Kimi-K2, MiMo, and language models within wrappers."""

from functools import partial
from typing import Any

from transformers import (
    DeepseekV3ForCausalLM,
    Exaone4ForCausalLM,
    Gemma3ForCausalLM,
    Gemma4ForCausalLM,
    Gemma4UnifiedForCausalLM,
    MistralForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2ForCausalLM,
)

from swiftlite.families.resolved import HfModel

_PARTS = ("text_config", "vision_config", "audio_config")
_OF_FILES = ("model_type", "architectures", "auto_map", "quantization_config", *_PARTS)
"""Keys of config.json that do not describe the language model."""


def _trunk_of(model_class: Any, model: HfModel) -> tuple[type[PreTrainedModel], PreTrainedConfig]:
    """Return a class of transformers, and the config of a model's trunk for it."""
    settings = {key: value for key, value in model.config.items() if key not in _OF_FILES}
    return model_class, model_class.config_class(**settings)


deepseek_v3 = partial(_trunk_of, DeepseekV3ForCausalLM)
exaone4 = partial(_trunk_of, Exaone4ForCausalLM)
gemma3 = partial(_trunk_of, Gemma3ForCausalLM)
gemma4 = partial(_trunk_of, Gemma4ForCausalLM)
gemma4_unified = partial(_trunk_of, Gemma4UnifiedForCausalLM)
mimo = partial(_trunk_of, Qwen2ForCausalLM)
mistral = partial(_trunk_of, MistralForCausalLM)
