"""Compare a GGUF file with the model from which it was written."""

from pathlib import Path

import torch

from swiftlite.bridge.encoding.index import format_of
from swiftlite.bridge.tensors import Checkpoint
from swiftlite.families.resolved import HfModel
from swiftlite.gguf.read import GgufFile

LOSSLESS = {"f32": (torch.float32, torch.bfloat16, torch.float16), "bf16": (torch.bfloat16,), "f16": (torch.float16,)}
"""Types of matrices that contain all numbers of the dtypes."""


def differences(model: HfModel, file: Path, gguf_type: str) -> list[str]:
    """Return a line for each tensor of the model that cannot be read back from a file with the same bits.

    Only tensors whose numbers the file can contain are compared: all in f32, 16-bit matrices in their own type, and
    vectors in every type.
    """
    lines = []
    with Checkpoint(model.directory, format_of(model.config)) as checkpoint:
        for name, tensor, is_matrix in GgufFile(file).tensors():
            source = checkpoint.read(name, torch.bfloat16)
            is_compared = not is_matrix or source.dtype in LOSSLESS.get(gguf_type, ())
            if source.shape != tensor.shape:
                lines.append(f"{name} has the shape {list(tensor.shape)}, not {list(source.shape)}")
            elif is_compared and not torch.equal(tensor.to(source.dtype), source):
                lines.append(f"{name} has other numbers")
    return lines
