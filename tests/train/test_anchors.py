"""Test the selection of positions from which block drafters draft."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from swiftlite.data.batch import Batch, collate, collate_packed
from swiftlite.data.sample import IGNORED, Sample, make_sample
from swiftlite.model.inputs import ModelInputs, Target
from swiftlite.train.batches.anchors import RUN, with_anchors
from tests.model.test_dflash import RANK, load, make


def make_sample_of(length: int, seed: int, first_label: int = 1) -> Sample:
    ids = np.random.default_rng(seed).integers(1, 100, length)
    return make_sample(ids, (np.arange(length) >= first_label).astype(float))


def selected(batch: Batch, share: float, step: int = 0) -> Batch:
    (found,) = with_anchors(lambda _: [batch], share, seed=7)(step)
    return found


def test_runs_are_selected_anew_in_each_step():
    samples = [make_sample_of(40 * RUN, 1, first_label=8 * RUN), make_sample_of(RUN // 2, 2)]
    batch = collate(samples, 0, num_drafts=2)
    steps = [selected(batch, 0.25, step) for step in range(3)]
    places = []
    for found in steps:
        assert torch.equal(found.labels_KBS[0], batch.labels_KBS[0])  # those of the trunk
        has_label = found.labels_KBS[1] != IGNORED
        assert torch.equal(found.labels_KBS[1:][:, has_label], batch.labels_KBS[1:][:, has_label])
        assert torch.equal(found.loss_scale_KBS[1] > 0, has_label)
        of_runs = has_label[0].unflatten(0, (-1, RUN))[8:-1]
        assert torch.equal(of_runs.all(dim=1), of_runs.any(dim=1))
        assert 7 <= int(of_runs.all(dim=1).sum()) <= 9
        places.append(of_runs.all(dim=1))
    assert not torch.equal(places[0], places[1])
    assert not torch.equal(places[1], places[2])


def test_all_positions_are_the_default():
    def get(step: int) -> list[Batch]:
        return []

    assert with_anchors(get, 1.0, seed=7) is get


def test_a_selection_does_not_depend_on_other_sequences():
    samples = [make_sample_of(4 * RUN, seed) for seed in range(4)]
    alone = [selected(collate([sample], 0, num_drafts=1), 0.5).labels_KBS[1, 0] for sample in samples]
    packed = selected(collate_packed(samples[::-1], 0, num_drafts=1), 0.5).labels_KBS[1, 0]
    assert torch.equal(packed, torch.cat(alone[::-1]))


@pytest.mark.parametrize("is_packed", [False, True])
def test_other_positions_change_nothing(is_packed, tmp_path, mesh):
    """Loss and gradients equal those of a drafter that drafts from all positions, whose other losses are ignored."""
    samples = [make_sample_of(length, length) for length in (90, 75)]
    batch = (collate_packed if is_packed else collate)(samples, 0, num_drafts=3)
    batch = selected(batch, 0.6, step=1)
    inputs, target = ModelInputs.of(batch), Target.of(batch)
    drafted = inputs.drafted()
    assert drafted is not None
    assert 0 < len(drafted) < batch.position_ids_BS.size(1)
    model = load(make(tmp_path, rank=RANK), mesh).train()
    results = []
    for given in (replace(inputs, head_labels=None), inputs):
        model.zero_grad()
        losses = model(given, target).mtp
        torch.stack([each.loss_BS.sum() for each in losses]).sum().backward()
        gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        results.append(([each.loss_BS.detach() for each in losses], gradients))
    (expected, gradients), (found, ours) = results
    for one, other in zip(expected, found, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-5, atol=1e-5)
    assert ours.keys() == gradients.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(ours[name], gradient, rtol=0, atol=2e-5 * float(gradient.abs().max()), msg=name)
