"""A session of one process."""

import pytest
import torch

from swiftlite.runtime.distributed import session


@pytest.mark.parametrize("is_wanted", [True, False])
def test_sums_in_one_order_are_this_session_s_alone(is_wanted):
    with session(deterministic=is_wanted):
        assert torch.are_deterministic_algorithms_enabled() is is_wanted
    assert not torch.are_deterministic_algorithms_enabled()
