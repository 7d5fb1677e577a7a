"""Split sequences into chunks, for recurrences that pass a state from chunk to chunk.

A head has a state S [D, E]. Processing tokens one by one is slow, so the tokens of a chunk are processed together. A
chunk never contains tokens of two sequences, so results for packed rows are exact.

Shapes: T tokens of all sequences, M chunks, C tokens of a chunk, N heads, D and E channels of a state.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch

from swiftlite.families.linear_attention import CHUNK
from swiftlite.runtime.device import on_device


@dataclass(frozen=True)
class Chunks:
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

    def scan(
        self,
        states: torch.Tensor,
        faded_MNC: torch.Tensor,
        from_state: torch.Tensor,
        inside: torch.Tensor,
        to_end: torch.Tensor,
        written: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Pass states from chunk to chunk, and read them.

        Args:
            states: [sequences, N, D, E], the state of each sequence before its first token.
            faded_MNC: log of the decay from the beginning of the chunk up to and including each token.
            from_state: [M, N, C, D], with which a token reads the state before the chunk.
            inside: [M, N, C, C], with which it reads what the tokens of the chunk up to itself write.
            to_end: [M, N, C, D], with which it writes to the state after the chunk.
            written: returns what the tokens of some chunks write, [chunks, N, C, E], from the numbers of the chunks and
                the states before them.

        Returns:
            Outputs [T, N, E], and the states after the last tokens.
        """
        read, num_sequences = [], len(states)
        for turn, sequences in self.turns:
            is_all = len(sequences) == num_sequences
            state = states
            # While all sequences have chunks, their states are neither selected nor copied.
            if not is_all:
                state = states[sequences]
            new = written(turn, state)
            read.append(from_state[turn] @ state + inside[turn] @ new)
            fade = faded_MNC[turn][..., -1].exp()[..., None, None]
            state = state * fade + to_end[turn].transpose(-1, -2) @ new
            if is_all:
                states = state
            else:
                # Not in place: the backward pass needs the states of earlier turns.
                states = states.index_copy(0, sequences, state)
        return self._give_back(torch.cat(read)), states

    def _give_back(self, read: torch.Tensor) -> torch.Tensor:
        """Convert the outputs of all turns [M, N, C, E] to [T, N, E]."""
        out_PNE = read[self.order_M].transpose(1, 2).flatten(0, 1)
        if self.is_token_MC is None:
            return out_PNE
        return out_PNE.index_select(0, self.place_T)


@lru_cache(maxsize=16)  # every layer calls it for the rows of the micro-batch
def chunks_of(lengths: tuple[int, ...], device: torch.device) -> Chunks:
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
            # Empty slots repeat a token, so that every index is valid; `take` masks them.
            places.append([*range(first, first + size), *[first] * (chunk - size)])
            filled.append([True] * size + [False] * (chunk - size))
        begin += length
    is_token_MC = torch.tensor(filled)
    has_padding = not is_token_MC.all()
    turn_chunks = [[number for number, _ in turn] for turn in turns]
    turn_sequences = [[sequence for _, sequence in turn] for turn in turns]
    return Chunks(
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
