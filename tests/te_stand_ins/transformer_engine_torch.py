"""Compute in torch what Transformer Engine's compiled extension computes.

Of its 177 functions, this module has those that linear layers, experts, RMSNorm and unfused attention call, also in
FP8. Other functions raise an error when they are accessed. Signatures are those of the calls in the wheel's Python code
(transformer_engine/pytorch, 2.20.2); docstrings name the calling file there. tests/te_stand_ins/__init__.py installs
this module in place of the extension.
"""

import enum
import math
from typing import Any

import torch

from tests.te_stand_ins import quantized


class DType(enum.Enum):
    """Data types as in the C++ header. transformer_engine.pytorch.constants compares the names."""

    kByte = 0
    kInt32 = 2
    kFloat32 = 4
    kFloat16 = 5
    kBFloat16 = 6
    kFloat8E4M3 = 7
    kFloat8E5M2 = 8
    kFloat4E2M1 = 10

    def __int__(self) -> int:
        return self.value


class FP8FwdTensors(enum.IntEnum):
    """Indices of a module's quantizers, as in the C++ header (common.h of pytorch/csrc)."""

    GEMM1_INPUT = 0
    GEMM1_WEIGHT = 1
    GEMM1_OUTPUT = 2
    GEMM2_INPUT = 3
    GEMM2_WEIGHT = 4
    GEMM2_OUTPUT = 5
    GEMM3_INPUT = 6
    GEMM3_WEIGHT = 7
    GEMM3_OUTPUT = 8


class FP8BwdTensors(enum.IntEnum):
    """Indices of a module's quantizers for gradients, like `FP8FwdTensors`."""

    GRAD_OUTPUT1 = 0
    GRAD_INPUT1 = 1
    GRAD_OUTPUT2 = 2
    GRAD_INPUT2 = 3
    GRAD_OUTPUT3 = 4
    GRAD_INPUT3 = 5


class NVTE_Fused_Attn_Backend(enum.Enum):
    """Backends as in the C++ header. cpp_extensions/fused_attn.py compares the names."""

    NVTE_No_Backend = -1
    NVTE_F16_arbitrary_seqlen = 1
    NVTE_FP8 = 2

    def __int__(self) -> int:
        return self.value


TORCH = {DType.kFloat32.value: torch.float32, DType.kBFloat16.value: torch.bfloat16}


def get_cudnn_version() -> int:
    return 91500


def get_cublasLt_version() -> int:
    return 130000


def generic_gemm(
    A: torch.Tensor,
    transa: bool,
    B: torch.Tensor,
    transb: bool,
    out: torch.Tensor | None,
    quantizer: None,
    out_dtype: Any,
    bias: torch.Tensor | None,
    bias_dtype: Any,
    gelu: bool,
    gelu_in: None,
    grad: bool,
    workspace: torch.Tensor,
    workspace_size: int,
    accumulate: bool,
    use_split_accumulator: bool,
    *,
    alpha: float,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor | None, None, None]:
    """Compute a matrix product for cpp_extensions/gemm.py.

    cuBLAS is column-major, so for row-major tensors this is op(B) @ op(A). With `grad`, the bias is not added; its
    gradient, the sum of B, is the second result.
    """
    assert quantizer is None
    assert not gelu
    assert alpha == 1.0
    A, B = _numbers(A, columnwise=not transa), _numbers(B, columnwise=transb)
    first = B.flatten(0, -2) if not transb else B.flatten(0, -2).t()
    second = A.flatten(0, -2).t() if transa else A.flatten(0, -2)
    bias_grad = None
    if grad and bias is not None:
        bias_grad = B.flatten(0, -2).sum(0)
    if bias is not None and not grad:  # rounded once, as in one kernel
        product = torch.nn.functional.linear(first, second.t(), bias.to(first.dtype))
    else:
        product = first @ second
    if out_dtype is not None:
        product = product.to(TORCH[int(out_dtype)])
    if not transb:
        product = product.view(*B.shape[:-1], product.size(-1))
    if out is not None:
        out.add_(product) if accumulate else out.copy_(product)
        product = out
    return product, bias_grad, None, None


def _numbers(tensor: Any, columnwise: bool) -> torch.Tensor:
    """Return the values of a tensor; float32 if it is quantized."""
    return _read(tensor, columnwise) if hasattr(tensor, "_quantizer") else tensor


def _read(tensor: Any, columnwise: bool) -> torch.Tensor:
    """Return the values of a quantized tensor in its whole shape."""
    return quantized.read(tensor, columnwise).view(tuple(tensor.size()))


