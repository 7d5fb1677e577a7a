"""Reward models: models that compute one number for a conversation instead of logits of tokens.

The files are those of transformers' classes for sequence classification with one label: `score.weight` [1, H] replaces
the output layer. Its input is the trunk's state at the last token that is not padding.
"""

from collections.abc import Mapping
from typing import Any

from swiftlite.bridge.rows import HfConfig

CLASSES: Mapping[str, str] = {
    "deepseek_v3": "DeepseekV3ForSequenceClassification",
    "exaone4": "Exaone4ForSequenceClassification",
    "gemma3_text": "Gemma3TextForSequenceClassification",
    "gpt_oss": "GptOssForSequenceClassification",
    "llama": "LlamaForSequenceClassification",
    "mistral": "MistralForSequenceClassification",
    "mixtral": "MixtralForSequenceClassification",
    "olmo2": "Olmo2ForSequenceClassification",
    "olmo3": "Olmo3ForSequenceClassification",
    "phi3": "Phi3ForSequenceClassification",
    "qwen2": "Qwen2ForSequenceClassification",
    "qwen2_moe": "Qwen2MoeForSequenceClassification",
    "qwen3": "Qwen3ForSequenceClassification",
    "qwen3_5_text": "Qwen3_5TextForSequenceClassification",
    "qwen3_moe": "Qwen3MoeForSequenceClassification",
    "qwen3_next": "Qwen3NextForSequenceClassification",
    "seed_oss": "SeedOssForSequenceClassification",
    "smollm3": "SmolLM3ForSequenceClassification",
}
"""transformers' class of a reward model, by `model_type`; other families have none."""
SCORE = "score.weight"
"""HF name of the matrix [1, H] whose product with a state is the score."""
# Where transformers has both, the number of names is that of labels.
_ONE_LABEL = {"num_labels": 1, "id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
_KEYS = ("architectures", *_ONE_LABEL, "pad_token_id")


def is_reward_model(hf_config: HfConfig) -> bool:
    """Return whether config.json declares one of `CLASSES`."""
    name = CLASSES.get(str(hf_config.get("model_type")))
    names = hf_config.get("architectures")
    return name is not None and isinstance(names, list) and name in names


def num_labels(hf_config: HfConfig) -> int:
    """Return how many numbers a classifier computes, as transformers reads it from config.json."""
    labels = hf_config.get("id2label")
    return hf_config.get("num_labels", len(labels) if isinstance(labels, dict) else 2)


def as_reward_model(hf_config: HfConfig) -> dict[str, Any]:
    """Return config.json of a reward model with this trunk; unchanged if transformers has no class for it."""
    name = CLASSES.get(str(hf_config.get("model_type")))
    if name is None or is_reward_model(hf_config):
        return dict(hf_config)
    return {**hf_config, "architectures": [name], **_ONE_LABEL}


def reward_keys(hf_config: HfConfig) -> dict[str, Any]:
    """Return the keys of config.json that a reward model changes; empty for other models."""
    if not is_reward_model(hf_config):
        return {}
    return {key: hf_config[key] for key in _KEYS if key in hf_config}
