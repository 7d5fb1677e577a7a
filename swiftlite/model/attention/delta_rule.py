"""Compute the gated delta rule, the recurrence of linear attention.

The recurrence is computed in torch or with the CUDA kernels of flash-linear-attention.

A head has a state S [D, E] that maps keys to values. Each token does three things: it decays the state, it corrects the
value that the state returns for the token's key k, and it reads the state with the token's query q:

    S = exp(g) S
    S = S + beta * k (v - k S)
    out = q S

Processing tokens one by one is slow, so tokens are processed in chunks of C tokens. The corrections within a chunk are
the solution of a triangular system (the WY form in Yang et al., Gated Delta Networks, 2024). The systems of all chunks
are solved at once; only the state is passed from chunk to chunk (`chunks.py`).

Shapes: T tokens of all sequences, M chunks, C tokens of a chunk, N heads, D key channels, E value channels.
"""

import importlib.util
from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from itertools import accumulate
from typing import Any

import torch
from packaging.version import Version

from swiftlite.base.log import logger
from swiftlite.model.attention.chunks import chunks_of
from swiftlite.runtime.device import on_device


def gated_delta_rule(
    query_TND: torch.Tensor,
    key_TND: torch.Tensor,
    value_TNE: torch.Tensor,
    log_decay_TN: torch.Tensor,
    beta_TN: torch.Tensor,
    lengths: Sequence[int],
    states: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute in float32 the output of each token and the final state of each sequence.

    Args:
        query_TND: queries of concatenated sequences.
        log_decay_TN: g, at most 0.
        beta_TN: weight of the correction, from 0 to 1.
        lengths: lengths of the sequences; their sum is T.
        states: [number of sequences, N, D, E], initial states; default: zeros.

    Returns:
        Outputs [T, N, E] in the dtype of the values, and final states [number of sequences, N, D, E] in float32.
    """
    # In float32 the kernels round to tf32, which has 10 bits: 1.8e-4 of the largest logit on an H200.
    has_kernel_dtype = query_TND.is_cuda and value_TNE.dtype is not torch.float32
    if has_kernel_dtype and (kernel := cuda_kernel()) is not None:
        return by_kernel(kernel, query_TND, key_TND, value_TNE, log_decay_TN, beta_TN, lengths, states)
    chunks = chunks_of(tuple(lengths), query_TND.device)
    query, key, value, decay, beta = (
        chunks.take(tensor) for tensor in (query_TND, key_TND, value_TNE, log_decay_TN, beta_TN)
    )
    # [M, N, C]: log of the decay from the beginning of the chunk up to and including each token.
    faded = decay.cumsum(dim=-1)
    # [M, N, C, C]: decay from token j to token i; 0 if j is after i.
    # The first `tril` because above the diagonal, exp can be infinite, and its gradient 0 * inf NaN.
    left = (faded[..., :, None] - faded[..., None, :]).tril().exp().tril()
    # The correction of token i is its value minus the value that the state maps its key to. Each earlier token j of the
    # chunk contributes beta_i * left[i, j] * (k_i k_j) to the latter: a triangular system with ones on the diagonal.
    weighed_key = key * beta[..., None]
    overlap = ((weighed_key @ key.transpose(-1, -2)) * left).tril(-1)
    new_value = _solve(overlap, value * beta[..., None])
    old_key = _solve(overlap, weighed_key * faded.exp()[..., None])
    inside = (query @ key.transpose(-1, -2)) * left
    from_state = query * faded.exp()[..., None]
    to_end = key * (faded[..., -1:] - faded).exp()[..., None]

    def written(turn: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        return new_value[turn] - old_key[turn] @ state

    if states is None:
        states = key.new_zeros(len(lengths), key.size(1), key.size(-1), value.size(-1))
    read, states = chunks.scan(states.float(), faded, from_state, inside, to_end, written)
    return read.to(value_TNE.dtype), states


@cache
def cuda_kernel() -> Callable[..., Any] | None:
    """Return flash-linear-attention's `chunk_gated_delta_rule`; None if it cannot be used on this GPU."""
    try:
        import triton
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule  # pyright: ignore[reportMissingImports]
    except ImportError:
        return None
    has_tilelang = importlib.util.find_spec("tilelang") is not None
    if not has_tilelang and has_wrong_gradients(Version(triton.__version__), torch.cuda.get_device_capability()):
        logger.warning(
            "gated delta nets are computed in torch, because on this GPU the gradients of flash-linear-attention with "
            "Triton %s are wrong; for its faster kernels install tilelang, or Triton 3.7.1 or later",
            triton.__version__,
        )
        return None
    return chunk_gated_delta_rule


def has_wrong_gradients(triton: Version, capability: tuple[int, int]) -> bool:
    """Return whether this release of Triton computes wrong gradients of the gated delta rule on this GPU.

    flash-linear-attention 0.6 raises an error in this case (fla/ops/common/chunk_o.py, issue 640), unless tilelang is
    installed.
    """
    is_hopper = capability[0] == 9
    return is_hopper and Version("3.4.0") <= triton < Version("3.7.1")


def by_kernel(
    kernel: Callable[..., Any],
    query_TND: torch.Tensor,
    key_TND: torch.Tensor,
    value_TNE: torch.Tensor,
    log_decay_TN: torch.Tensor,
    beta_TN: torch.Tensor,
    lengths: Sequence[int],
    states: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute `gated_delta_rule` with a kernel.

    The kernel reads a packed row [1, T, N, *] and the starts of its sequences.
    """
    dtype = value_TNE.dtype
    read, states = kernel(
        query_TND.to(dtype)[None],
        key_TND.to(dtype)[None],
        value_TNE[None],
        g=log_decay_TN[None],
        beta=beta_TN[None],
        # The caller has scaled the queries.
        scale=1.0,
        initial_state=states,
        output_final_state=True,
        cu_seqlens=starts_of(tuple(lengths), query_TND.device),
    )
    assert states is not None
    return read[0], states


@lru_cache(maxsize=16)
def starts_of(lengths: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Return the starts of the sequences, int64 [sequences + 1], on the device. All layers receive the same tensor.

    A copy in each layer would wait for the device. flash-linear-attention also copies the starts to the host, but
    caches the results while it is called with the same tensor object (fla/utils.py, `tensor_cache`).
    """
    return on_device(torch.tensor([0, *accumulate(lengths)], dtype=torch.int64), device)


def _solve(overlap: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    return torch.linalg.solve_triangular(overlap, wanted, upper=False, unitriangular=True)
