"""Test the source of compiled kernels: few kernels, without divisions by sizes that are constant in a run."""

import json
import re
import subprocess
import sys

import pytest

from tests.cuda_emulated import library

pytestmark = [
    pytest.mark.cuda_emulated,
    pytest.mark.skipif(bool(library.missing()), reason=library.missing() or "there is a compiler"),
]
SLOW = re.compile(r"(//|%)\s*ks\d|remainder_integer|device_assert")
"""Divisions by a size that is an argument of the kernel, and checks of indices, for each element."""


@pytest.fixture(scope="module")
def sources() -> dict[str, str]:
    command = [sys.executable, "-m", "tests.cuda_emulated.generated"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    return json.loads(run.stdout.splitlines()[-1])


# The gradient of a norm's weight is a sum over tokens, in a kernel after that of the gradient of the input.
KERNELS = {
    "rotate": 1,
    "rotate_pairs": 1,
    "norm_and_rotate": 1,
    "zero_centered_norm": 1,
    "norm": 1,
    "add_and_norm": 1,
    "norm_backward": 2,
    "quantize_rows": 1,
}


@pytest.mark.parametrize("name", KERNELS)
def test_a_function_is_few_kernels_without_divisions(sources, name):
    assert sources[name].count("@triton.jit") == KERNELS[name]
    assert not SLOW.findall(sources[name])


def test_without_static_sizes_there_are_divisions(sources):
    assert SLOW.findall(sources["unmarked"])
