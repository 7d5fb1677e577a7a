import numpy as np
import pytest

from swiftlite.data.sample import digest, make_sample, truncate


def test_labels_follow_from_weights():
    sample = make_sample([5, 6, 7, 8], np.array([1, 0, 0.5, 2]), "f:3", "math")
    assert sample.labels.tolist() == [-100, -100, 7, 8]  # nothing predicts the first token
    assert sample.loss_scale.tolist() == [0, 0, 0.5, 2]
    assert (len(sample), sample.num_trained_tokens, sample.source, sample.channel) == (4, 2, "f:3", "math")


@pytest.mark.parametrize(
    ("strategy", "max_length", "ids", "labels", "loss_scale"),
    [
        ("left", 3, [6, 7, 8], [-100, -100, 8], [0, 0, 2]),
        ("right", 3, [5, 6, 7], [-100, 6, -100], [0, 1, 0]),
        ("right", 1, [5], [-100], [0]),
        ("left", 1, [8], [-100], [0]),
        ("left", 4, [5, 6, 7, 8], [-100, 6, -100, 8], [0, 1, 0, 2]),
    ],
)
def test_truncate(strategy, max_length, ids, labels, loss_scale):
    sample = truncate(make_sample([5, 6, 7, 8], np.array([0, 1, 0, 2]), "f:3", "math"), max_length, strategy)
    assert sample.input_ids.tolist() == ids
    assert sample.labels.tolist() == labels
    assert sample.loss_scale.tolist() == loss_scale
    assert (sample.source, sample.channel) == ("f:3", "math")


def test_left_truncation_never_keeps_a_label_that_nothing_predicts():
    sample = truncate(make_sample([5, 6, 7], np.array([0, 1, 1])), 2, "left")
    assert sample.labels.tolist() == [-100, 7]


def test_digest_sees_every_array_and_every_border():
    ones = np.ones(2)
    first = make_sample([1, 2], ones)
    assert digest([first]) == digest([make_sample([1, 2], ones, "elsewhere:9")])
    others = [
        [first, first],
        [make_sample([1, 3], ones)],
        [make_sample([1, 2], np.array([1, 0.5]))],
        [make_sample([1, 2], np.array([1, 0]))],
        [make_sample([1], ones[:1]), make_sample([2], ones[:1])],
        [],
    ]
    assert len({digest(samples) for samples in [[first], *others]}) == len(others) + 1
