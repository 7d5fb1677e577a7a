"""Test samples that are changed when they are read."""

from dataclasses import replace

import numpy as np

from swiftlite.data.changed_samples import ChangedSamples, JoinedSamples, lengths_of
from swiftlite.data.sample import Sample, join, make_sample


def sample(*lengths: int) -> Sample:
    """Return a sample with sequences of these lengths."""
    return join([make_sample(list(range(length)), [1.0] * length) for length in lengths])


SAMPLES = [sample(3), sample(2, 5), sample(4), sample(1, 1, 6)]


def numbered(samples, numbers=None) -> ChangedSamples:
    return ChangedSamples(samples, lambda number, sample: replace(sample, source=str(number)), numbers)


def sources(samples) -> list[str]:
    return [sample.source for sample in samples]


def check_lengths(samples) -> None:
    for found, expected in zip(lengths_of(samples), lengths_of(list(samples)), strict=True):
        assert found.dtype == expected.dtype
        assert np.array_equal(found, expected)


def test_samples_are_changed_by_their_number():
    samples = numbered(SAMPLES)
    assert sources(samples) == ["0", "1", "2", "3"]
    assert (samples[-1].source, sources(samples[1:3])) == ("3", ["1", "2"])
    assert sources(numbered(SAMPLES, np.array([2, 0]))) == ["2", "0"]
    for some in (samples, samples[1:3], numbered(SAMPLES, np.array([3, 1])), samples[:0]):
        check_lengths(some)


def test_changes_are_applied_one_after_the_other():
    tail = numbered(SAMPLES)[1:]
    again = ChangedSamples(tail, lambda number, sample: replace(sample, source=f"{sample.source}, {number}"))
    assert sources(again) == ["1, 0", "2, 1", "3, 2"]
    check_lengths(again)


def test_joined_samples_follow_each_other():
    joined = JoinedSamples([], numbered(SAMPLES)[2:], [], SAMPLES[:2], [])
    assert sources(joined) == ["2", "3", "", ""]
    assert (len(joined), joined[-3].source) == (4, "3")
    check_lengths(joined)
