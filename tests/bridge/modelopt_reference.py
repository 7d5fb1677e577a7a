"""Quantize a model with ModelOpt, and decode the matrices of the checkpoint with ModelOpt's own functions.

    python -m tests.bridge.modelopt_reference SOURCE CHECKPOINT CONFIG

ModelOpt changes classes of other libraries when it is imported, so it has its own process. CONFIG is the name of one of
its configurations, such as NVFP4_DEFAULT_CFG. The decoded matrices are written to CHECKPOINT/decoded.pt.
"""

import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM


def main(source: str, checkpoint: str, config: str) -> None:
    """Write the checkpoint and the decoded matrices."""
    import modelopt.torch.quantization as mtq  # pyright: ignore[reportMissingImports]
    from modelopt.torch.export import export_hf_checkpoint  # pyright: ignore[reportMissingImports]

    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
    mtq.quantize(model, getattr(mtq, config), lambda model: model(torch.randint(0, 100, (2, 16))))
    export_hf_checkpoint(model, export_dir=checkpoint)
    tensors = load_file(Path(checkpoint) / "model.safetensors")
    matrices = {}
    for key, codes in tensors.items():
        if key.endswith(".weight") and f"{key}_scale" in tensors:
            parts = {name: tensors.get(f"{key}_{name}") for name in ("scale", "scale_2")}
            matrices[key] = decoded(codes, **parts)
    torch.save(matrices, Path(checkpoint) / "decoded.pt")


def decoded(codes: torch.Tensor, scale: Any, scale_2: Any) -> torch.Tensor:
    """Return the matrix that ModelOpt decodes from stored tensors, in float32."""
    from modelopt.torch.quantization import qtensor  # pyright: ignore[reportMissingImports]

    if codes.dtype is torch.uint8:
        shape = torch.Size((codes.shape[0], 2 * codes.shape[1]))
        fp4 = qtensor.NVFP4QTensor(shape, torch.float32, codes)
        return fp4.dequantize(torch.float32, scale=scale, double_scale=scale_2, block_sizes={-1: 16})
    if scale.dtype is torch.uint8:
        return qtensor.MXFP8QTensor(codes.shape, torch.float32, codes).dequantize(torch.float32, scale=scale)
    if scale.dim() == 1:
        scale = scale[:, None]
    return qtensor.FP8QTensor(codes.shape, torch.float32, codes).dequantize(torch.float32, scale=scale)


if __name__ == "__main__":
    main(*sys.argv[1:])
