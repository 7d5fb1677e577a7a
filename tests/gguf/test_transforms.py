"""Test every transform and its inverse."""

import pytest
import torch

from swiftlite.gguf.transforms import (
    ADD_ONE,
    COPY,
    NEGATIVE_EXP,
    SQUEEZE,
    Chain,
    Constant,
    Reorder,
    SplitKeysAndValues,
    Stack,
    is_exact,
    reshape,
    zeros,
)

CASES = {
    "copy": (COPY, [(3, 4), (2,)]),
    "squeeze": (SQUEEZE, [(6, 1, 4)]),
    "stack": (Stack(), [(3, 4), (3, 4)]),
    "split": (SplitKeysAndValues(heads=2, key=3, value=4), [(14, 5)]),
    "reorder rows": (Reorder(0, (2, 0, 3, 1, 4), (3, 2), (1, 4)), [(3, 2), (2, 2)]),
    "reorder columns": (Reorder(1, (2, 0, 1), (3,), (3,)), [(2, 3)]),
    "reshape": (reshape((6,), (2, 3)), [(6,), (6,)]),
    "chain": (Chain((SQUEEZE, Reorder(0, (1, 0), (2,), (2,)))), [(2, 1, 3)]),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CASES)
def test_the_inverse_returns_the_same_bits(name, dtype):
    transform, shapes = CASES[name]
    tensors = [torch.randn(shape, dtype=dtype) for shape in shapes]
    back = transform.to_hf(transform.to_gguf(tensors))
    assert len(back) == len(tensors)
    assert all(torch.equal(one, other) for one, other in zip(back, tensors, strict=True))
    assert is_exact(transform)


@pytest.mark.parametrize("transform", [ADD_ONE, NEGATIVE_EXP, Chain((NEGATIVE_EXP, COPY))])
def test_sums_and_exponentials_are_inverted_up_to_rounding(transform):
    tensor = torch.randn(100)
    (back,) = transform.to_hf(transform.to_gguf([tensor]))
    torch.testing.assert_close(back, tensor, atol=1e-6, rtol=1e-6)  # of numbers near 1, as float32 rounds them
    assert not is_exact(transform)


def test_the_example_of_reorder():
    rows = ["q0", "k0", "v0", "z0", "q1", "k1", "v1", "z1"]
    reorder = Reorder(0, (0, 4, 1, 5, 2, 6, 3, 7), (8,), (6, 2))
    qkv, gates = reorder.to_gguf([torch.arange(8)])
    assert [rows[row] for row in qkv] == ["q0", "q1", "k0", "k1", "v0", "v1"]
    assert [rows[row] for row in gates] == ["z0", "z1"]


def test_keys_are_transposed():
    both = torch.randn(2 * 7, 5)
    keys, values = SplitKeysAndValues(heads=2, key=3, value=4).to_gguf([both])
    assert torch.equal(keys[1], both[7:10].T)
    assert torch.equal(values[1], both[10:14])


def test_constants_and_zeros_belong_to_no_tensor():
    constant = Constant(lambda: [torch.tensor([1.0, 1e30])])
    assert torch.equal(constant.to_gguf([])[0], torch.tensor([1.0, 1e30]))
    assert constant.to_hf(constant.to_gguf([])) == []
    empty = zeros((1, 2), (3,))
    assert [tensor.shape for tensor in empty.to_gguf([])] == [(1, 2), (3,)]
    assert empty.to_hf(empty.to_gguf([])) == []
