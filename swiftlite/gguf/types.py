"""List the types of matrices in GGUF files, and find the program that writes further types. No torch."""

import os
import shutil
from typing import Literal

GgufType = Literal["f32", "bf16", "f16", "q8_0", "q4_0"]
"""Types that swiftlite writes."""
WRITTEN_TYPES: dict[str, GgufType] = {name: name for name in ("f32", "bf16", "f16", "q8_0", "q4_0")}
FINE_TYPES: dict[str, GgufType] = {name: name for name in ("f32", "bf16", "f16")}
"""Types that swiftlite writes, without quantized ones."""
QUANTIZER = "LLAMA_QUANTIZE"
"""Environment variable with the path of llama-quantize, which has precedence over PATH."""


def quantizer() -> str | None:
    """Return the path of llama-quantize, which writes all other types; None if it is not installed."""
    return shutil.which(os.environ.get(QUANTIZER) or "llama-quantize")
