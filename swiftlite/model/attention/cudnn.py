"""Attention of long causal sequences with cuDNN, through torch's scaled_dot_product_attention.

torch 2.13 prefers FlashAttention 2 on Hopper, which reaches about half of cuDNN's operations per second there
(pytorch/pytorch#142132). cuDNN builds a plan for each new shape, which takes about half a second per direction. So
lengths are rounded up to one of 16 per doubling, and decoding, where each step has another length, never uses cuDNN.

Shapes: S sequence, B batch, N query heads, G key-value heads, D head size.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

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
    query, key, value = (F.pad(tensor, (0, 0, 0, 0, 0, 0, 0, added)).permute(1, 2, 0, 3) for tensor in tensors)
    with sdpa_kernel(CUDNN_FIRST, set_priority=True):
        out_BNSD = F.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scale, enable_gqa=query.size(1) != key.size(1)
        )
    return out_BNSD.permute(2, 0, 1, 3)[:length]


def excluded(device: torch.device) -> AbstractContextManager[Any]:
    """Return a context in which torch computes no attention with cuDNN, which it prefers on Blackwell."""
    if device.type != "cuda":
        return nullcontext()  # the other takes as long as a small layer
    return sdpa_kernel(WITHOUT_CUDNN)
