"""Write and read numbers of 8 and 4 bits with scales in torch, as Transformer Engine's kernels do.

Each format defines the size of a block that shares a scale, and the memory layout of data and scales. The rest is one
division and one cast. Scales of blocks are stored as the factor by which a number is multiplied when it is read.
"""

from dataclasses import dataclass
from typing import Any

import torch

FP4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
"""Values of the 4-bit codes without the sign. The sign is the fourth bit."""
E4M3, E5M2 = 7, 8  # values of transformer_engine_torch.DType
FP8_MAX = torch.finfo(torch.float8_e4m3fn).max
FP8 = {E4M3: torch.float8_e4m3fn, E5M2: torch.float8_e5m2}


@dataclass(frozen=True)
class Layout:
    """The memory layout of one of the two copies of a quantized tensor [M, K].

    Attributes:
        data, scale: names of attributes of the tensor.
        block: rows and columns that share a scale; 0 means all.
        data_is_turned, scale_is_turned: whether columns are first.
        is_exponent: whether scales are powers of two, stored as the exponent plus 127.
    """

    data: str
    scale: str
    block: tuple[int, int]
    data_is_turned: bool = False
    scale_is_turned: bool = False
    is_exponent: bool = False


def layout_of(tensor: Any, columnwise: bool) -> Layout:
    """Return the layout of a tensor's copy for products over columns, or over rows."""
    kind = type(tensor).__name__.removesuffix("Storage")
    if kind == "Float8Tensor":
        data = "_transpose" if columnwise and tensor._transpose is not None else "_data"
        return Layout(data, "_scale_inv", (0, 0), data_is_turned=data == "_transpose")
    names = ("_columnwise_data", "_columnwise_scale_inv") if columnwise else ("_rowwise_data", "_rowwise_scale_inv")
    if kind == "MXFP8Tensor":
        return Layout(*names, (32, 1) if columnwise else (1, 32), is_exponent=True)
    assert kind == "Float8BlockwiseQTensor", kind
    if tensor._is_2D_scaled:
        return Layout(*names, (128, 128), data_is_turned=columnwise, scale_is_turned=columnwise)
    return Layout(*names, (128, 1) if columnwise else (1, 128), columnwise, scale_is_turned=not columnwise)


def write(tensor: Any, values: torch.Tensor, quantizer: Any) -> None:
    """Write values into all copies that the tensor has."""
    numbers = values.detach().float().reshape(-1, values.size(-1))
    if is_fp4(tensor):
        _write_fp4(tensor, numbers, quantizer)
        return
    if not numbers.numel():  # an expert without a token
        return
    for columnwise in (False, True):
        layout = layout_of(tensor, columnwise)
        if getattr(tensor, layout.data) is None or (columnwise and layout.data == "_data"):
            continue
        blocks = _blocks(numbers.shape, layout)
        scales = _scales(_largest(numbers, blocks), tensor, quantizer, layout)
        dtype = FP8[int(tensor._fp8_dtype)]
        largest = torch.finfo(dtype).max
        data = (numbers / _spread(scales, blocks, numbers.shape)).clamp(-largest, largest).to(dtype).view(torch.uint8)
        place = getattr(tensor, layout.data)
        place.copy_((data.t() if layout.data_is_turned else data).reshape(place.shape))
        _write_scales(getattr(tensor, layout.scale), scales, layout)
    if hasattr(tensor, "_transpose_invalid"):
        tensor._transpose_invalid = tensor._transpose is None


