"""Combine a kernel's attention to a prefix with a few additional keys per query, without a mask.

If the kernel returns a query's log-sum-exp, the additional keys can be merged afterwards:

    lse = log(exp(lse of the prefix) + sum of exp(additional score))
    out = exp(lse of the prefix - lse) * out of the prefix + sum of exp(additional score - lse) * additional value

The kernel's backward pass uses `out` and `lse`. Called with the merged `out` and `lse`, the backward pass computes the
correct gradients of the prefix. Without additional keys, the result is that of the kernel alone. A sink (`sinks.py`) is
an additional key with the same score for all queries of a head, and the value 0.

Shapes: T queries of all segments, K keys of all segments, N query heads, G key-value heads, D head size.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable


@dataclass(frozen=True)
class PrefixKernel:
    """Forward and backward function of an attention kernel over segments.

    The last query of a segment sees the segment's last key.

    Attributes:
        forward: maps (query_TND, key_KGD, value_KGD, cu_q, cu_k, longest_q, longest_k, scale) to out_TND and lse [N, T]
            in float32.
        backward: maps (gradient of out, query, key, value, out, lse, cu_q, cu_k, longest_q, longest_k, scale) to the
            gradients of query, key and value.

    Both accept a keyword argument `window`, the number of keys that a query sees; default: all.
    """

    forward: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    backward: Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]]

    def with_window(self, window: int | None) -> "PrefixKernel":
        """Return the kernel for attention with a window."""
        if window is None:
            return self
        return PrefixKernel(partial(self.forward, window=window), partial(self.backward, window=window))


class Slice(NamedTuple):
    """Consecutive queries of a row, and the consecutive keys that they see. The last query sees the last key."""

    queries: slice
    keys: slice
    places: tuple[Any, ...]


def in_slices(kernel: PrefixKernel, slices: Sequence[Slice]) -> PrefixKernel:
    """Return a kernel that calls `kernel` for each slice.

    The returned kernel ignores its arguments cu_q, cu_k, longest_q and longest_k. A key can belong to several slices;
    its gradients are summed.

    Args:
        slices: cover all queries in order; within a sequence, each slice sees a longer prefix of keys than the slice
            before.
    """

    def forward(query_TND, key_KGD, value_KGD, scale):
        out_TND = query_TND.new_empty(*query_TND.shape[:2], value_KGD.size(-1))
        sums = []
        for queries, keys, places in slices:
            seen = key_KGD[keys], value_KGD[keys]
            out_TND[queries], lse_NT = kernel.forward(query_TND[queries], *seen, *places, scale)
            sums.append(lse_NT)
        return out_TND, torch.cat(sums, dim=1)

    def backward(grad_TND, query_TND, key_KGD, value_KGD, out_TND, lse_NT, scale):
        grad_query, grad_row = torch.empty_like(query_TND), [torch.empty_like(key_KGD), torch.empty_like(value_KGD)]
        filled = len(key_KGD)  # keys from this index on have a gradient already
        # The last slice sees the longest prefix: it sets the gradients to which the slices before it add.
        for queries, keys, places in reversed(slices):
            own = (tensor[queries] for tensor in (grad_TND, query_TND))
            seen = (tensor[keys] for tensor in (key_KGD, value_KGD))
            lse = lse_NT[:, queries].contiguous()
            grad_query[queries], *grads_seen = kernel.backward(*own, *seen, out_TND[queries], lse, *places, scale)
            is_first = keys.stop <= filled
            for grad_keys, part in zip(grad_row, grads_seen, strict=True):
                if is_first:
                    # Keys that no slice sees, such as those behind this rank's last query.
                    grad_keys[keys.stop : filled] = 0
                    grad_keys[keys] = part
                else:
                    grad_keys[keys] += part
            filled = min(filled, keys.start)
        for grad_keys in grad_row:
            grad_keys[:filled] = 0
        grad_key, grad_value = grad_row
        return grad_query, grad_key, grad_value

    return PrefixKernel(forward, backward)


def attend(
    kernel: PrefixKernel,
    query_TND: torch.Tensor,
    key_KGD: torch.Tensor,
    value_KGD: torch.Tensor,
    places: Sequence[Any],
    own_keys: Sequence[torch.Tensor],
    own_values: Sequence[torch.Tensor],
    scale: float,
    sinks_N: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return attention [T, N, D] to the keys of the kernel and the additional keys.

    Args:
        places: arguments cu_q, cu_k, longest_q and longest_k of the kernel.
        own_keys, own_values: additional keys and values, [T, G, D] each; each query sees only the additional keys with
            its own index.
        sinks_N: score of each head's sink; None without sinks.
    """
    return _Merged.apply(kernel, places, scale, sinks_N, query_TND, key_KGD, value_KGD, *own_keys, *own_values)  # type: ignore[return-value]


