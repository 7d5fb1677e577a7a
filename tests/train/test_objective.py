"""Test the loss of a global batch against a simple implementation, and what it must not depend on."""

import json

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from swiftlite.acceptance.statistics import depth_sums, means
from swiftlite.base.heads import Heads
from swiftlite.data.batch import Batch, collate
from swiftlite.data.sample import Sample, make_sample
from swiftlite.model.gpt import Losses
from swiftlite.model.inputs import ModelInputs, Target
from swiftlite.model.stage_states import StageStates
from swiftlite.runtime.mesh import Mesh
from swiftlite.train.methods.mtp_loss import head_coefficients
from swiftlite.train.methods.next_token import NextTokenObjective, total_loss
from tests.model.test_logits import load_megatron
from tests.tiny import make_tiny_hf

SCALE = 0.3


def make_samples(num: int, seed: int = 0) -> list[Sample]:
    """Return rows of odd lengths whose first third is a prompt. Some labels have the weight 0.5."""
    random = np.random.RandomState(seed)
    samples = []
    for _ in range(num):
        length = random.randint(4, 14)
        weights = random.choice([0.5, 1.0, 2.0], length).astype(np.float32)
        weights[: length // 3 + 1] = 0
        samples.append(make_sample(random.randint(0, 128, length), weights))
    return samples


def coefficients_of(objective: NextTokenObjective, counts: torch.Tensor) -> list[float]:
    """Return the coefficient of each MTP depth's loss."""
    trunk, *heads = counts[0].tolist()
    return head_coefficients(objective.heads, SCALE, heads, trunk)


def batch_loss_and_gradients(model, batches: list[Batch], depth: int, mesh: Mesh):
    """Return the loss and the gradients of all micro-batches, divided by the trunk's targets as megatron-core does."""
    objective = NextTokenObjective(Heads(depth), SCALE)
    counts = objective.count_targets(batches)
    coefficients = coefficients_of(objective, counts)
    model.zero_grad()
    parts, total = [], 0.0
    for batch in batches:
        losses = model(ModelInputs(batch.tokens_KBS[0], batch.position_ids_BS), Target(batch.labels_KBS[0]))
        loss = total_loss(losses, batch.loss_scale_KBS, coefficients)
        loss.backward()
        total += float(loss.detach())
        parts.append(depth_sums(losses, batch.loss_scale_KBS, mesh))
    main = max(int(counts[0, 0]), 1)
    return total / main, {name: p.grad / main for name, p in model.named_parameters() if p.grad is not None}, parts


def naive_loss(model, samples: list[Sample], depth: int) -> torch.Tensor:
    """Compute the loss by its definition, one target at a time: depth k at position s predicts token s + k + 1."""
    sums, counts = [torch.zeros(())] * (depth + 1), [0] * (depth + 1)
    for sample in samples:
        ids = torch.from_numpy(sample.input_ids).long()[None]
        logits = model(ModelInputs(ids, torch.arange(ids.size(1))[None]))
        for k, head in enumerate((logits.main, *logits.mtp)):
            for position in range(len(sample) - k - 1):
                target = position + k + 1
                if sample.labels[target] != -100:
                    weight = float(sample.loss_scale[target])
                    sums[k] = sums[k] + weight * F.cross_entropy(head[0, position].float(), ids[0, target])
                    counts[k] += 1
    mtp = sum(s / c for s, c in zip(sums[1:], counts[1:], strict=True) if c)
    return sums[0] / counts[0] + SCALE / depth * mtp


@pytest.fixture(params=[1, 2], ids=["depth1", "depth2"])
def model_and_depth(request, tmp_path, mesh):
    directory = make_tiny_hf(tmp_path, "qwen3", depth=request.param)
    return load_megatron(directory, mesh, torch.float32).train(), request.param


def assert_same_gradients(ours, theirs):
    assert ours.keys() == theirs.keys()
    for name, gradient in ours.items():
        # Float32 sums in another order: 1e-5 of the largest entry.
        torch.testing.assert_close(gradient, theirs[name], rtol=0, atol=1e-5 * float(gradient.abs().max()) + 1e-9)


def test_loss_and_gradients_equal_the_naive_definition(model_and_depth, mesh):
    model, depth = model_and_depth
    samples = make_samples(6)
    loss, gradients, _ = batch_loss_and_gradients(model, [collate(samples, 0, num_drafts=depth)], depth, mesh)
    model.zero_grad()
    expected = naive_loss(model, samples, depth)
    expected.backward()
    assert loss == pytest.approx(float(expected.detach()), rel=1e-5)
    assert_same_gradients(gradients, {name: p.grad for name, p in model.named_parameters() if p.grad is not None})


@pytest.mark.parametrize("cut", [[6], [3, 3], [1] * 6, [2, 3, 1]], ids=str)
def test_nothing_depends_on_micro_batches_or_padding(model_and_depth, cut, mesh):
    model, depth = model_and_depth
    samples = make_samples(6)
    whole = batch_loss_and_gradients(model, [collate(samples, 0, num_drafts=depth)], depth, mesh)
    batches, start = [], 0
    for size in cut:
        batches.append(collate(samples[start : start + size], 7, num_drafts=depth, pad_to_multiple_of=8))
        start += size
    parts = batch_loss_and_gradients(model, batches, depth, mesh)
    assert parts[0] == pytest.approx(whole[0], rel=1e-5)
    assert_same_gradients(parts[1], whole[1])
    sums = sum(parts[2])
    torch.testing.assert_close(sums, whole[2][0], rtol=1e-5, atol=0)


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_gradient_is_zero_where_the_target_is_not_a_label(tmp_path, mesh, depth):
    model = load_megatron(make_tiny_hf(tmp_path, "qwen3", depth=depth), mesh, torch.float32)
    samples = make_samples(3)
    batch = collate(samples, 0, num_drafts=depth)
    rotary = model.rotary_emb(ModelInputs.of(batch))
    hidden = model.forward_preprocess(batch.tokens_KBS[0], batch.position_ids_BS)
    hidden = model.forward_decoder(hidden, rotary)
    heads = [
        head.detach().requires_grad_()
        for head in model.forward_mtp(hidden, list(batch.tokens_KBS[1:]), batch.position_ids_BS, lambda offset: rotary)
    ]
    states = StageStates(hidden.detach(), heads_SBH=heads)
    losses = model.forward_postprocess(states, Target(batch.labels_KBS[0], batch.labels_KBS[1:]))
    assert isinstance(losses, Losses)
    objective = NextTokenObjective(Heads(depth), SCALE)
    coefficients = coefficients_of(objective, objective.count_targets([batch]))
    total_loss(losses, batch.loss_scale_KBS, coefficients).backward()
    seen = 0
    for k, head in enumerate(heads, start=1):
        assert head.grad is not None
        touched = head.grad.abs().sum(-1).transpose(0, 1) != 0
        for row, sample in enumerate(samples):
            for position in range(batch.tokens_KBS[0].size(1)):
                target = position + k + 1
                is_label = target < len(sample) and sample.labels[target] != -100
                assert bool(touched[row, position]) == bool(is_label), (k, row, position)
                seen += is_label
    assert seen > 0


def test_a_batch_without_labels_is_zero_not_nan(model_and_depth, mesh):
    model, depth = model_and_depth
    prompt_only = make_sample(np.arange(9), np.zeros(9, np.float32))
    loss, gradients, parts = batch_loss_and_gradients(
        model, [collate([prompt_only, make_sample([], [])], 0, num_drafts=depth)], depth, mesh
    )
    assert loss == 0
    assert all(float(gradient.abs().max()) == 0 for gradient in gradients.values())
    assert all(value == 0 for value in means(parts[0]).values())


def test_prompt_tokens_do_not_change_the_mtp_targets(model_and_depth, mesh):
    """Prompt tokens have no labels, so another token or weight in the prompt changes no target."""
    model, depth = model_and_depth
    sample = make_samples(1)[0]
    weights = sample.loss_scale.copy()
    other = Sample(sample.input_ids, sample.labels, np.where(weights == 0, 5.0, weights).astype(np.float32))
    first = batch_loss_and_gradients(model, [collate([sample], 0, num_drafts=depth)], depth, mesh)
    second = batch_loss_and_gradients(model, [collate([other], 0, num_drafts=depth)], depth, mesh)
    assert first[0] == second[0]
    assert all(torch.equal(first[1][name], second[1][name]) for name in first[1])


def test_the_second_depth_teaches_the_first(tmp_path, mesh):
    """Depth 2 reads depth 1's state, so its loss has gradients in depth 1; nothing is detached between depths."""
    model = load_megatron(make_tiny_hf(tmp_path, "qwen3", depth=2), mesh, torch.float32)
    batch = collate(make_samples(3), 0, num_drafts=2)
    losses = model(ModelInputs(batch.tokens_KBS[0], batch.position_ids_BS), Target(batch.labels_KBS[0]))
    losses.mtp[1].loss_BS.sum().backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if name.startswith("mtp.layers.0.")}
    assert all(gradient is not None and float(gradient.abs().max()) > 0 for gradient in gradients.values())


