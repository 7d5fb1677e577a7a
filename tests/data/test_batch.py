import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from swiftlite.data.batch import Extra, collate, collate_packed
from swiftlite.data.sample import Sample, make_sample, truncate
from swiftlite.model.forward import shard

EMPTY = make_sample([], [])
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
    batch = collate([EMPTY, SHORT], 3)
    assert batch.tokens_KBS[0][0].tolist() == [3, 3]
    assert batch.labels_KBS[0][0].tolist() == [-100, -100]
    assert batch.num_tokens == 2
    alone = collate([EMPTY, EMPTY], 3)
    assert (tuple(alone.tokens_KBS[0].shape), alone.num_tokens) == ((2, 1), 0)


def test_map_reaches_every_tensor():
    batch = collate([LONG, SHORT], 3, num_drafts=1)
    cut = batch.map(lambda tensor: tensor[..., :2])
    assert cut.num_tokens == 6
    for name in ("tokens_KBS", "labels_KBS", "loss_scale_KBS", "position_ids_BS"):
        assert torch.equal(vars(cut)[name], vars(batch)[name][..., :2])


def test_each_mtp_depth_sees_and_predicts_one_token_later():
    batch = collate([make_sample([5, 6, 7, 8], [0, 1, 0, 2])], 3, num_drafts=2)
    assert batch.tokens_KBS[:, 0].tolist() == [[5, 6, 7, 8], [6, 7, 8, 0], [7, 8, 0, 0]]
    assert batch.labels_KBS[:, 0].tolist() == [[6, -100, 8, -100], [-100, 8, -100, -100], [8, -100, -100, -100]]
    assert batch.loss_scale_KBS[:, 0].tolist() == [[1, 0, 2, 0], [0, 2, 0, 0], [2, 0, 0, 0]]


def test_a_packed_row_by_hand():
    """Each sequence is padded to a multiple of 2, and the row to 12 by a sequence of padding."""
    samples = [LONG, SHORT, make_sample([11], np.ones(1))]
    batch = collate_packed(samples, 3, num_drafts=1, pad_each_to_multiple_of=2, pad_to_multiple_of=6)
    assert batch.cu_seqlens is not None
    assert batch.cu_seqlens.tolist() == [0, 4, 6, 8, 12]
    assert batch.cu_seqlens.dtype == torch.int32
    assert batch.tokens_KBS[:, 0].tolist() == [
        [5, 6, 7, 8, 9, 10, 11, 3, 3, 3, 3, 3],
        [6, 7, 8, 0, 10, 0, 3, 0, 3, 3, 3, 0],
    ]
    no = -100
    assert batch.labels_KBS[:, 0].tolist() == [
        [no, 7, 8, no, 10, no, no, no, no, no, no, no],
        [7, 8, no, no, no, no, no, no, no, no, no, no],
    ]
    assert batch.loss_scale_KBS[:, 0].tolist() == [
        [0, 0.5, 2, 0, 1, 0, 0, 0, 0, 0, 0, 0],
        [0.5, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0],
    ]
    assert batch.position_ids_BS.tolist() == [[0, 1, 2, 3, 0, 1, 0, 1, 0, 1, 2, 3]]
    assert batch.num_tokens == 7


@given(
    lengths=st.lists(st.integers(0, 9), max_size=6),
    depth=st.integers(0, 3),
    each=st.sampled_from([1, 2, 4]),
    tensor_parallel=st.sampled_from([1, 2, 3]),
)
def test_a_packed_row_is_its_samples_one_after_the_other(lengths, depth, each, tensor_parallel):
    random = np.random.RandomState(0)
    samples = [make_sample(random.randint(1, 99, n), random.choice([0.0, 0.5, 1.0], n)) for n in lengths]
    row = collate_packed(
        samples, 0, num_drafts=depth, pad_each_to_multiple_of=each, pad_to_multiple_of=each * tensor_parallel
    )
    assert row.cu_seqlens is not None
    bounds = row.cu_seqlens.tolist()
    total = row.position_ids_BS.numel()
    assert total >= 1
    assert total % (each * tensor_parallel) == 0
    assert bounds[0] == 0
    assert bounds[-1] == total
    assert all((end - start) % each == 0 for start, end in itertools.pairwise(bounds))
    assert len(bounds) - 1 - len(samples) in (0, 1)
    assert row.num_tokens == sum(lengths)
    for sample, start, end in zip(samples, bounds, bounds[1:], strict=False):
        if end > start:
            alone = collate([sample], 0, num_drafts=depth, pad_to_multiple_of=each)
            part = row.map(lambda tensor, start=start, end=end: tensor[..., start:end])
            for name in ("tokens_KBS", "labels_KBS", "loss_scale_KBS", "position_ids_BS"):
                assert torch.equal(vars(part)[name], vars(alone)[name])
    # What is left over is padding that trains nothing.
    rest = row.map(lambda tensor: tensor[..., bounds[len(samples)] :])
    assert rest.labels_KBS.eq(-100).all()
    assert rest.loss_scale_KBS.eq(0).all()
    assert rest.tokens_KBS.eq(0).all()


def labeled(ids, weights, number):
    """Return a sequence whose extras are its labels, so that their positions can be checked."""
    sample = make_sample(ids, weights)
    return sample.with_extras(label=sample.labels, number=number)


EXTRAS = (Extra("label", torch.int64, per="label", default=-100), Extra("number", torch.int32, default=-1))


