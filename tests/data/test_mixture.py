"""Test drawing rows from several files: shares, positions, and that any row can be looked up."""

from collections import Counter

import pytest

from swiftlite.data.dataset import load_train_val
from swiftlite.data.encoder import DocumentEncoder
from swiftlite.data.packing.mixture import BLOCK, Mixture, interleave


def test_places_count_the_rows_of_a_part():
    mixture = Mixture([5, 2, 3], seed=1)
    num_seen = [0, 0, 0]
    for row in range(2 * BLOCK + 100):
        part = mixture.part(row)
        assert mixture.place(row) == (part, num_seen[part])
        num_seen[part] += 1
    assert mixture.counts(2 * BLOCK + 100) == num_seen
    assert Mixture([5, 2, 3], seed=1).place(2 * BLOCK + 99) == mixture.place(2 * BLOCK + 99)


def test_shares_and_seeds():
    parts = [Mixture([3, 1], seed=2).part(row) for row in range(8 * BLOCK)]
    # The deviation of 8,192 draws of a quarter is 39.
    assert abs(Counter(parts)[1] - 2 * BLOCK) < 4 * 39
    assert parts != [Mixture([3, 1], seed=3).part(row) for row in range(8 * BLOCK)]
    assert Mixture().place(12_345) == (0, 12_345)


def test_rows_are_taken_until_a_file_has_no_more():
    mixture = Mixture([1, 1], seed=0)
    taken = interleave([1000, 30], mixture)
    by_part = Counter(part for part, _ in taken)
    assert by_part[1] == 30
    assert mixture.part(len(taken)) == 1  # the next one would be
    assert taken[: by_part[0] + 30] == [mixture.place(row) for row in range(len(taken))]


@pytest.mark.parametrize("seed", [1, 2])
def test_the_rows_of_a_run(make_tokenizer, write_jsonl, seed):
    tokenizer = make_tokenizer(None)
    encoder = DocumentEncoder(tokenizer, len(tokenizer), 2048)
    files = [write_jsonl([{"text": f"{name} {i}"} for i in range(60)], f"{name}.jsonl") for name in "ab"]
    options = {"interleave_prob": [3, 1], "seed": seed, "split_dataset_ratio": 0.1}
    data = load_train_val(encoder, files, **options)
    first, second = (data.report.files[file] for file in files)
    assert first.kept + first.not_sampled == second.kept + second.not_sampled == 60
    assert first.not_sampled == 0  # all but those held out were taken
    assert second.not_sampled > 20
    assert data.report.total.kept == len(data.train) + len(data.val)
    assert data.digest == load_train_val(encoder, files, **options).digest
