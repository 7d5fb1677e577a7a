"""Test which samples of streamed rows a data-parallel rank computes."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from swiftlite.train.batches.streaming import number_samples


def test_by_hand():
    assert number_samples([2, 1, 3, 1], 1, rank=0, size=2) == [[0, 1], [3, 4, 5]]
    assert number_samples([2, 1, 3, 1], 1, rank=1, size=2) == [[2], [6]]
    assert number_samples([2, 1, 3, 1], 2, rank=0, size=1) == [[0, 1, 2], [3, 4, 5, 6]]


@given(st.data(), st.integers(1, 3), st.integers(1, 4), st.integers(1, 3))
def test_every_sample_once_and_in_order(data, micro_batch_size, ranks, num_micro_batches):
    num_rows = micro_batch_size * ranks * num_micro_batches
    row_sizes = data.draw(st.lists(st.integers(0, 5), min_size=num_rows, max_size=num_rows))
    parts = [number_samples(row_sizes, micro_batch_size, rank, ranks) for rank in range(ranks)]
    assert [len(part) for part in parts] == [num_micro_batches] * ranks
    # Micro-batch m of all ranks together is the m-th run of the global batch.
    together = itertools.chain(*zip(*parts, strict=True))
    assert list(itertools.chain(*together)) == list(range(sum(row_sizes)))
