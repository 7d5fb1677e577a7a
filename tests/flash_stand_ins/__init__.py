"""Run the Python code of flash-attn, of nvidia-cudnn-frontend and of torch's varlen attention on a CPU, with compiled
parts replaced by torch code.

Tests with these stand-ins check how the packages are called, and what is done with their results and gradients. They do
not test the kernels. The packages are in a separate directory, because other packages would use flash-attn if it could
be imported.
"""

import importlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

SITE = Path(os.environ.get("SWIFTLITE_FLASH_SITE", Path(sys.prefix) / "flash"))


def missing(package: str = "flash_attn") -> str:
    """Return why the Python code of a package cannot be used here; "" if it can."""
    return "" if (SITE / package).is_dir() else f"{package} is not in {SITE} (requirements/flash.txt)"


def install() -> None:
    """Make flash-attn's package work in this process, permanently."""
    sys.path.append(str(SITE))
    sys.modules["flash_attn_2_cuda"] = SimpleNamespace(  # type: ignore[assignment]
        varlen_fwd=varlen_fwd, varlen_bwd=varlen_bwd, fwd=None, bwd=None, fwd_kvcache=None
    )
    from flash_attn import flash_attn_interface  # pyright: ignore[reportMissingImports]

    for name in ("_flash_attn_varlen_forward", "_flash_attn_varlen_backward"):
        operation = getattr(flash_attn_interface, name)
        operation.register_kernel("cpu")(operation._init_fn)


def segments(query, key, value, cu_q, cu_k) -> Iterator[tuple[slice, slice, tuple[torch.Tensor, ...]]]:
    """Yield, for each sequence, the slices of its queries and keys, and queries, keys and values [heads, S, size].

    They are at least float32, and keys are repeated for the queries that share them.
    """
    for ends in zip(cu_q.tolist(), cu_q[1:].tolist(), cu_k.tolist(), cu_k[1:].tolist(), strict=False):
        of_q, of_k = slice(*ends[:2]), slice(*ends[2:])
        q, k, v = query[of_q], key[of_k], value[of_k]
        repeats = q.size(1) // k.size(1)
        k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
        wide = torch.promote_types(q.dtype, torch.float32)
        yield of_q, of_k, tuple(t.to(wide).transpose(0, 1) for t in (q, k, v))


def scores(q: torch.Tensor, k: torch.Tensor, scale: float, left: int) -> torch.Tensor:
    """Return scores; -inf for keys that a query does not see. It sees `left` keys before its own; -1: all."""
    own = k.size(1) - q.size(1)
    allowed = torch.ones(q.size(1), k.size(1), dtype=torch.bool).tril(own)
    if left >= 0:
        allowed = allowed.triu(own - left)
    return (q @ k.mT * scale).masked_fill(~allowed, float("-inf"))


def forward(query, key, value, cu_q, cu_k, scale: float, left: int = -1) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the output [T, heads, size], and the log-sum-exp [heads, T]."""
    assert query.size(-1) == key.size(-1) == value.size(-1) <= 256
    assert cu_q.dtype == cu_k.dtype == torch.int32
    outs, sums = [], []
    for _, _, (q, k, v) in segments(query, key, value, cu_q, cu_k):
        of_pairs = scores(q, k, scale, left)
        outs.append((of_pairs.softmax(-1) @ v).transpose(0, 1))
        sums.append(of_pairs.logsumexp(-1))
    return torch.cat(outs).to(query.dtype), torch.cat(sums, 1)


def backward(grad, query, key, value, out, sums, cu_q, cu_k, scale: float, left: int = -1) -> list[torch.Tensor]:
    """Compute gradients as the kernels do, from `out` and `sums`."""
    found: list[list[torch.Tensor]] = [[], [], []]
    for of_q, _, (q, k, v) in segments(query, key, value, cu_q, cu_k):
        of_out, done = grad[of_q].to(q.dtype).transpose(0, 1), out[of_q].to(q.dtype).transpose(0, 1)
        p = (scores(q, k, scale, left) - sums[:, of_q, None]).exp()
        of_scores = p * (of_out @ v.mT - (of_out * done).sum(-1, keepdim=True)) * scale
        for place, part in zip(found, (of_scores @ k, of_scores.mT @ q, p.mT @ of_out), strict=True):
            place.append(part.transpose(0, 1))
    grad_query, grad_key, grad_value = map(torch.cat, found)
    grad_key, grad_value = (t.unflatten(1, (key.size(1), -1)).sum(2) for t in (grad_key, grad_value))
    return [grad_query.to(query.dtype), grad_key.to(key.dtype), grad_value.to(value.dtype)]


def varlen_fwd(query, key, value, out, cu_q, cu_k, *others: Any):
    """Replace flash-attn's forward function (flash_attn_interface.py:165 of 2.8.3)."""
    *_, longest_q, longest_k, dropout, scale, _, causal, left, right, _, _, _ = others
    assert (longest_q, longest_k) == (cu_q.diff().max(), cu_k.diff().max())
    assert causal
    assert (right, dropout) == (-1 if left == -1 else 0, 0.0)
    result, sums = forward(query, key, value, cu_q, cu_k, scale, left)
    return result, sums, torch.empty(0), torch.empty(2, dtype=torch.int64)