def quantize(tensor: torch.Tensor, quantizer: Any, output: Any = None, noop: Any = None) -> Any:
    """Quantize a tensor, for tensor/float8_tensor.py and similar files."""
    if output is None:
        output = create_empty_quantized_tensor(quantizer, list(tensor.shape), tensor.dtype, tensor.device, False)
    quantized.write(output, tensor, quantizer)
    return output


def create_empty_quantized_tensor(
    quantizer: Any, shape: list[int], dtype: torch.dtype, device: torch.device, pin_memory: bool
) -> Any:
    """Allocate a quantized tensor, for quantized_tensor.py."""
    made = quantizer.storage_metadata(dtype)
    # Two numbers of four bits are a byte: the columns of [tokens, 1, hidden] have to be one dimension.
    is_fp4 = "fp4_dtype" in made["nontensor_kwargs"]
    flat = (math.prod(shape[:-1]), shape[-1]) if is_fp4 else tuple(shape)
    specs = quantizer.inner_tensor_specs(flat).items()
    buffers: dict[str, Any] = {name.removeprefix("_"): torch.empty(size, dtype=kept) for name, (size, kept) in specs}
    if is_fp4 and "rowwise_data" in buffers:
        buffers["rowwise_data"] = buffers["rowwise_data"].view(*shape[:-1], -1)
    options = dict(made["nontensor_kwargs"])
    names = ("rowwise_data", "rowwise_scale_inv", "columnwise_data", "columnwise_scale_inv")
    if is_fp4:
        names += ("amax_rowwise", "amax_columnwise")
    if "scale_inv" in buffers:  # one scale for all
        buffers["fp8_scale_inv"] = buffers.pop("scale_inv")
        buffers["data_transpose"] = buffers.pop("transpose", None)
        names = ("data",)
    buffers |= {name: None for name in names if name not in buffers}
    if not quantizer.internal:
        options |= {"shape": tuple(shape), "dtype": dtype, "device": torch.device("cpu")}
        del options["fake_dtype"]
    return made["cls"](**buffers, **options)


def bgrad_quantize(tensor: torch.Tensor, quantizer: Any) -> tuple[torch.Tensor, Any]:
    """Return the gradient of a bias and the quantized tensor, for module/base.py."""
    return tensor.flatten(0, -2).sum(0), quantize(tensor, quantizer)


def split_quantize(
    tensor: torch.Tensor, split_sizes: list[int], quantizers: list[Any], disable_bulk_allocation: bool = False
) -> list[Any]:
    """Quantize the tokens of each expert separately, for module/_split_quantization.py."""
    parts = tensor.split(list(split_sizes))
    return [quantize(part, quantizer) for part, quantizer in zip(parts, quantizers, strict=True)]


