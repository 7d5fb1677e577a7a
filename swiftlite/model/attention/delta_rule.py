"""Compute the gated delta rule, the recurrence of linear attention.

The recurrence is computed in torch or with the CUDA kernels of flash-linear-attention.

A head has a state S [D, E] that maps keys to values. Each token does three things: it decays the state, it corrects the
value that the state returns for the token's key k, and it reads the state with the token's query q:

    S = exp(g) S
    S = S + beta * k (v - k S)
    out = q S

Processing tokens one by one is slow, so tokens are processed in chunks of C tokens. The corrections within a chunk are
the solution of a triangular system (the WY form in Yang et al., Gated Delta Networks, 2024). The systems of all chunks
are solved at once; only the state is passed from chunk to chunk. A chunk never contains tokens of two sequences, so
results for packed rows are exact.

Shapes: T tokens of all sequences, M chunks, C tokens of a chunk, N heads, D key channels, E value channels.
"""

import importlib.util
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import accumulate
from typing import Any

import torch
from packaging.version import Version

from swiftlite.base.log import logger
from swiftlite.families.linear_attention import CHUNK
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
    chunks = _chunks(tuple(lengths), query_TND.device)
    query, key, value, decay, beta = (
        chunks.take(tensor) for tensor in (query_TND, key_TND, value_TNE, log_decay_TN, beta_TN)
    )
    # [M, N, C]: log of the decay from the beginning of the chunk up to and including each token.
    faded = decay.cumsum(dim=-1)
    # [M, N, C, C]: decay from token j to token i; 0 if j is after i.
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

    num_heads, key_size, value_size = key.size(1), key.size(-1), value.size(-1)
    if states is None:
        states = key.new_zeros(len(lengths), num_heads, key_size, value_size)
    states = states.float()
    read = []
    for turn, sequences in chunks.turns:
        is_all = len(sequences) == len(lengths)
        state = states
        if not is_all:
            state = states[sequences]
        written = new_value[turn] - old_key[turn] @ state
        read.append(from_state[turn] @ state + inside[turn] @ written)
        fade = faded[turn][..., -1].exp()[..., None, None]
        state = state * fade + to_end[turn].transpose(-1, -2) @ written
        if is_all:
            states = state
        else:
            states = states.index_copy(0, sequences, state)
    return chunks.give_back(torch.cat(read)).to(value_TNE.dtype), states


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


@dataclass(frozen=True)
class _Chunks:
    """The split of sequences into chunks. Turn i of the computation processes chunk i of every sequence that has such a
    chunk.

    Attributes:
        places_MC: index of the token in each slot of each chunk; an empty slot has the index of the chunk's first
            token.
        is_token_MC: whether a slot has a token; None if every slot has one.
        place_T: slot of each token. If tokens were selected with a mask instead, the host would wait for their number.
        turns: for each turn, the chunks that are processed at the same time, and their sequences.
        order_M: position of each chunk in the concatenation of all turns.
    """

    places_MC: torch.Tensor
    is_token_MC: torch.Tensor | None
    place_T: torch.Tensor
    turns: tuple[tuple[torch.Tensor, torch.Tensor], ...]
    order_M: torch.Tensor

    def take(self, tensor_TN: torch.Tensor) -> torch.Tensor:
        """Convert [T, N, ...] to [M, N, C, ...] in float32; empty slots are zeros, which do not change the state."""
        if self.is_token_MC is None:
            if tensor_TN.requires_grad:  # a gradient with another memory layout would be summed in another order
                tensor_TN.register_hook(torch.Tensor.contiguous)
            return tensor_TN.float().unflatten(0, self.places_MC.shape).transpose(1, 2).contiguous()
        taken = tensor_TN[self.places_MC].float()
        is_token = self.is_token_MC.view(*self.is_token_MC.shape, *[1] * (taken.dim() - 2))
        return taken.masked_fill(~is_token, 0.0).transpose(1, 2).contiguous()

    def give_back(self, read: torch.Tensor) -> torch.Tensor:
        """Convert the outputs of all turns [M, N, C, E] to [T, N, E]."""
        out_PNE = read[self.order_M].transpose(1, 2).flatten(0, 1)
        if self.is_token_MC is None:
            return out_PNE
        return out_PNE.index_select(0, self.place_T)


@lru_cache(maxsize=16)  # every layer calls it for the rows of the micro-batch
def _chunks(lengths: tuple[int, ...], device: torch.device) -> _Chunks:
    """Split sequences of these lengths into chunks of CHUNK tokens (or of the longest sequence, if it is shorter).

    Example: sequences of 100 and 30 tokens give chunks of tokens 0 to 63, 64 to 99 and 100 to 129. The first turn
    processes chunks 0 and 2 with the states of sequences 0 and 1, the second turn chunk 1 with the state of sequence 0.
    """
    chunk = min(CHUNK, max(lengths))
    places, filled = [], []
    turns: list[list[tuple[int, int]]] = []
    begin = 0
    for sequence, length in enumerate(lengths):
        for turn, offset in enumerate(range(0, length, chunk)):
            size = min(chunk, length - offset)
            first = begin + offset
            if turn == len(turns):
                turns.append([])
            turns[turn].append((len(places), sequence))
            places.append([*range(first, first + size), *[first] * (chunk - size)])
            filled.append([True] * size + [False] * (chunk - size))
        begin += length
    is_token_MC = torch.tensor(filled)
    has_padding = not is_token_MC.all()
    turn_chunks = [[number for number, _ in turn] for turn in turns]
    turn_sequences = [[sequence for _, sequence in turn] for turn in turns]
    return _Chunks(
        places_MC=on_device(torch.tensor(places), device),
        is_token_MC=on_device(is_token_MC, device) if has_padding else None,
        place_T=on_device(is_token_MC.flatten().nonzero()[:, 0], device),
        turns=tuple(zip(_each_on(turn_chunks, device), _each_on(turn_sequences, device), strict=True)),
        order_M=on_device(torch.tensor(list(itertools.chain(*turn_chunks))).argsort(), device),
    )


def _each_on(numbers: Sequence[Sequence[int]], device: torch.device) -> tuple[torch.Tensor, ...]:
    """Copy all lists to the device in a single copy, and return each list as a tensor."""
    together = on_device(torch.tensor(list(itertools.chain(*numbers))), device)
    return together.split([len(each) for each in numbers])
