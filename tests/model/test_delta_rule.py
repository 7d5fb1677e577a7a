"""Test the gated delta rule against its definition, computed token by token in float64."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from packaging.version import Version

from swiftlite.families.linear_attention import CHUNK
from swiftlite.model.attention.delta_rule import by_kernel, gated_delta_rule, has_wrong_gradients, starts_of

HEADS, KEYS, VALUES = 3, 8, 12
Function = Callable[[Any, Sequence[int]], tuple[torch.Tensor, torch.Tensor]]


def inputs(num_tokens: int) -> Any:
    """Return query, key, value, log decay and beta as a layer computes them: keys and queries have length 1."""
    generator = torch.Generator().manual_seed(num_tokens)
    query, key = (torch.randn(num_tokens, HEADS, KEYS, generator=generator) for _ in range(2))
    value = torch.randn(num_tokens, HEADS, VALUES, generator=generator)
    decay = -torch.rand(num_tokens, HEADS, generator=generator) * 2
    beta = torch.rand(num_tokens, HEADS, generator=generator)
    normed = [tensor / tensor.norm(dim=-1, keepdim=True) for tensor in (query, key)]
    return [*normed, value, decay, beta]


def rule(parts: Any, lengths: Sequence[int], states: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    query, key, value, decay, beta = parts
    return gated_delta_rule(query, key, value, decay, beta, lengths, states)


def cut(parts: Any, begin: int, end: int) -> Any:
    return [tensor[begin:end] for tensor in parts]


def definition(parts: Sequence[torch.Tensor], lengths: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    query, key, value, decay, beta = (tensor.double() for tensor in parts)
    read, states, begin = [], [], 0
    for length in lengths:
        state = torch.zeros(HEADS, KEYS, VALUES, dtype=torch.float64)
        for t in range(begin, begin + length):
            state = state * decay[t].exp()[:, None, None]
            said = torch.einsum("nd,nde->ne", key[t], state)
            state = state + torch.einsum("n,nd,ne->nde", beta[t], key[t], value[t] - said)
            read.append(torch.einsum("nd,nde->ne", query[t], state))
        states.append(state)
        begin += length
    return torch.stack(read), torch.stack(states)


LENGTHS = [(1,), (CHUNK,), (CHUNK + 1,), (7, 3 * CHUNK, 1, CHUNK + 30), (5,) * 20]


def check_results(function: Function, definition: Function, parts: Any, lengths: Sequence[int], atol: float) -> None:
    """Compare outputs and states in float32 with those of a definition in float64."""
    for found, expected in zip(function(parts, lengths), definition(parts, lengths), strict=True):
        torch.testing.assert_close(found.double(), expected, rtol=0, atol=atol)


def check_gradients(function: Function, definition: Function, make_inputs: Callable[[int], Any]) -> None:
    """Compare the gradients of all inputs with those of a definition in float64."""
    lengths = (CHUNK + 5, 9)
    parts: Any = [tensor.requires_grad_() for tensor in make_inputs(sum(lengths))]
    outputs = [each(parts, lengths)[0] for each in (function, definition)]
    weight = torch.randn(outputs[0].shape, generator=torch.Generator().manual_seed(0))
    found, expected = (torch.autograd.grad((output * weight).sum(), parts) for output in outputs)
    for mine, its in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, its, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("lengths", LENGTHS)
def test_chunks_compute_the_definition(lengths):
    check_results(rule, definition, inputs(sum(lengths)), lengths, atol=1e-5)  # values are about 1


def test_gradients_are_those_of_the_definition():
    check_gradients(rule, definition, inputs)


def test_a_sequence_does_not_see_another():
    """If the first sequence changes, the results of the second sequence are bitwise identical."""
    lengths = (CHUNK + 3, 50)
    parts = inputs(sum(lengths))
    changed: Any = [tensor.clone() for tensor in parts]
    for tensor in changed[:3]:
        tensor[: lengths[0]] += 1
    mine, other = (rule(each, lengths)[0][lengths[0] :] for each in (parts, changed))
    assert torch.equal(mine, other)


def test_a_sequence_goes_on_from_its_state():
    parts = inputs(150)
    whole, last = rule(parts, (150,))
    first, state = rule(cut(parts, 0, 70), (70,))
    rest, end = rule(cut(parts, 70, 150), (80,), state)
    torch.testing.assert_close(torch.cat([first, rest]), whole, rtol=0, atol=1e-5)
    torch.testing.assert_close(end, last, rtol=0, atol=1e-5)


def test_the_cuda_kernel_is_given_packed_rows():
    """The arguments are those of flash-linear-attention 0.6, whose kernels run only on a GPU."""
    lengths = (7, CHUNK + 3, 1)
    parts = inputs(sum(lengths))

    def kernel(q, k, v, g, beta, scale, initial_state, output_final_state, cu_seqlens):
        assert (scale, output_final_state, q.dim(), q.size(0)) == (1.0, True, 4, 1)
        packed = [tensor[0] for tensor in (q, k, v, g, beta)]
        query, key, value, decay, weight = packed
        rows = gated_delta_rule(query, key, value, decay, weight, cu_seqlens.diff().tolist(), initial_state)
        return rows[0][None], rows[1]

    query, key, value, decay, beta = parts
    found, states = by_kernel(kernel, query, key, value, decay, beta, lengths, None)
    expected, last = gated_delta_rule(query, key, value, decay, beta, lengths)
    assert torch.equal(found, expected)
    assert torch.equal(states, last)


def test_releases_of_triton_with_wrong_gradients():
    """The condition is the one of flash-linear-attention 0.6, which raises an error in the backward pass."""
    hopper, ampere = (9, 0), (8, 0)
    assert not has_wrong_gradients(Version("3.3.1"), hopper)
    assert has_wrong_gradients(Version("3.4.0"), hopper)
    assert has_wrong_gradients(Version("3.6.0"), hopper)
    assert not has_wrong_gradients(Version("3.7.1"), hopper)
    assert not has_wrong_gradients(Version("3.6.0"), ampere)


def test_starts_are_one_tensor_for_all_layers_of_a_row():
    """flash-linear-attention caches what it reads from this tensor while it receives the same object."""
    device = torch.device("cpu")
    assert starts_of((3, 0, 4), device) is starts_of((3, 0, 4), device)
    assert starts_of((3, 0, 4), device).tolist() == [0, 3, 3, 7]
