"""Test the source of compiled kernels: one kernel each, without divisions by sizes that are constant in a run."""

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


@pytest.mark.parametrize("name", ["rotate", "rotate_pairs", "norm_and_rotate", "zero_centered_norm", "quantize_rows"])
def test_a_function_is_one_kernel_without_divisions(sources, name):
    assert sources[name].count("@triton.jit") == 1
    assert not SLOW.findall(sources[name])


def test_without_static_sizes_there_are_divisions(sources):
    assert SLOW.findall(sources["unmarked"])
