"""The config class that engines need for MiMo; transformers has none of that model type."""

from transformers import Qwen2Config


class MiMoConfig(Qwen2Config):
    """MiMo's config is Qwen2's with `num_nextn_predict_layers`."""

    model_type = "mimo"
