"""Test `--mtp_unroll_weights joint` against the loss of the chain of drafts, computed from all logits in float64."""

from typing import Any

import numpy as np
import pytest
import torch

from swiftlite.base.heads import Heads
from swiftlite.data.batch import Batch, collate, collate_packed
from swiftlite.data.sample import make_sample
from swiftlite.model.context_parallel import describe_packed
from swiftlite.model.inputs import ModelInputs, Target
from swiftlite.model.loss import chunked_loss
from swiftlite.model.loss.losses import IGNORE_INDEX
from swiftlite.plan.heads import OVERLAP_LOSSES
from swiftlite.train.methods.mtp_loss import add_heads, chain_weights, count_labels, head_coefficients
from tests.model.test_distillation import DISTANCES
from tests.model.test_logits import load_megatron
from tests.tiers import once
from tests.tiny import make_tiny_hf

STEPS, SCALE = 3, 0.3
HEADS = Heads(1, STEPS, has_joint_weights=True)


def make_batch(packed: bool) -> Batch:
    """Return rows with a prompt at the start, and two of them with ignored tokens between the answers."""
    random = np.random.RandomState(0)
    samples = []
    for length, ignored in ((9, slice(5, 6)), (5, slice(0)), (14, slice(7, 10))):
        weights = np.ones(length, np.float32)
        weights[: length // 3] = 0
        weights[ignored] = 0
        samples.append(make_sample(random.randint(0, 128, length), weights))
    return (collate_packed if packed else collate)(samples, 0, num_drafts=STEPS)


def chains(batch: Batch) -> list[tuple[int, int, int]]:
    """Return row, position and length of each chain: the targets of successive drafts until one is ignored."""
    found = []
    is_target_KBS = (batch.labels_KBS[1:] != IGNORE_INDEX).tolist()
    for row, positions in enumerate(is_target_KBS[0]):
        for position in range(len(positions)):
            drafts = [of_draft[row][position] for of_draft in is_target_KBS] + [False]
            if drafts[0]:
                found.append((row, position, drafts.index(False)))
    return found


def chain_loss(distances: list[torch.Tensor], overlaps: list[torch.Tensor], batch: Batch, kind: str) -> torch.Tensor:
    """Return the sum over all chains by definition: `1 - sum_j(a_1 ... a_j) / K` for tv.

    For other distances, each draft has the derivative of this sum with respect to its overlap as a constant weight.
    """
    total, one = torch.zeros((), dtype=torch.float64), torch.ones((), dtype=torch.float64)
    for row, position, length in chains(batch):
        a = [overlap_BS[row, position] for overlap_BS in overlaps[:length]]
        products = [torch.stack(a[: j + 1]).prod() for j in range(length)]
        if kind == "tv":
            total = total + 1 - torch.stack(products).sum() / STEPS
            continue
        for draft in range(length):
            before, after = torch.stack([one, *a[:draft]]).prod(), torch.stack([one, *a[draft + 1 :]]).cumprod(0).sum()
            total = total + (before * after).detach() / STEPS * distances[draft][row, position]
    return total


@pytest.mark.parametrize(("kind", "packed", "in_chunks"), once([*OVERLAP_LOSSES], [False, True], [False, True]))
def test_gradients_are_those_of_the_chain(kind, packed, in_chunks, tmp_path, mesh, monkeypatch):
    monkeypatch.setattr(chunked_loss, "CHUNK", 4)
    directory = make_tiny_hf(tmp_path, "qwen3", depth=1)
    model = load_megatron(directory, mesh, torch.float32, mtp_loss=kind, freeze_trunk=True, heads=HEADS)
    model.loss_in_chunks = in_chunks
    batch = make_batch(packed)
    inputs: dict[str, Any] = {
        "mtp_input_ids": batch.tokens_KBS[1:],
        "packed_seq_params": describe_packed(batch.cu_seqlens),
    }
    targets, *of_heads = count_labels([batch], HEADS)[0].tolist()
    assert of_heads[0] == len(chains(batch)) > of_heads[2]
    coefficients = head_coefficients(HEADS, SCALE, of_heads, targets)
    labels = batch.labels_KBS
    losses = model(ModelInputs(batch.tokens_KBS[0], batch.position_ids_BS, **inputs), Target(labels[0], labels[1:]))
    add_heads(torch.zeros(()), losses, batch.loss_scale_KBS, coefficients).backward()
    ours = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    logits = model(ModelInputs(batch.tokens_KBS[0], batch.position_ids_BS, **inputs))
    trunk = logits.main.detach().double().log_softmax(-1)
    pairs = [(head.double().log_softmax(-1), trunk.roll(-depth, 1)) for depth, head in enumerate(logits.mtp, start=1)]
    overlaps = [1 - DISTANCES["tv"](*pair) for pair in pairs]
    expected = chain_loss([DISTANCES[kind](*pair) for pair in pairs], overlaps, batch, kind)
    (SCALE * targets / of_heads[0] * expected).backward()
    theirs = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert ours.keys() == theirs.keys()
    for name, gradient in theirs.items():
        assert gradient is not None
        # Ours are sums of float32 losses of 128 words; through three steps that feed each other, in another order.
        torch.testing.assert_close(ours[name], gradient, rtol=0, atol=2e-5 * float(gradient.abs().max()) + 1e-9)


def test_weights_are_derivatives_of_the_chain_in_float64():
    """The weights are sums of at most 6 products of 6 factors, so 1e-14 covers their rounding in float64."""
    torch.manual_seed(0)
    overlaps = [torch.rand(2, 50, dtype=torch.float64, requires_grad=True) for _ in range(6)]
    is_ignored = torch.rand(6, 2, 50) < 0.2  # an overlap of 0 ends the chain; it is no variable
    cut = [overlap.masked_fill(ignored, 0) for overlap, ignored in zip(overlaps, is_ignored, strict=True)]
    torch.stack(cut).cumprod(0).sum().backward()
    for overlap, weight, ignored in zip(overlaps, chain_weights([a.detach() for a in cut]), is_ignored, strict=True):
        assert overlap.grad is not None
        torch.testing.assert_close(weight.masked_fill(ignored, 0), overlap.grad, rtol=0, atol=1e-14)
    assert any(float(weight.max()) > 2 for weight in chain_weights([a.detach() for a in cut]))


def test_an_engine_never_reaches_a_draft_after_an_ignored_one():
    """Of three drafts whose second target is ignored, only the first is trained."""
    overlaps = [torch.tensor([[value]]) for value in (0.8, 0.0, 0.5)]
    assert [float(weight) for weight in chain_weights(overlaps)][::2] == [1.0, 0.0]
