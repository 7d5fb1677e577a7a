"""Test a session of one process."""

import pytest
import torch

from swiftlite.runtime.distributed import session
from tests.parallel.launch import launch

pytestmark = pytest.mark.gloo


def before_in_and_after(is_wanted: bool) -> list[bool]:
    """Return whether torch is deterministic before, in and after a session."""
    found = [torch.are_deterministic_algorithms_enabled()]
    with session(deterministic=is_wanted):
        found.append(torch.are_deterministic_algorithms_enabled())
    return [*found, torch.are_deterministic_algorithms_enabled()]


@pytest.mark.parametrize("is_wanted", [True, False])
def test_sums_in_one_order_are_this_session_s_alone(is_wanted):
    assert launch(1, before_in_and_after, is_wanted) == [[False, is_wanted, False]]
