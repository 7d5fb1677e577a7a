"""FP8 checkpoints in DeepSeek-V3's format: `X.weight` in float8_e4m3fn, `X.weight_scale_inv` with a float32 factor for
each block of it. They are read as the numbers they stand for; what swiftlite writes is bfloat16.
"""

from collections.abc import Mapping
from typing import Any

import torch

from swiftlite.bridge.entry import Entry

SCALE_SUFFIX = "_scale_inv"
# Keys of quantization_config that do not change what a weight is: how activations are treated while serving, and which
# modules are not quantised (their tensors say so themselves).
_HARMLESS = {"activation_scheme", "scale_fmt", "modules_to_not_convert", "ignored_layers", "ignore"}
_DEFINING = {"quant_method": "fp8", "fmt": "e4m3"}

BlockSize = tuple[int, int]


def quantization_problem(hf_config: Mapping[str, Any]) -> str:
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


def block_size(hf_config: Mapping[str, Any]) -> BlockSize | None:
    """Rows and columns of a block; None for a checkpoint that is not quantised.

    Args:
        hf_config: checked with `quantization_problem`.
    """
    quantization = hf_config.get("quantization_config")
    return (quantization["weight_block_size"][0], quantization["weight_block_size"][1]) if quantization else None


def is_quantised(key: str, entries: Mapping[str, Entry]) -> bool:
    """Whether a tensor comes with factors."""
    return entries[key].dtype is torch.float8_e4m3fn and key + SCALE_SUFFIX in entries


def scales_of(entries: Mapping[str, Entry], block: BlockSize) -> tuple[dict[str, Entry], list[str]]:
    """The factors of every quantised tensor, by the tensor's key; and one line for each that cannot be used."""
    scales, problems = {}, []
    for key, entry in entries.items():
        if entry.dtype is not torch.float8_e4m3fn:
            continue
        scale_key = key + SCALE_SUFFIX
        scale = entries.get(scale_key)
        if scale is None:
            problems.append(f"{key} is {entry.dtype} without {scale_key}")
        elif (
            scale.dtype is not torch.float32 or len(entry.shape) != 2 or scale.shape != _num_blocks(entry.shape, block)
        ):
            found = f"{scale_key} is {scale.dtype} {list(scale.shape)}"
            problems.append(f"{found}, not float32 factors of the {list(block)} blocks of {key} {list(entry.shape)}")
        else:
            scales[key] = scale
    return scales, problems


def blocks_of(ranges: tuple[range, range], block: BlockSize) -> tuple[range, range]:
    """The blocks that a box of a tensor touches."""
    rows, columns = (range(r.start // n, (r.stop - 1) // n + 1) for r, n in zip(ranges, block, strict=True))
    return rows, columns


def dequantise(chunk: torch.Tensor, scale: torch.Tensor, ranges: tuple[range, range], block: BlockSize) -> torch.Tensor:
    """The float32 numbers that a box of a tensor stands for.

    Args:
        chunk: the box, float8.
        scale: the factors of `blocks_of(ranges, block)`.
        ranges: which rows and columns of the tensor the box is.
    """
    rows, columns = (torch.arange(r.start, r.stop) // n - r.start // n for r, n in zip(ranges, block, strict=True))
    return chunk.float() * scale[rows][:, columns]


def _num_blocks(shape: tuple[int, ...], block: BlockSize) -> tuple[int, ...]:
    return tuple(-(-length // n) for length, n in zip(shape, block, strict=True))
