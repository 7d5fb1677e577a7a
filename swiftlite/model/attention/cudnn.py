"""Causal attention with cuDNN: of long sequences through torch's scaled_dot_product_attention, and of all sequences of
a packed row in one call through the package nvidia-cudnn-frontend.

torch 2.13 prefers FlashAttention 2 on Hopper, which reaches about half of cuDNN's operations per second there
(pytorch/pytorch#142132). Its `varlen_attn` never uses cuDNN (`_should_use_cudnn` in torch/nn/attention/varlen.py).
cuDNN builds a plan for each new shape, which takes about half a second per direction. So lengths are rounded up to one
of 16 per doubling, and decoding, where each step has another length, never uses cuDNN.

Shapes: S sequence, T tokens of a packed row, B batch, N query heads, G key-value heads, D head size.
"""

from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from itertools import accumulate
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from swiftlite.runtime.device import on_device

LEAST = 512
"""Minimum length of a sequence: shorter ones are computed faster than plans for their lengths are built."""
CUDNN_FIRST = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]
"""torch takes the first one that supports the shapes, the precision and the GPU."""
WITHOUT_CUDNN = CUDNN_FIRST[1:]


def rounded(length: int) -> int:
    """Return the smallest length with a plan that is not shorter; for example 2,048, 2,176, ..., 4,096, 4,352."""
    step = max(128, 2 ** (length.bit_length() - 5))
    return -(-length // step) * step


def attend(query_SBND: torch.Tensor, key_SBGD: torch.Tensor, value_SBGD: torch.Tensor, scale: float) -> torch.Tensor:
    """Return causal attention [S, B, N, D] of sequences whose queries and keys have the same positions.

    The added positions are at the end, where no query of the sequence sees them.
    """
    length = query_SBND.size(0)
    added = rounded(length) - length
    tensors = (query_SBND, key_SBGD, value_SBGD)
    query, key, value = (with_zeros(tensor, added).permute(1, 2, 0, 3) for tensor in tensors)
    with sdpa_kernel(CUDNN_FIRST, set_priority=True):
        out_BNSD = F.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scale, enable_gqa=query.size(1) != key.size(1)
        )
    return out_BNSD.permute(2, 0, 1, 3)[:length]


class Places(NamedTuple):
    """The sequences of a packed row, in a form for which cuDNN needs few plans.

    Attributes:
        added: number of tokens after the row, which are a sequence of their own.
        starts: start of each sequence and the end of the last one, int32, on the device. The last ones are empty.
        longest: at least the length of each sequence.
    """

    added: int
    starts: torch.Tensor
    longest: int


@lru_cache(maxsize=16)  # every layer calls it for the row of the micro-batch
def places(lengths: tuple[int, ...], device: torch.device) -> Places:
    """Return the `Places` of sequences of these lengths.

    A plan depends on the number of tokens, which is rounded up, and on the number of sequences and the length of the
    longest one, which are powers of 2.
    """
    added = rounded(sum(lengths)) - sum(lengths)
    if added:
        lengths = (*lengths, added)
    starts = [0, *accumulate(lengths)]
    empty = power_of_two(len(lengths)) - len(lengths)
    starts += starts[-1:] * empty
    return Places(added, on_device(torch.tensor(starts, dtype=torch.int32), device), power_of_two(max(lengths)))


def attend_packed(
    query_TND: torch.Tensor, key_TGD: torch.Tensor, value_TGD: torch.Tensor, lengths: tuple[int, ...], scale: float
) -> torch.Tensor:
    """Return causal attention [T, N, D] of all sequences of a packed row, whose lengths are given, in one call.

    Raises:
        ImportError: nvidia-cudnn-frontend is not installed; `plan.kernels.choose` checks this earlier.
    """
    from cudnn import sdpa_torch  # pyright: ignore[reportAttributeAccessIssue]: the package, not this module

    added, starts, longest = places(lengths, query_TND.device)
    query, key, value = (with_zeros(tensor, added) for tensor in (query_TND, key_TGD, value_TGD))
    sequences = {"cu_seqlens_q": starts, "cu_seqlens_kv": starts, "max_seqlen_q": longest, "max_seqlen_kv": longest}
    # Autograd requires the log-sum-exp.
    out_TND, _ = sdpa_torch(query, key, value, scale=scale, is_causal=True, return_lse=True, **sequences)
    return out_TND[: len(query_TND)]


def power_of_two(number: int) -> int:
    """Return the smallest power of 2 that is not smaller than a positive number."""
    return 1 << (number - 1).bit_length()


def with_zeros(tensor: torch.Tensor, number: int) -> torch.Tensor:
    """Append zeros in the first dimension. Without any, `F.pad` would copy the tensor."""
    if not number:
        return tensor
    return F.pad(tensor, (0, 0) * (tensor.dim() - 1) + (0, number))


def excluded(device: torch.device) -> AbstractContextManager[Any]:
    """Return a context in which torch computes no attention with cuDNN, which it prefers on Blackwell."""
    if device.type != "cuda":
        return nullcontext()  # the other takes as long as a small layer
    return sdpa_kernel(WITHOUT_CUDNN)