def varlen_bwd(grad, query, key, value, out, sums, dq, dk, dv, cu_q, cu_k, *others: Any):
    """Replace flash-attn's backward function (flash_attn_interface.py:362)."""
    _, _, _, _, scale, _, causal, left, *_ = others
    assert causal
    grads = backward(grad, query, key, value, out, sums, cu_q, cu_k, scale, left)
    for place, found in zip((dq, dk, dv), grads, strict=True):
        place.copy_(found)
    return dq, dk, dv, torch.empty(0)


def aten_forward(query, key, value, cu_q, cu_k, *others: Any, scale: float, **options: Any):
    """Replace torch's operation that varlen_attn calls."""
    out, sums = forward(query, key, value, cu_q, cu_k, scale, options.get("window_size_left", -1))
    seed = torch.zeros(2, dtype=torch.uint64)
    return out, sums, seed, seed[:0], query.new_zeros(0)


def aten_backward(grad, query, key, value, out, sums, cu_q, cu_k, *others: Any, scale: float, **options: Any):
    left = options.get("window_size_left", -1)
    return tuple(backward(grad, query, key, value, out, sums, cu_q, cu_k, scale, left))


def torch_on_cpu() -> torch.library.Library:
    """Register torch's two operations for the CPU until the returned library is destroyed."""
    library = torch.library.Library("aten", "IMPL")
    library.impl("_flash_attention_forward", aten_forward, "CPU")
    library.impl("_flash_attention_backward", aten_backward, "CPU")
    return library


def cudnn_on_cpu() -> torch.library.Library:
    """Make nvidia-cudnn-frontend importable in this process, permanently, and register its two operations for the CPU
    until the returned library is destroyed.
    """
    sys.path.append(str(SITE))
    importlib.import_module("cudnn.sdpa.fwd.torch_op")  # which defines the operations
    library = torch.library.Library("cudnn", "IMPL")
    library.impl("sdpa_fwd", cudnn_forward, "CPU")
    library.impl("sdpa_bwd", cudnn_backward, "CPU")
    return library


def cudnn_forward(query, key, value, scale, *others: Any):
    """Replace cuDNN's forward pass over packed rows (cudnn/sdpa/fwd/torch_op.py of 1.32.0).

    torch drops arguments at the end that have their default value, such as `return_lse`.
    """
    *mask, lengths_q, lengths_k, starts, starts_k, longest, longest_k = others
    assert (lengths_q, lengths_k) == (None, None)
    check_sequences(query, mask, starts, starts_k, longest, longest_k)
    out, sums = forward(query, key, value, starts, starts, scale)
    return out, sums.T[..., None].contiguous()


def cudnn_backward(grad, query, key, value, out, sums_BNS1, scale, *others: Any):
    """Replace cuDNN's backward pass, which reads the log-sum-exp of each sequence [B, heads, longest, 1]."""
    *mask, starts, starts_k, longest, longest_k = others
    check_sequences(query, mask, starts, starts_k, longest, longest_k)
    parts = zip(sums_BNS1.squeeze(-1), starts.diff().tolist(), strict=True)
    sums = torch.cat([of_sequence[:, :length] for of_sequence, length in parts], 1)
    return tuple(backward(grad, query, key, value, out, sums, starts, starts, scale))


def check_sequences(query, mask, starts, starts_k, longest: int, longest_k: int) -> None:
    """Check that attention is causal from the first query and key on, without windows and sinks, and that queries and
    keys have the same sequences, which cover all tokens.
    """
    assert mask == [True, False, -1, -1, None]
    assert starts.dtype is torch.int32
    assert torch.equal(starts, starts_k)
    assert starts[-1] == len(query)
    assert 0 < starts.diff().max() <= longest == longest_k
