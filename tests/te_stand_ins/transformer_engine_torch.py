"""What Transformer Engine's compiled extension computes, in torch: the few of its 177 functions that linear layers,
RMSNorm and unfused attention call in float32 and bfloat16. All else raises as soon as it is asked for.

Signatures are those of the calls in the wheel's Python (transformer_engine/pytorch, 2.20.2); functions named by a file
there. tests/te_stand_ins/__init__.py puts this module in the extension's place.
"""

import enum
from typing import Any

import torch


class DType(enum.Enum):
    """As in the C++ header; transformer_engine.pytorch.constants compares the names."""

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


class NVTE_Fused_Attn_Backend(enum.Enum):
    """As in the C++ header; cpp_extensions/fused_attn.py compares the names."""

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
    """cpp_extensions/gemm.py. cuBLAS counts columns first: of row-major tensors this is op(B) @ op(A). With `grad` the
    bias is not added: its gradient, the sum of B, is the second result."""
    assert quantizer is None
    assert not gelu
    assert alpha == 1.0
    first = B.flatten(0, -2) if not transb else B.flatten(0, -2).t()
    second = A.flatten(0, -2).t() if transa else A.flatten(0, -2)
    bias_grad = None
    if grad and bias is not None:
        bias_grad = B.flatten(0, -2).sum(0)
    if bias is not None and not grad:  # rounded once, as in one kernel
        product = torch.nn.functional.linear(first, second.t(), bias)
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
    """ops/basic/rmsnorm.py. Everything in float32, rounded once."""
    x_fp32 = x.float()
    rstd = torch.rsqrt(x_fp32.pow(2).mean(-1) + eps)
    gamma = weight.float() + (1.0 if zero_centered else 0.0)
    return (x_fp32 * rstd[..., None] * gamma).to(x.dtype), None, rstd


def rmsnorm_bwd(
    dy: torch.Tensor, x: torch.Tensor, rstd: torch.Tensor, weight: torch.Tensor, sm_margin: int, zero_centered: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """ops/basic/rmsnorm.py."""
    gamma = weight.float() + (1.0 if zero_centered else 0.0)
    normed = x.float() * rstd[..., None]
    dnormed = dy.float() * gamma
    dx = (dnormed - normed * (dnormed * normed).mean(-1, keepdim=True)) * rstd[..., None]
    return dx.to(x.dtype), (dy.float() * normed).flatten(0, -2).sum(0).to(weight.dtype)


def convert_thd_to_bshd(tensor: torch.Tensor, cu_seqlens: torch.Tensor, batch: int, longest: int) -> torch.Tensor:
    """attention/dot_product_attention/backends.py: sequences side by side, zeros behind them."""
    out = tensor.new_zeros(batch, longest, *tensor.shape[1:])
    for row, sequence in enumerate(tensor.split(cu_seqlens.diff().tolist())):
        out[row, : len(sequence)] = sequence
    return out


def convert_bshd_to_thd(tensor: torch.Tensor, cu_seqlens: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """The inverse."""
    lengths = cu_seqlens.diff().tolist()
    return torch.cat([row[:length] for row, length in zip(tensor, lengths, strict=True)])


def multi_tensor_l2norm(
    chunk: int, overflow: torch.Tensor, lists: list[list[torch.Tensor]], per_tensor: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """optimizers/multi_tensor_apply.py."""
    (tensors,) = lists
    norms = torch.stack([tensor.float().norm() for tensor in tensors])
    return norms.norm().reshape(1), norms


def multi_tensor_scale(
    chunk: int, overflow: torch.Tensor, lists: list[list[torch.Tensor]], scale: float | torch.Tensor
) -> None:
    """optimizers/multi_tensor_apply.py; sources, then where they go."""
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
    """optimizers/fused_adam.py; AdamW (mode 1), with gradients, weights, both moments in float32."""
    assert mode == 1
    assert bias_correction
    for gradient, weight, mean, square in zip(*lists, strict=True):
        mean.lerp_(gradient.float(), 1 - beta1)
        square.mul_(beta2).addcmul_(gradient.float(), gradient.float(), value=1 - beta2)
        root = (square / (1 - beta2**step)).sqrt() + eps
        weight.sub_(lr * (mean / (1 - beta1**step) / root + weight_decay * weight))


class _Missing:
    """Of an enum or class that Python only names; whoever calls it asks for more than stands here."""

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
