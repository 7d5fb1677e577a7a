"""Test which groups of a generation `--dynamic_sample` replaces."""

import numpy as np
import pytest

from swiftlite.rollouts.resample import replaced


@pytest.mark.parametrize(
    ("number", "flat", "number_of_further", "flat_of_further", "expected"),
    [
        (3, [0, 2], 2, [0], [4, 1, 2]),
        (3, [0, 2], 2, [], [3, 1, 4]),
        (3, [1], 1, [0], [0, 1, 2]),
        (2, [0, 1], 1, [], [2, 1]),
    ],
)
def test_flat_groups_are_replaced_by_others(number, flat, number_of_further, flat_of_further, expected):
    found = replaced(number, np.array(flat, int), number_of_further, np.array(flat_of_further, int))
    assert found.tolist() == expected