class _Merged(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx,
        kernel: PrefixKernel,
        places: Sequence[Any],
        scale: float,
        sinks_N: torch.Tensor | None,
        query_TND: torch.Tensor,
        key_KGD: torch.Tensor,
        value_KGD: torch.Tensor,
        *own: torch.Tensor,
    ) -> torch.Tensor:
        out_TND, lse_NT = kernel.forward(query_TND, key_KGD, value_KGD, *places, scale)
        lse_TN = lse_NT.mT
        if own or sinks_N is not None:
            out_TND, lse_TN = _merge(out_TND, lse_TN, query_TND, own, sinks_N, scale)
        ctx.save_for_backward(query_TND, key_KGD, value_KGD, out_TND, lse_TN, sinks_N, *own)
        ctx.kernel, ctx.places, ctx.scale = kernel, places, scale
        return out_TND

    @staticmethod
    @once_differentiable
    def backward(ctx, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query_TND, key_KGD, value_KGD, out_TND, lse_TN, sinks_N, *own = ctx.saved_tensors
        grad_TND = grad_outputs[0].contiguous()
        grad_query, grad_key, grad_value = ctx.kernel.backward(
            grad_TND, query_TND, key_KGD, value_KGD, out_TND, lse_TN.mT.contiguous(), *ctx.places, ctx.scale
        )
        if not own and sinks_N is None:
            return None, None, None, None, grad_query, grad_key, grad_value
        wide_query, wide_grad = query_TND.to(lse_TN.dtype), grad_TND.to(lse_TN.dtype)
        # The sum over all keys of share and gradient of the share, as in FlashAttention ("delta").
        shared_TN = (wide_grad * out_TND).sum(-1)
        grad_sinks = None
        if sinks_N is not None:
            # A sink has the value 0, so only its part in the normalization is left.
            grad_sinks = -((sinks_N - lse_TN).exp() * shared_TN).sum(0).to(sinks_N.dtype)
        # The gradients of all keys are summed before they are rounded.
        grad_query = grad_query.to(lse_TN.dtype)
        keys, values = own[: len(own) // 2], own[len(own) // 2 :]
        grad_keys, grad_values = [], []
        for key_TGD, value_TGD in zip(keys, values, strict=True):
            share_TN = (_scores(query_TND, key_TGD, ctx.scale) - lse_TN).exp()
            grad_share = (wide_grad * _per_head(value_TGD, query_TND)).sum(-1)
            grad_score = (share_TN * (grad_share - shared_TN) * ctx.scale)[..., None]
            grad_query += grad_score * _per_head(key_TGD, query_TND)
            grad_keys.append(_per_group(grad_score * wide_query, key_TGD))
            grad_values.append(_per_group(share_TN[..., None] * wide_grad, value_TGD))
        grad_prefix = grad_query.to(query_TND.dtype), grad_key, grad_value
        return None, None, None, grad_sinks, *grad_prefix, *grad_keys, *grad_values


def _merge(
    prefix_TND: torch.Tensor,
    prefix_TN: torch.Tensor,
    query_TND: torch.Tensor,
    own: Sequence[torch.Tensor],
    sinks_N: torch.Tensor | None,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the merged output and the log-sum-exp [T, N].

    Args:
        prefix_TND, prefix_TN: output and log-sum-exp of the attention to the prefix.
        own: additional keys, then values.
        sinks_N: score of each head's sink; None without sinks.
    """
    keys, values = own[: len(own) // 2], own[len(own) // 2 :]
    scores = [_scores(query_TND, key_TGD, scale) for key_TGD in keys]
    sinks = [] if sinks_N is None else [sinks_N.to(prefix_TN.dtype).expand_as(prefix_TN)]
    lse_TN = torch.logsumexp(torch.stack([prefix_TN, *scores, *sinks]), dim=0)
    merged_TND = prefix_TND * (prefix_TN - lse_TN).exp()[..., None]
    for score_TN, value_TGD in zip(scores, values, strict=True):
        merged_TND += (score_TN - lse_TN).exp()[..., None] * _per_head(value_TGD, query_TND)
    return merged_TND.to(query_TND.dtype), lse_TN


def _scores(query_TND: torch.Tensor, key_TGD: torch.Tensor, scale: float) -> torch.Tensor:
    """Return [T, N], at least in float32: the score of each query with the key at the same index."""
    product = query_TND * _per_head(key_TGD, query_TND)
    return product.to(torch.promote_types(product.dtype, torch.float32)).sum(-1) * scale


def _per_head(shared_TGD: torch.Tensor, query_TND: torch.Tensor) -> torch.Tensor:
    """Return [T, N, D], at least in float32: for each query head, the key or value of the head's group."""
    wide = shared_TGD.to(torch.promote_types(shared_TGD.dtype, torch.float32))
    return wide.repeat_interleave(query_TND.size(1) // shared_TGD.size(1), dim=1)


def _per_group(heads_TND: torch.Tensor, like_TGD: torch.Tensor) -> torch.Tensor:
    """Return [T, G, D]: gradients summed over the query heads of each group."""
    return heads_TND.unflatten(1, (like_TGD.size(1), -1)).sum(2).to(like_TGD.dtype)
