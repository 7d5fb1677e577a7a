"""Test `--mtp_loss kl`, `tv`, `nla` and `lk_hybrid` against their definitions, computed from all logits."""

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import pytest
import torch

from swiftlite.base.heads import Heads
from swiftlite.data.batch import Batch, collate, collate_packed
from swiftlite.data.sample import make_sample
from swiftlite.model.context_parallel import describe_packed
from swiftlite.model.gpt import Logits
from swiftlite.model.inputs import ModelInputs, Target
from swiftlite.model.loss import losses as loss
from tests.model.test_logits import load_megatron
from tests.tiers import once
from tests.tiny import make_tiny_hf


def make_batch(depth: int, packed: bool) -> Batch:
    random = np.random.RandomState(0)
    samples = []
    for length in (9, 5, 12):
        weights = np.ones(length, np.float32)
        weights[: length // 3] = 0
        samples.append(make_sample(random.randint(0, 128, length), weights))
    return (collate_packed if packed else collate)(samples, 0, num_drafts=depth)


def all_selected(number: int) -> loss.Selected:
    """Return one row in which all `number` positions have the label 0."""
    return loss.select(torch.zeros(1, number, dtype=torch.int64), torch.device("cpu"))


def kl(head: torch.Tensor, trunk: torch.Tensor) -> torch.Tensor:
    return (trunk.exp() * (trunk - head)).sum(-1)


def overlap(head: torch.Tensor, trunk: torch.Tensor) -> torch.Tensor:
    return torch.minimum(trunk.exp(), head.exp()).sum(-1)


def lk_hybrid(head: torch.Tensor, trunk: torch.Tensor) -> torch.Tensor:
    weight = torch.exp(-3 * overlap(head, trunk)).detach()
    return weight * kl(head, trunk) + (1 - weight) * (1 - overlap(head, trunk))


# Each takes log-probabilities [..., V] of head and trunk.
DISTANCES = {
    "kl": kl,
    "tv": lambda head, trunk: (trunk.exp() - head.exp()).abs().sum(-1) / 2,
    "nla": lambda head, trunk: -overlap(head, trunk).log(),
    "lk_hybrid": lk_hybrid,
}


def dense_losses(logits: Logits, batch: Batch, kind: str, tokens: Sequence[int]) -> list[torch.Tensor]:
    """Return the losses [B, S] of each depth k.

    At position s, the head's distribution of token s + k + 1 is compared with the trunk's distribution, computed at s +
    k.

    Args:
        tokens: the tokens that both distributions are restricted to.
    """
    trunk = logits.main.detach().double()[..., tokens].log_softmax(-1)
    losses = []
    for depth, head in enumerate(logits.mtp, start=1):
        target = trunk.roll(-depth, dims=1)
        head = head.double()[..., tokens].log_softmax(-1)
        losses.append(DISTANCES[kind](head, target) * (batch.labels_KBS[depth] != -100))
    return losses


@pytest.mark.parametrize(("kind", "packed", "heads_only"), once([*DISTANCES], [False, True], [False, True]))
def test_losses_and_gradients_equal_the_dense_definition(kind, packed, heads_only, tmp_path, mesh, monkeypatch):
    monkeypatch.setattr(loss, "MAX_POSITIONS", 3)
    directory = make_tiny_hf(tmp_path, "qwen3", depth=2)
    model = load_megatron(directory, mesh, torch.float32, mtp_loss=kind, freeze_trunk=heads_only)
    batch = make_batch(2, packed)
    tokens, positions, labels = batch.tokens_KBS, batch.position_ids_BS, batch.labels_KBS
    inputs: dict[str, Any] = {"mtp_input_ids": tokens[1:], "packed_seq_params": describe_packed(batch.cu_seqlens)}
    ours = model(ModelInputs(tokens[0], positions, **inputs), Target(labels[0], mtp_labels=labels[1:]))
    torch.stack([head.loss_BS.sum() for head in ours.mtp]).sum().backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    assert {name.startswith("mtp.") for name in gradients} == ({True} if heads_only else {True, False})
    model.zero_grad(set_to_none=True)
    expected = dense_losses(model(ModelInputs(tokens[0], positions, **inputs)), batch, kind, range(128))
    for head, dense in zip(ours.mtp, expected, strict=True):
        # The definition is in float64: 1e-6 is what float32 logits of some tens leave of a loss of ten.
        torch.testing.assert_close(head.loss_BS.double(), dense, rtol=1e-5, atol=1e-6)
        assert float(dense.sum()) > 0.5
    torch.stack(expected).sum().backward()
    for name, gradient in gradients.items():
        theirs = dict(model.named_parameters())[name].grad
        assert theirs is not None
        # Float32 sums in another order.
        torch.testing.assert_close(gradient, theirs, rtol=0, atol=2e-5 * float(theirs.abs().max()) + 1e-9)


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("kind", ["kl", "nla"])
def test_a_draft_vocabulary_is_all_that_heads_know(kind, tied, tmp_path, mesh):
    """Losses, gradients and predictions are computed over the draft vocabulary only."""
    drafted = tuple(range(3, 128, 5))
    directory = make_tiny_hf(tmp_path, "qwen3", depth=2, tied=tied)
    models = {
        vocab: load_megatron(
            directory, mesh, torch.float32, mtp_loss=kind, freeze_trunk=True, heads=Heads(2, draft_vocab=vocab)
        )
        for vocab in ((), drafted)
    }
    batch = make_batch(2, packed=False)
    tokens, positions, labels = batch.tokens_KBS, batch.position_ids_BS, batch.labels_KBS
    ours = models[drafted](
        ModelInputs(tokens[0], positions, mtp_input_ids=tokens[1:]), Target(labels[0], mtp_labels=labels[1:])
    )
    torch.stack([head.loss_BS.sum() for head in ours.mtp]).sum().backward()
    logits = models[()](ModelInputs(tokens[0], positions, mtp_input_ids=tokens[1:]))
    expected = dense_losses(logits, batch, kind, drafted)
    torch.stack(expected).sum().backward()
    for depth, (head, dense) in enumerate(zip(ours.mtp, expected, strict=True), start=1):
        torch.testing.assert_close(head.loss_BS.double(), dense, rtol=1e-5, atol=1e-6)
        likeliest = torch.tensor(drafted)[logits.mtp[depth - 1][..., drafted].argmax(-1)]
        assert torch.equal(head.prediction_BS, likeliest.where(labels[depth] != -100, -1))
    whole = dict(models[()].named_parameters())
    for name, parameter in models[drafted].named_parameters():
        if parameter.grad is not None:
            theirs = whole[name].grad
            assert theirs is not None
            torch.testing.assert_close(parameter.grad, theirs, rtol=0, atol=2e-5 * float(theirs.abs().max()) + 1e-9)


@pytest.mark.parametrize("kind", DISTANCES)
def test_a_head_that_is_the_trunk_has_no_loss(kind, mesh):
    logits = torch.randn(7, 50)
    selected = all_selected(7)
    head = logits.clone().requires_grad_()
    # A constant on all logits is the same distribution.
    found = loss.distillation_loss(head * 1.0, lambda rows: logits[rows] + 3, kind, selected, mesh.tp)
    found.loss_BS.sum().backward()
    torch.testing.assert_close(found.loss_BS, torch.zeros(1, 7), rtol=0, atol=1e-6)
    assert torch.equal(found.prediction_BS[0], logits.argmax(-1))
    other = loss.distillation_loss(head * 2.0, lambda rows: logits[rows], kind, selected, mesh.tp)
    assert float(other.loss_BS.min()) > 0.01


def test_total_variation_is_what_rejection_sampling_rejects(mesh):
    """A draft x from q is accepted with probability min(1, p(x) / q(x)).

    The loss equals the share of rejected drafts.
    """
    torch.manual_seed(0)
    p, q = torch.randn(20).softmax(-1), torch.randn(20).softmax(-1)
    drafts = torch.multinomial(q, 1_000_000, replacement=True)
    kept = torch.rand(len(drafts)) < p[drafts] / q[drafts]
    found = loss.distillation_loss(q.log()[None], lambda rows: p.log()[None], "tv", all_selected(1), mesh.tp).loss_BS
    assert float(found) == pytest.approx(1 - float(kept.float().mean()), abs=0.002)  # four standard deviations


def test_nla_teaches_a_head_that_says_nothing_of_what_the_trunk_says(mesh):
    """If the overlap of head and trunk is e^-40, the gradient of tv is as small, but the gradient of nla is not.

    If the overlap is e^-200, which is 0 in float32, the gradient is 0 and not NaN.
    """
    one = all_selected(1)
    for distance, expected in ((40.0, [-1.0, 1.0]), (200.0, [0.0, 0.0])):
        head = torch.tensor([[0.0, distance]], requires_grad=True)
        loss.distillation_loss(
            head * 1.0, lambda rows: torch.tensor([[300.0, 0.0]]), "nla", one, mesh.tp
        ).loss_BS.sum().backward()
        assert head.grad is not None
        torch.testing.assert_close(head.grad, torch.tensor([expected]))


def peak_bytes(compute: Callable[[], object]) -> int:
    """Return the peak bytes of the tensors that are allocated in a call."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        compute()
    assert profile.profiler is not None
    events: Any = profile.profiler.kineto_results
    changes = [(event.start_ns(), event.nbytes()) for event in events.events() if event.name() == "[memory]"]
    return max(accumulate(change for _, change in sorted(changes)))


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [("kl", torch.bfloat16), ("tv", torch.float32), ("nla", torch.float32), ("lk_hybrid", torch.bfloat16)],
)
def test_memory_is_that_of_cross_entropy_and_one_call_of_the_trunk(kind, dtype, mesh):
    num_positions, vocab_size, hidden = 8 * loss.MAX_POSITIONS, 2048, 16
    weight = torch.randn(vocab_size, hidden, dtype=dtype, requires_grad=True)
    head = torch.randn(num_positions, hidden, dtype=dtype, requires_grad=True)
    trunk, selected = torch.randn(num_positions, hidden, dtype=dtype), all_selected(num_positions)

    def cross_entropy() -> None:
        loss.token_loss(head @ weight.T, selected, mesh.tp).loss_BS.sum().backward()

    def distillation() -> None:
        found = loss.distillation_loss(head @ weight.T, lambda rows: trunk[rows] @ weight.T, kind, selected, mesh.tp)
        found.loss_BS.sum().backward()

    cross_entropy()  # what the first call allocates once
    one_call = loss.MAX_POSITIONS * vocab_size * 4
    ce, distilled = peak_bytes(cross_entropy), peak_bytes(distillation)
    assert ce >= 8 * one_call
    # The trunk's logits and one more of their size; a hundredth for what has no vocabulary.
    assert distilled - ce <= 2.01 * one_call, (ce / one_call, distilled / one_call)