def fp8_transpose(data: torch.Tensor, dtype: Any, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """Transpose bytes, for tensor/storage."""
    turned = data.movedim(-1, 0).contiguous()
    return turned if out is None else out.copy_(turned)


def dequantize(tensor: Any, dtype: Any) -> torch.Tensor:
    """Dequantize a tensor, for tensor/storage."""
    return _read(tensor, columnwise=False).to(TORCH[int(dtype)])


def get_num_cublas_streams() -> int:
    return 1


def te_general_grouped_gemm(
    A: list[Any],
    transa: bool,
    B: list[Any],
    transb: bool,
    out: list[torch.Tensor],
    out_dtype: Any,
    m_splits: list[int] | None,
    bias: list[torch.Tensor],
    bias_dtype: Any,
    single_output: bool,
    gelu_in: list[torch.Tensor],
    grad: bool,
    workspaces: list[torch.Tensor],
    workspace_size: int,
    accumulate: bool,
    use_split_accumulator: bool,
    sm_count: int,
) -> list[torch.Tensor]:
    """Compute `generic_gemm` for each expert, for cpp_extensions/gemm.py.

    The results are one tensor, or one per expert.
    """
    places = list(out[0].split(m_splits)) if single_output and m_splits is not None else out
    for first, second, place in zip(A, B, places, strict=True):
        left, right = _numbers(second, columnwise=transb).float(), _numbers(first, columnwise=not transa).float()
        left = left.t() if transb else left
        right = right.t() if transa else right
        result = (left @ right).to(place.dtype)
        place.add_(result) if accumulate else place.copy_(result)
    return bias


def fused_multi_row_padding(tokens: torch.Tensor, out: torch.Tensor, sizes: list[int], padded_sizes: list[int]) -> None:
    """Append zeros to each expert's tokens, for module/fp8_padding.py."""
    for part, place in zip(tokens.split(sizes), out.split(padded_sizes), strict=True):
        place.zero_()
        place[: len(part)] = part


def fused_multi_row_unpadding(
    tokens: torch.Tensor, out: torch.Tensor, padded_sizes: list[int], sizes: list[int]
) -> None:
    """Remove the zeros after each expert's tokens, for module/fp8_unpadding.py."""
    for part, place in zip(tokens.split(padded_sizes), out.split(sizes), strict=True):
        place.copy_(part[: len(place)])


def rmsnorm_fwd(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    out: None,
    quantizer: None,
    out_dtype: Any,
    sm_margin: int,
    zero_centered: bool,
) -> tuple[torch.Tensor, None, torch.Tensor]:
    """Compute RMSNorm in float32 with one rounding, for ops/basic/rmsnorm.py."""
    x_fp32 = x.float()
    rstd = torch.rsqrt(x_fp32.pow(2).mean(-1) + eps)
    gamma = weight.float() + (1.0 if zero_centered else 0.0)
    return (x_fp32 * rstd[..., None] * gamma).to(x.dtype), None, rstd


def rmsnorm_bwd(
    dy: torch.Tensor, x: torch.Tensor, rstd: torch.Tensor, weight: torch.Tensor, sm_margin: int, zero_centered: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the gradients of RMSNorm, for ops/basic/rmsnorm.py."""
    gamma = weight.float() + (1.0 if zero_centered else 0.0)
    normed = x.float() * rstd[..., None]
    dnormed = dy.float() * gamma
    dx = (dnormed - normed * (dnormed * normed).mean(-1, keepdim=True)) * rstd[..., None]
    return dx.to(x.dtype), (dy.float() * normed).flatten(0, -2).sum(0).to(weight.dtype)


def convert_thd_to_bshd(tensor: torch.Tensor, cu_seqlens: torch.Tensor, batch: int, longest: int) -> torch.Tensor:
    """Convert packed sequences to rows padded with zeros, for attention/dot_product_attention/backends.py."""
    out = tensor.new_zeros(batch, longest, *tensor.shape[1:])
    for row, sequence in enumerate(tensor.split(cu_seqlens.diff().tolist())):
        out[row, : len(sequence)] = sequence
    return out


def convert_bshd_to_thd(tensor: torch.Tensor, cu_seqlens: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """Invert `convert_thd_to_bshd`."""
    lengths = cu_seqlens.diff().tolist()
    return torch.cat([row[:length] for row, length in zip(tensor, lengths, strict=True)])


def multi_tensor_l2norm(
    chunk: int, overflow: torch.Tensor, lists: list[list[torch.Tensor]], per_tensor: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute a norm over many tensors, for optimizers/multi_tensor_apply.py."""
    (tensors,) = lists
    norms = torch.stack([tensor.float().norm() for tensor in tensors])
    return norms.norm().reshape(1), norms


def multi_tensor_scale(
    chunk: int, overflow: torch.Tensor, lists: list[list[torch.Tensor]], scale: float | torch.Tensor
) -> None:
    """Scale many tensors, for optimizers/multi_tensor_apply.py. The lists are sources and results."""
    for source, target in zip(*lists, strict=True):
        target.copy_(source * scale)


multi_tensor_scale_tensor = multi_tensor_scale


def multi_tensor_adam(
    chunk: int,
    overflow: torch.Tensor,
    lists: list[list[torch.Tensor]],
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    step: int,
    mode: int,
    bias_correction: int,
    weight_decay: float,
    *others: Any,
) -> None:
    """Update with AdamW (mode 1), for optimizers/fused_adam.py. Gradients, weights and both moments are float32."""
    assert mode == 1
    assert bias_correction
    for gradient, weight, mean, square in zip(*lists, strict=True):
        mean.lerp_(gradient.float(), 1 - beta1)
        square.mul_(beta2).addcmul_(gradient.float(), gradient.float(), value=1 - beta2)
        root = (square / (1 - beta2**step)).sqrt() + eps
        weight.sub_(lr * (mean / (1 - beta1**step) / root + weight_decay * weight))


class _Missing:
    """A replacement of an enum or class that Python code only names. Calling it raises an error."""

    def __init__(self, name: str):
        self.name = name

    def __getattr__(self, name: str) -> "_Missing":
        if name.startswith("__"):
            raise AttributeError(name)
        return _Missing(f"{self.name}.{name}")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"transformer_engine_torch.{self.name} has no stand-in")

    def __int__(self) -> int:  # of enums whose numbers mean nothing here
        return 0

    def __or__(self, other: Any) -> Any:  # in annotations
        return Any

    __ror__ = __or__


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return _Missing(name)
