import pickle

import numpy as np
import pytest

from swiftlite.data.packing.sampler import NO_INDEX, Sampler, evaluation_batches, micro_batches
from tests.messages import mentions


@pytest.mark.parametrize(("num_samples", "global_batch_size"), [(10, 5), (10, 4), (7, 3), (3, 8), (1, 2), (5, 5)])
@pytest.mark.parametrize("shuffle", [True, False])
def test_every_sample_comes_once_per_epoch(num_samples, global_batch_size, shuffle):
    sampler = Sampler(num_samples, global_batch_size, seed=1, shuffle=shuffle)
    batches = [sampler.global_batch(step) for step in range(4 * num_samples)]
    assert {batch.shape for batch in batches} == {(global_batch_size,)}
    epochs = np.concatenate(batches).reshape(-1, num_samples)
    assert np.array_equal(np.sort(epochs, axis=1), np.tile(np.arange(num_samples), (len(epochs), 1)))


def test_epochs_differ_and_the_seed_decides():
    first, second = Sampler(50, 50, seed=1).global_batch(0), Sampler(50, 50, seed=1).global_batch(1)
    assert not np.array_equal(first, second)
    assert not np.array_equal(first, Sampler(50, 50, seed=2).global_batch(0))
    assert Sampler(50, 50, seed=1, shuffle=False).global_batch(3).tolist() == list(range(50))


def test_a_step_depends_on_its_number_alone():
    unbroken = Sampler(23, 6, seed=3)
    steps = [unbroken.global_batch(step).tolist() for step in range(20)]
    for step in (19, 0, 7, 3, 4):  # any order, any fresh start
        assert unbroken.global_batch(step).tolist() == steps[step]
        assert Sampler(23, 6, seed=3).global_batch(step).tolist() == steps[step]


def test_the_order_never_changes_between_versions():
    """A run that resumes after an update must continue with the same rows.

    The expected rows are stored in this test.
    """
    assert Sampler(8, 8, seed=42).global_batch(0).tolist() == [4, 3, 7, 6, 0, 1, 5, 2]
    assert Sampler(8, 8, seed=42).global_batch(1).tolist() == [1, 2, 5, 6, 0, 3, 4, 7]


def test_an_epoch_is_permuted_once(monkeypatch):
    """Permuting ten million rows takes a second, which is too long for each step."""
    made = []
    random_state = np.random.RandomState
    monkeypatch.setattr(np.random, "RandomState", lambda seed: made.append(seed) or random_state(seed))
    sampler = Sampler(100, 8, seed=0)
    for step in range(25):
        sampler.global_batch(step)
    assert made == [[0, 0], [0, 1]]


def test_one_order_is_held():
    """The order of ten million rows takes 80 MB."""
    sampler = Sampler(100, 100, seed=0)
    sizes = set()
    for epoch in range(3):
        sampler.global_batch(epoch)
        sizes.add(len(pickle.dumps(sampler)))
    assert len(sizes) == 1


def test_micro_batches_by_hand():
    batch = np.arange(100, 112)
    assert micro_batches(batch, 2, 0, 3).tolist() == [[100, 101], [106, 107]]
    assert micro_batches(batch, 2, 1, 3).tolist() == [[102, 103], [108, 109]]
    assert micro_batches(batch, 2, 2, 3).tolist() == [[104, 105], [110, 111]]


@pytest.mark.parametrize(("micro_batch_size", "data_parallel_size"), [(1, 1), (1, 4), (2, 2), (3, 4), (12, 1)])
def test_a_step_has_the_same_samples_at_every_layout(micro_batch_size, data_parallel_size):
    batch = Sampler(30, 12, seed=5).global_batch(4)
    shares = [
        micro_batches(batch, micro_batch_size, rank, data_parallel_size).reshape(-1)
        for rank in range(data_parallel_size)
    ]
    assert sorted(np.concatenate(shares)) == sorted(batch)


def test_micro_batches_that_do_not_divide():
    with pytest.raises(ValueError) as caught:
        micro_batches(np.arange(10), 2, 0, 3)
    assert mentions(str(caught.value), "10 2 3")


def test_evaluation_batches():
    assert NO_INDEX < 0
    assert evaluation_batches(5, 2).tolist() == [[0, 1], [2, 3], [4, NO_INDEX]]
    assert evaluation_batches(4, 2).tolist() == [[0, 1], [2, 3]]
    assert evaluation_batches(1, 4).tolist() == [[0, NO_INDEX, NO_INDEX, NO_INDEX]]
