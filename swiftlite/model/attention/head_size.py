"""Pad values with zeros for kernels that require keys and values of equal size.

Shapes: as in merged_attention.py, but the head size of values and results can differ from that of queries and keys.
"""

from collections.abc import Callable, Collection
from typing import Any

import torch
import torch.nn.functional as F

from swiftlite.model.attention.merged_attention import PrefixKernel

Sizes = tuple[int, int]
"""Head sizes of a key and of a value."""


def fill_values(kernel: Callable[..., Any], others: Collection[Sizes] = ()) -> Callable[..., Any]:
    """Return a `kernels.varlen_kernel` that supports values of any size up to the size of keys.

    Args:
        others: pairs (key size, value size) with unequal sizes that `kernel` supports without padding.
    """

    def filled(query_TND: torch.Tensor, key_KGD: torch.Tensor, value_KGD: torch.Tensor, *places: Any, **options: Any):
        value_size = value_KGD.size(-1)
        value_KGD = _as_wide(value_KGD, key_KGD, others)
        return kernel(query_TND, key_KGD, value_KGD, *places, **options)[..., :value_size]

    return filled


def fill_values_in_halves(kernel: PrefixKernel, others: Collection[Sizes] = ()) -> PrefixKernel:
    """Return a `PrefixKernel` that supports values of any size up to the size of keys, like `fill_values`.

    The tensors that are stored for the backward pass are not padded.
    """

    def forward(query_TND, key_KGD, value_KGD, *rest, **options):
        out_TND, lse_NT = kernel.forward(query_TND, key_KGD, _as_wide(value_KGD, key_KGD, others), *rest, **options)
        return out_TND[..., : value_KGD.size(-1)], lse_NT

    def backward(grad_TND, query_TND, key_KGD, value_KGD, out_TND, *rest, **options):
        value_size = value_KGD.size(-1)
        # Zeros change none of the kernel's products over the channels of values.
        wide_grad, wide_value, wide_out = (_as_wide(t, key_KGD, others) for t in (grad_TND, value_KGD, out_TND))
        grad_query, grad_key, grad_value = kernel.backward(
            wide_grad, query_TND, key_KGD, wide_value, wide_out, *rest, **options
        )
        return grad_query, grad_key, grad_value[..., :value_size]

    return PrefixKernel(forward, backward)


def _as_wide(values: torch.Tensor, keys: torch.Tensor, others: Collection[Sizes]) -> torch.Tensor:
    sizes = keys.size(-1), values.size(-1)
    missing = sizes[0] - sizes[1]
    if not missing or sizes in others:
        return values
    return F.pad(values, (0, missing))
