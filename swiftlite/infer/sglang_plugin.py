"""What SGLang lacks to serve a swiftlite checkpoint: a config class for MiMo.

SGLang calls `register` in each of its processes, through the entry point group `sglang.srt.plugins`.
"""

from transformers import AutoConfig

from swiftlite.infer.mimo_config import MiMoConfig


def register() -> None:
    """Tell transformers about the class; may be called again."""
    AutoConfig.register("mimo", MiMoConfig, exist_ok=True)
