"""Attention with sinks for rows that are not packed; `merged_attention.py` computes packed rows.

A sink is a trained score per head that takes part in the softmax, but has no value:

    out = sum of exp(score) * value / (sum of exp(score) + exp(sink))

It is therefore an additional key with the value 0, and `merged_attention.py` adds it to the result of a kernel. On a
CPU the kernel is that of torch's scaled_dot_product_attention, called directly, because only the direct call returns
the log-sum-exp.

Shapes: B rows, N query heads, G key-value heads, S queries, K keys, D head size, T tokens of all rows.
"""

import torch

from swiftlite.model.attention.head_size import fill_values_in_halves
from swiftlite.model.attention.merged_attention import PrefixKernel, attend


def attend_with_sinks(
    query_BNSD: torch.Tensor,
    key_BGKD: torch.Tensor,
    value_BGKD: torch.Tensor,
    sinks_N: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
) -> torch.Tensor:
    """Return attention [B, N, S, D].

    Args:
        mask: True for visible keys, or added to the scores; can be broadcast to [B, N, S, K]. None: causal attention of
            as many queries as keys.
    """
    if mask is not None and mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=query_BNSD.dtype).masked_fill(~mask, -torch.inf)
    if query_BNSD.device.type != "cpu":
        return _plain(query_BNSD, key_BGKD, value_BGKD, sinks_N, mask, scale)
    kernel = fill_values_in_halves(_cpu_kernel(len(query_BNSD), mask))
    query, key, value = (_tokens(rows) for rows in (query_BNSD, key_BGKD, value_BGKD))
    return _rows(attend(kernel, query, key, value, (), (), (), scale, sinks_N), len(query_BNSD))


def _plain(
    query_BNSD: torch.Tensor,
    key_BGKD: torch.Tensor,
    value_BGKD: torch.Tensor,
    sinks_N: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
) -> torch.Tensor:
    """Compute `attend_with_sinks` with all scores in memory."""
    num_queries, num_keys = query_BNSD.size(2), key_BGKD.size(2)
    if mask is None:
        is_seen = torch.ones(num_queries, num_keys, dtype=torch.bool, device=query_BNSD.device).tril()
        mask = torch.zeros_like(is_seen, dtype=query_BNSD.dtype).masked_fill(~is_seen, -torch.inf)
    repeats = query_BNSD.size(1) // key_BGKD.size(1)
    key, value = (rows.repeat_interleave(repeats, dim=1) for rows in (key_BGKD, value_BGKD))
    scores = (query_BNSD @ key.mT * scale + mask).float()
    sinks = sinks_N.float()[:, None, None].expand(*scores.shape[:3], 1)
    # The share of the sink is dropped, because its value is 0.
    shares = torch.cat([scores, sinks], dim=-1).softmax(dim=-1)[..., :-1]
    return shares.to(value.dtype) @ value


def _cpu_kernel(num_rows: int, mask: torch.Tensor | None) -> PrefixKernel:
    """Return torch's kernel for rows of equal length, with tokens [T, N, D] as inputs and outputs."""
    options = {"attn_mask": mask}
    is_causal = mask is None

    def forward(query_TND, key_KGD, value_KGD, scale):
        rows = (_rows(tokens, num_rows) for tokens in (query_TND, key_KGD, value_KGD))
        out, lse_BNS = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            *rows, 0.0, is_causal, scale=scale, **options
        )
        # [N, T], as `PrefixKernel` requires.
        return _tokens(out), lse_BNS.transpose(0, 1).flatten(1)

    def backward(grad_TND, query_TND, key_KGD, value_KGD, out_TND, lse_NT, scale):
        rows = (_rows(tokens, num_rows) for tokens in (grad_TND, query_TND, key_KGD, value_KGD, out_TND))
        lse_BNS = lse_NT.unflatten(1, (num_rows, -1)).transpose(0, 1).contiguous()
        grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *rows, lse_BNS, 0.0, is_causal, scale=scale, **options
        )
        grad_query, grad_key, grad_value = map(_tokens, grads)
        return grad_query, grad_key, grad_value

    return PrefixKernel(forward, backward)


def _tokens(rows_BNSD: torch.Tensor) -> torch.Tensor:
    """Concatenate rows: [T, N, D]."""
    return rows_BNSD.transpose(1, 2).flatten(0, 1)


def _rows(tokens_TND: torch.Tensor, num_rows: int) -> torch.Tensor:
    """Invert `_tokens`: [B, N, S, D]."""
    return tokens_TND.unflatten(0, (num_rows, -1)).transpose(1, 2)
