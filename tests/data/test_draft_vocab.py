"""Test the choice of a draft vocabulary from counts."""

import numpy as np
import pytest

from swiftlite.data import draft_vocab


def test_the_most_frequent_are_chosen_and_of_equals_the_first():
    counts = draft_vocab.count([np.array([-100, 4, 4, 1]), np.array([2, 3, 4])], 6)
    assert counts.tolist() == [0, 1, 1, 1, 3, 0]
    chosen = draft_vocab.choose(counts, 3)
    assert chosen.ids == (1, 2, 4)
    assert chosen.coverage == pytest.approx(5 / 6)
    assert draft_vocab.covered(np.array([0, 1, 0, 3, 0, 0]), chosen.ids) == 0.25