def test_heads_only_trains_mtp_and_nothing_else(tmp_path, mesh):
    directory = make_tiny_hf(tmp_path, "qwen3", depth=2)
    model = load_megatron(directory, mesh, torch.float32, freeze_trunk=True)
    joint = load_megatron(directory, mesh, torch.float32)
    batch = collate(make_samples(3), 0, num_drafts=2)
    losses = model(ModelInputs(batch.tokens_KBS[0], batch.position_ids_BS), Target(batch.labels_KBS[0]))
    expected = joint(ModelInputs(batch.tokens_KBS[0], batch.position_ids_BS), Target(batch.labels_KBS[0]))
    assert losses.main.loss_BS.grad_fn is None  # no graph through the trunk
    for head, reference in zip(losses.mtp, expected.mtp, strict=True):
        assert torch.equal(head.loss_BS, reference.loss_BS)
    torch.stack([head.loss_BS.sum() for head in losses.mtp]).sum().backward()
    assert {name for name, p in model.named_parameters() if p.grad is not None} == {
        name for name, _ in model.named_parameters() if name.startswith("mtp.")
    }


def test_acceptance_counts_agreement_with_the_trunk(tmp_path, mesh):
    """The head at s predicts token s + 2; the trunk's prediction of the same token is at s + 1."""
    directory = make_tiny_hf(tmp_path, "qwen3", depth=1)
    assert json.loads((directory / "config.json").read_text())["num_nextn_predict_layers"] == 1
    model = load_megatron(directory, mesh, torch.float32)
    samples = make_samples(5)
    batch = collate(samples, 0, num_drafts=1)
    with torch.no_grad():
        logits = model(ModelInputs(batch.tokens_KBS[0], batch.position_ids_BS))
        losses = model(ModelInputs(batch.tokens_KBS[0], batch.position_ids_BS), Target(batch.labels_KBS[0]))
    trunk, head = logits.main.argmax(-1), logits.mtp[0].argmax(-1)
    hits = targets = 0
    for row, sample in enumerate(samples):
        for position in range(len(sample) - 2):
            if sample.labels[position + 2] != -100:
                targets += 1
                hits += int(head[row, position] == trunk[row, position + 1])
    assert depth_sums(losses, batch.loss_scale_KBS, mesh)[1, 1:].tolist() == [targets, hits]