@pytest.mark.parametrize("rank", [None, 0, 1])
@pytest.mark.parametrize("is_packed", [False, True])
def test_extras_are_collated_and_cut_as_labels_are(is_packed, rank):
    """The sequences have equal lengths. Some are not trained, one has no extras, and one batch is empty."""
    sequences = [
        labeled([5, 6, 7, 8, 9], [0, 1, 0, 1, 1], 3),
        labeled([5, 6, 7, 8, 9], [0, 1, 0, 1, 1], 4),
        labeled([4, 2], [0, 0], 5),
        make_sample([1, 3, 5], [0, 0, 0]),
    ]
    options: dict[str, Any] = {"num_drafts": 2, "pad_to_multiple_of": 4, "extras": EXTRAS}
    batch = collate_packed(sequences, 0, pad_each_to_multiple_of=4, **options) if is_packed else None
    batch = batch or collate(sequences, 0, **options)
    if rank is not None:
        batch = shard(batch, rank, 2)
    assert batch.extras["label"].equal(batch.labels_KBS[0])
    assert batch.extras["number"].tolist() == [3, 4, 5, -1]
    assert batch.num_sequences == 4
    nothing = (collate_packed if is_packed else collate)([], 0, extras=EXTRAS)
    assert nothing.extras["label"].eq(-100).all()
    assert (len(nothing.extras["number"]), nothing.num_sequences) == (0, 0)


def seeing(ids):
    """Return a sequence whose tokens above 6 stand for items. All its extras are derived from its ids."""
    ids = np.array(ids)
    is_item = ids > 6
    which = np.where(is_item, is_item.cumsum() - 1, -1)
    seen = tuple(np.array([token, 0]) for token in ids[is_item])
    return make_sample(ids, np.ones(len(ids))).with_extras(which=which, place=ids[:, None] + np.arange(3), seen=seen)


TOKEN_EXTRAS = (
    Extra("seen", per="item", shape=(2,)),
    Extra("which", torch.int64, per="token", default=-1, counts="seen"),
    Extra("place", torch.int64, per="token", shape=(3,)),
)


@pytest.mark.parametrize("rank", [None, 0, 1])
@pytest.mark.parametrize("is_packed", [False, True])
def test_extras_of_tokens_are_shifted_and_cut_as_tokens_are(is_packed, rank):
    """Some sequences have items, some have none, and one has no extras."""
    sequences = [seeing([5, 8, 7, 6, 9]), seeing([4, 2]), make_sample([1, 3], [1, 1]), seeing([9, 8, 3])]
    options: dict[str, Any] = {"num_drafts": 2, "pad_to_multiple_of": 4, "extras": TOKEN_EXTRAS}
    batch = collate_packed(sequences, 0, pad_each_to_multiple_of=4, **options) if is_packed else None
    batch = batch or collate(sequences, 0, **options)
    if rank is not None:
        batch = shard(batch, rank, 2)
    assert batch.items["seen"].tolist() == [[8, 0], [7, 0], [9, 0], [9, 0], [8, 0]]
    which_KBS, place_K3BS = batch.extras["which"], batch.extras["place"]
    assert torch.equal(which_KBS >= 0, batch.tokens_KBS > 6)
    is_item_KBS = which_KBS >= 0
    assert torch.equal(batch.items["seen"][which_KBS[is_item_KBS], 0].long(), batch.tokens_KBS[is_item_KBS])
    brings_KBS = (batch.sequence_KBS >= 0) & (batch.sequence_KBS != 2)
    for number in range(3):
        expected_KBS = (batch.tokens_KBS + number).where(brings_KBS, 0)
        assert torch.equal(place_K3BS[:, number], expected_KBS)
    nothing = (collate_packed if is_packed else collate)([], 0, extras=TOKEN_EXTRAS)
    assert nothing.items["seen"].shape == (0, 2)
    assert nothing.extras["which"].eq(-1).all()


def test_successive_sequences_share_the_same_items():
    first, other = seeing([5, 8, 7]), seeing([4, 2])
    answer = seeing([8, 7, 3, 1]).with_extras(seen=first.extras["seen"])
    sequences = [seeing([9]), first, answer, other, seeing([7, 5])]
    batch = collate(sequences, 0, extras=TOKEN_EXTRAS)
    assert batch.items["seen"].tolist() == [[9, 0], [8, 0], [7, 0], [7, 0]]
    assert batch.extras["which"][0].tolist() == [
        [0, -1, -1, -1],
        [-1, 1, 2, -1],
        [1, 2, -1, -1],
        [-1, -1, -1, -1],
        [3, -1, -1, -1],
    ]


@pytest.mark.parametrize(("strategy", "kept"), [("left", slice(-3, None)), ("right", slice(3))])
def test_extras_are_truncated_with_their_tokens(strategy, kept):
    sample = labeled([5, 6, 7, 8, 9], [0, 1, 1, 1, 1], 3)
    cut = truncate(replace(sample, trains_heads=False), 3, strategy)
    assert cut.extras["label"].tolist() == sample.labels[kept].tolist()
    assert (cut.extras["number"], cut.trains_heads) == (3, False)


def test_heads_do_not_learn_from_some_sequences():
    first, second = LONG, replace(LONG, trains_heads=False)
    batch = collate([first, second, second], 3, num_drafts=1)
    assert (batch.labels_KBS[0] != -100).any(dim=1).all()
    assert batch.labels_KBS[1, 1:].eq(-100).all()
    assert batch.loss_scale_KBS[1, 1:].eq(0).all()
    assert batch.labels_KBS[1, 0].equal(collate([first], 3, num_drafts=1).labels_KBS[1, 0])


def test_a_packed_row_of_nothing():
    for samples in ([], [EMPTY], [EMPTY, EMPTY]):
        batch = collate_packed(samples, 3, num_drafts=1, pad_each_to_multiple_of=4, pad_to_multiple_of=8)
        assert batch.cu_seqlens is not None
        assert set(batch.cu_seqlens.tolist()) == {0, 8}
        assert batch.labels_KBS.eq(-100).all()
        assert batch.num_tokens == 0
