"""The trunk of MiMo for transformers, which has no class for it."""

from transformers import Qwen2Config, Qwen2ForCausalLM

from swiftlite.families.resolved import HfModel


def trunk_of(model: HfModel) -> tuple[type[Qwen2ForCausalLM], Qwen2Config]:
    """Return the class and the config of the trunk, which is a Qwen2 whose config has another name."""
    return Qwen2ForCausalLM, Qwen2Config(**{key: value for key, value in model.config.items() if key != "model_type"})
