import numpy as np
import pytest
import torch

from swiftlite.data.batch import NO_SAMPLE, collate
from swiftlite.data.sample import Sample, make_sample

LONG = make_sample([5, 6, 7, 8], np.array([0, 0, 0.5, 2]))
SHORT = make_sample([9, 10], np.array([0, 1]))


def test_collate_pads_right_and_shifts_labels():
    batch = collate([LONG, SHORT], pad_token_id=3)
    assert batch.tokens_KBS[0].tolist() == [[5, 6, 7, 8], [9, 10, 3, 3]]
    assert batch.labels_KBS[0].tolist() == [[-100, 7, 8, -100], [10, -100, -100, -100]]
    assert batch.loss_scale_KBS[0].tolist() == [[0, 0.5, 2, 0], [1, 0, 0, 0]]
    assert batch.position_ids_BS.tolist() == [[0, 1, 2, 3]] * 2
    assert batch.num_tokens == 6
    assert batch.tokens_KBS[0].dtype == batch.labels_KBS[0].dtype == batch.position_ids_BS.dtype == torch.int64
    assert batch.loss_scale_KBS[0].dtype == torch.float32


@pytest.mark.parametrize(("multiple", "length"), [(1, 4), (2, 4), (3, 6), (8, 8)])
def test_collate_rounds_up(multiple, length):
    batch = collate([SHORT, LONG], 3, pad_to_multiple_of=multiple)
    tensors = (batch.tokens_KBS[0], batch.labels_KBS[0], batch.loss_scale_KBS[0], batch.position_ids_BS)
    assert {tuple(tensor.shape) for tensor in tensors} == {(2, length)}
    assert batch.labels_KBS[0][:, 4:].eq(-100).all()
    assert batch.loss_scale_KBS[0][:, 4:].eq(0).all()


def test_labels_point_at_the_tokens_they_predict():
    random = np.random.RandomState(0)
    samples = []
    for length in (1, 2, 5, 17):
        weights = random.choice([0.0, 0.25, 1.0], length)
        samples.append(make_sample(random.randint(0, 99, length), weights))
    batch = collate(samples, 0)
    for row, sample in enumerate(samples):
        at = [s for s in range(batch.labels_KBS[0].shape[1]) if batch.labels_KBS[0][row, s] != -100]
        assert [s + 1 for s in at] == np.flatnonzero(sample.labels != -100).tolist()
        assert batch.labels_KBS[0][row, at].tolist() == [int(batch.tokens_KBS[0][row, s + 1]) for s in at]
        assert batch.loss_scale_KBS[0][row, at].tolist() == [sample.loss_scale[s + 1] for s in at]


def test_weight_of_an_ignored_label_is_zero():
    odd = Sample(np.array([1, 2]), np.array([-100, -100]), np.array([1, 1], np.float32))
    assert collate([odd], 0).loss_scale_KBS[0].tolist() == [[0, 0]]


def test_no_sample_is_padding_alone():
    batch = collate([NO_SAMPLE, SHORT], 3)
    assert batch.tokens_KBS[0][0].tolist() == [3, 3]
    assert batch.labels_KBS[0][0].tolist() == [-100, -100]
    assert batch.num_tokens == 2
    alone = collate([NO_SAMPLE, NO_SAMPLE], 3)
    assert (tuple(alone.tokens_KBS[0].shape), alone.num_tokens) == ((2, 1), 0)


def test_map_reaches_every_tensor():
    batch = collate([LONG, SHORT], 3, mtp_num_layers=1)
    cut = batch.map(lambda tensor: tensor[..., :2])
    assert cut.num_tokens == 6
    for name in ("tokens_KBS", "labels_KBS", "loss_scale_KBS", "position_ids_BS"):
        assert torch.equal(vars(cut)[name], vars(batch)[name][..., :2])


def test_each_mtp_depth_sees_and_predicts_one_token_later():
    batch = collate([make_sample([5, 6, 7, 8], [0, 1, 0, 2])], 3, mtp_num_layers=2)
    assert batch.tokens_KBS[:, 0].tolist() == [[5, 6, 7, 8], [6, 7, 8, 0], [7, 8, 0, 0]]
    assert batch.labels_KBS[:, 0].tolist() == [[6, -100, 8, -100], [-100, 8, -100, -100], [8, -100, -100, -100]]
    assert batch.loss_scale_KBS[:, 0].tolist() == [[1, 0, 2, 0], [0, 2, 0, 0], [2, 0, 0, 0]]
