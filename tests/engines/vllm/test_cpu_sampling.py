"""Test that values of requests are repeated for their draft tokens."""

import pytest
import torch

from swiftlite.engines.vllm.cpu_sampling import expand_batch_to_tokens


def naive(x: list[float], ends: list[int], replace_from: float, replace_to: float) -> list[float]:
    expanded, start = [], 0
    for value, end in zip(x, ends, strict=True):
        expanded += [replace_to if value == replace_from else value] * (end - start)
        start = end
    return expanded


@pytest.mark.parametrize("dtype", [torch.float32, torch.int32])
def test_each_request_s_number_is_repeated_for_its_tokens(dtype):
    x, ends = torch.tensor([7, 0, 3, 3, 0, 1], dtype=dtype), torch.tensor([2, 2, 5, 6, 9, 9], dtype=torch.int32)
    for replace_from, replace_to in ((0, 1), (0, 0), (3, 5)):
        found = expand_batch_to_tokens(x, ends, 9, replace_from, replace_to)
        assert found.dtype is dtype
        assert found.tolist() == naive(x.tolist(), ends.tolist(), replace_from, replace_to)
    assert expand_batch_to_tokens(x[:0], ends[:0], 0).tolist() == []
