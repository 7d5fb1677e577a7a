"""The config class that engines need for MiMo, because transformers does not have one."""

from transformers import Qwen2Config


class MiMoConfig(Qwen2Config):
    """Qwen2's config with the key `num_nextn_predict_layers`."""

    model_type = "mimo"
