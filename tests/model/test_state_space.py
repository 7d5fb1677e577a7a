"""Test the state space model of Mamba-2 against its definition, computed token by token in float64."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from swiftlite.families.linear_attention import CHUNK
from swiftlite.model.attention.state_space import state_space_scan
from tests.model.test_delta_rule import LENGTHS, check_gradients, check_results

HEADS, GROUPS, STATE, CHANNELS = 6, 2, 8, 12


def inputs(num_tokens: int) -> Any:
    """Return inputs, time steps, rates, B and C."""
    generator = torch.Generator().manual_seed(num_tokens)
    x = torch.randn(num_tokens, HEADS, CHANNELS, generator=generator)
    step = torch.rand(num_tokens, HEADS, generator=generator) * 0.5
    rate = -torch.rand(HEADS, generator=generator) * 2
    write, read = (torch.randn(num_tokens, GROUPS, STATE, generator=generator) for _ in range(2))
    return [x, step, rate, write, read]


def scan(parts: Any, lengths: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    x, step, rate, write, read = parts
    return state_space_scan(x, step, rate, write, read, lengths)


def definition(parts: Sequence[torch.Tensor], lengths: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    x, step, rate, write, read = (tensor.double() for tensor in parts)
    outputs, states, begin = [], [], 0
    for length in lengths:
        state = torch.zeros(HEADS, STATE, CHANNELS, dtype=torch.float64)
        for t in range(begin, begin + length):
            own_write, own_read = (tensor[t].repeat_interleave(HEADS // GROUPS, dim=0) for tensor in (write, read))
            state = state * (step[t] * rate).exp()[:, None, None]
            state = state + torch.einsum("n,nd,ne->nde", step[t], own_write, x[t])
            outputs.append(torch.einsum("nd,nde->ne", own_read, state))
        states.append(state)
        begin += length
    return torch.stack(outputs), torch.stack(states)


@pytest.mark.parametrize("lengths", LENGTHS)
def test_chunks_compute_the_definition(lengths):
    check_results(scan, definition, inputs(sum(lengths)), lengths, atol=3e-5)  # values are up to 30


def test_gradients_are_those_of_the_definition():
    check_gradients(scan, definition, inputs)


def test_a_sequence_continues_from_its_state():
    parts = inputs(CHUNK + 40)
    whole, last = scan(parts, (CHUNK + 40,))
    x, step, rate, write, read = parts
    begin, state = state_space_scan(x[:50], step[:50], rate, write[:50], read[:50], (50,))
    end, state = state_space_scan(x[50:], step[50:], rate, write[50:], read[50:], (CHUNK - 10,), state)
    torch.testing.assert_close(torch.cat([begin, end]), whole, rtol=0, atol=3e-5)
    torch.testing.assert_close(state, last, rtol=0, atol=3e-5)