def read(tensor: Any, columnwise: bool) -> torch.Tensor:
    """Return the numbers [M, K] of one of the two copies in float32."""
    if is_fp4(tensor):
        return _read_fp4(tensor, columnwise)
    layout = layout_of(tensor, columnwise)
    data = getattr(tensor, layout.data)
    assert data is not None, f"{type(tensor).__name__} has no {layout.data}"
    data = data.reshape(len(data), -1) if layout.data_is_turned else data.reshape(-1, data.size(-1))
    numbers = data.view(FP8[int(tensor._fp8_dtype)]).float()
    numbers = numbers.t() if layout.data_is_turned else numbers
    blocks = _blocks(numbers.shape, layout)
    counts = tuple(-(-size // block) for size, block in zip(numbers.shape, blocks, strict=True))
    return numbers * _spread(_read_scales(getattr(tensor, layout.scale), counts, layout), blocks, numbers.shape)


def _blocks(shape: torch.Size, layout: Layout) -> tuple[int, int]:
    rows, columns = layout.block
    return rows or max(shape[0], 1), columns or shape[1]


def _largest(numbers: torch.Tensor, blocks: tuple[int, int]) -> torch.Tensor:
    """Return the largest absolute number of each block."""
    rows, columns = blocks
    height, width = numbers.shape
    padded = torch.nn.functional.pad(numbers.abs(), (0, -width % columns, 0, -height % rows))
    return padded.unflatten(0, (-1, rows)).unflatten(2, (-1, columns)).amax((1, 3))


def _scales(largest: torch.Tensor, tensor: Any, quantizer: Any, layout: Layout) -> torch.Tensor:
    if getattr(quantizer, "with_amax_reduction", False):
        torch.distributed.all_reduce(
            largest, torch.distributed.ReduceOp.MAX, group=quantizer._canonicalized_amax_reduction_group()
        )
    scales = largest.clamp_min(getattr(quantizer, "amax_epsilon", 0.0)) / torch.finfo(FP8[int(tensor._fp8_dtype)]).max
    scales = torch.where(largest == 0, torch.ones_like(scales), scales)
    if layout.is_exponent or getattr(quantizer, "force_pow_2_scales", False):
        scales = scales.log2().ceil().exp2()
    return scales


def _spread(scales: torch.Tensor, blocks: tuple[int, int], shape: torch.Size) -> torch.Tensor:
    return scales.repeat_interleave(blocks[0], 0).repeat_interleave(blocks[1], 1)[: shape[0], : shape[1]]


def _write_scales(place: torch.Tensor, scales: torch.Tensor, layout: Layout) -> None:
    """Write scales. `place` may be larger, because its rows are aligned."""
    kept = scales.log2().add(127).to(torch.uint8) if layout.is_exponent else scales
    if place.dim() == 1:
        place.copy_(kept.flatten())
        return
    kept = kept.t() if layout.scale_is_turned else kept
    place.zero_()
    place[: len(kept), : kept.size(1)] = kept


def _read_scales(place: torch.Tensor, counts: tuple[int, int], layout: Layout) -> torch.Tensor:
    if place.dim() == 1:
        return place.reshape(1, 1)
    if layout.scale_is_turned:
        place = place.t()
    kept = place[: counts[0], : counts[1]]
    return (kept.float() - 127).exp2() if layout.is_exponent else kept


def is_fp4(tensor: Any) -> bool:
    return hasattr(tensor, "_fp4_dtype")


def _write_fp4(tensor: Any, numbers: torch.Tensor, quantizer: Any) -> None:
    """Write NVFP4: blocks of 16 with 8-bit scales, and one scale for the whole tensor.

    Numbers are rounded to the nearest. The rotation that the kernels may apply before columns is omitted, because both
    factors of a product have it.
    """
    largest = numbers.abs().amax() if numbers.numel() else torch.tensor(1.0)
    if quantizer.with_amax_reduction:
        group = quantizer._canonicalized_amax_reduction_group()
        torch.distributed.all_reduce(largest, torch.distributed.ReduceOp.MAX, group=group)
    for side, turned in (("rowwise", numbers), ("columnwise", numbers.t())):
        data = getattr(tensor, f"_{side}_data")
        if data is None or not numbers.numel():
            continue
        blocks = (16, 16) if quantizer.with_2d_quantization else (1, 16)
        whole = FP8_MAX * FP4[-1] / largest.clamp_min(1e-12)
        scales = (_largest(turned, blocks) / FP4[-1] * whole).clamp(2**-9, FP8_MAX).to(torch.float8_e4m3fn)
        data.copy_(_fp4_bytes(turned / _spread(scales.float() / whole, blocks, turned.shape)).reshape(data.shape))
        place = getattr(tensor, f"_{side}_scale_inv")
        kept = scales.view(torch.uint8).repeat_interleave(blocks[0], 0)[: len(turned)]
        place.zero_()
        place[: len(kept), : kept.size(1)] = kept
        getattr(tensor, f"_amax_{side}").fill_(largest)


def _fp4_bytes(numbers: torch.Tensor) -> torch.Tensor:
    """Return bytes [M, K / 2] for numbers [M, K], rounded to FP4.

    The first of two numbers is in the lower half of a byte.
    """
    nearest = (numbers.abs()[..., None] - FP4).abs().argmin(-1)
    codes = (nearest + 8 * (numbers < 0)).to(torch.uint8)
    return codes[..., 0::2] + 16 * codes[..., 1::2]


def _read_fp4(tensor: Any, columnwise: bool) -> torch.Tensor:
    side = "columnwise" if columnwise else "rowwise"
    data = getattr(tensor, f"_{side}_data")
    data = data.reshape(len(data), -1) if columnwise else data.reshape(-1, data.size(-1))
    codes = torch.stack([data % 16, data // 16], -1).flatten(-2).long()
    signed = torch.where(codes < 8, FP4[codes % 8], -FP4[codes % 8])
    scales = getattr(tensor, f"_{side}_scale_inv").view(torch.float8_e4m3fn).float()
    whole = FP8_MAX * FP4[-1] / getattr(tensor, f"_amax_{side}").clamp_min(1e-12)
    numbers = signed * _spread(scales, (1, 16), signed.shape) / whole
    return numbers.t() if columnwise else numbers
