"""What a config.json says of quantised weights: which format can be read (`fp8.py` does), and in which blocks."""

from swiftlite.bridge.rows import HfConfig
from swiftlite.errors import UserError

# Keys of quantization_config that do not change what a weight is: how activations are treated while serving, and which
# modules are not quantised (their tensors say so themselves).
_HARMLESS = {"activation_scheme", "scale_fmt", "modules_to_not_convert", "ignored_layers", "ignore"}
_DEFINING = {"quant_method": "fp8", "fmt": "e4m3"}

BlockSize = tuple[int, int]


def quantization_problem(hf_config: HfConfig) -> str:
    """Why the quantization_config of a config.json cannot be read; empty when it can, or there is none."""
    quantization = hf_config.get("quantization_config")
    if quantization is None:
        return ""
    only = "only fp8 (e4m3) with weight_block_size, as in DeepSeek-V3, can be read"
    if not isinstance(quantization, dict):
        return f"quantization_config {quantization!r} is not supported; {only}"
    wrong = {
        key: value
        for key, value in quantization.items()
        if key not in _HARMLESS and key != "weight_block_size" and _DEFINING.get(key) != value
    }
    if wrong or "quant_method" not in quantization:
        return f"quantization_config {wrong or quantization} is not supported; {only}"
    block = quantization.get("weight_block_size")
    if not isinstance(block, list) or len(block) != 2 or not all(isinstance(n, int) and n > 0 for n in block):
        return f"quantization_config: weight_block_size {block!r} is not supported; {only}"
    return ""


def block_size(hf_config: HfConfig) -> BlockSize | None:
    """Return rows and columns of a block; None for a checkpoint that is not quantised.

    Raises:
        UserError: its format cannot be read.
    """
    if problem := quantization_problem(hf_config):
        raise UserError(f"config.json: {problem}", "name the model before it was quantised")
    quantization = hf_config.get("quantization_config")
    return (quantization["weight_block_size"][0], quantization["weight_block_size"][1]) if quantization else None
