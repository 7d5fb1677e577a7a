"""Compute the state space model of Mamba-2.

A head has a state S [D, E]. Each token decays it, writes its input x [E] with the vector B [D], and reads it with the
vector C [D]:

    S = exp(dt A) S + dt B x
    out = C S

Chunks of tokens are computed together, as in the state space duality of Mamba-2 (Dao and Gu, 2024), and pass the state
on (`chunks.py`). The kernels of mamba-ssm are not used.

Shapes: T tokens of all sequences, N heads, G groups of heads, D and E channels of a state.
"""

from collections.abc import Sequence

import torch

from swiftlite.model.attention.chunks import chunks_of


def state_space_scan(
    input_TNE: torch.Tensor,
    step_TN: torch.Tensor,
    rate_N: torch.Tensor,
    write_TGD: torch.Tensor,
    read_TGD: torch.Tensor,
    lengths: Sequence[int],
    states: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute in float32 the output of each token and the final state of each sequence.

    Args:
        input_TNE: x of concatenated sequences.
        step_TN: dt, positive.
        rate_N: A, negative.
        write_TGD, read_TGD: B and C.
        lengths: lengths of the sequences; their sum is T.
        states: [number of sequences, N, D, E], initial states; default: zeros.

    Returns:
        Outputs [T, N, E] and final states [number of sequences, N, D, E], both in float32.
    """
    per_group = input_TNE.size(1) // write_TGD.size(1)
    chunks = chunks_of(tuple(lengths), input_TNE.device)
    value, step, write, read = (chunks.take(tensor) for tensor in (input_TNE, step_TN, write_TGD, read_TGD))
    # [M, N, C]: log of the decay from the beginning of the chunk up to and including each token.
    faded = (step * rate_N.float()[:, None]).cumsum(dim=-1)
    # [M, N, C, C]: decay from token j to token i; 0 if j is after i.
    # The first `tril` because above the diagonal, exp can be infinite, and its gradient 0 * inf NaN.
    left = (faded[..., :, None] - faded[..., None, :]).tril().exp().tril()
    inside = (read @ write.transpose(-1, -2)).repeat_interleave(per_group, dim=1) * left
    from_state = read.repeat_interleave(per_group, dim=1) * faded.exp()[..., None]
    to_end = write.repeat_interleave(per_group, dim=1) * (faded[..., -1:] - faded).exp()[..., None]
    new_value = value * step[..., None]
    if states is None:
        states = value.new_zeros(len(lengths), value.size(1), write.size(-1), value.size(-1))
    return chunks.scan(states.float(), faded, from_state, inside, to_end, lambda turn, state: new_value[turn])
