"""Test the divergence from a teacher (`TeacherTarget`) against its definition in float64."""

import shutil
from itertools import product

import pytest
import torch

from swiftlite.model.loss import chunked_loss, losses
from swiftlite.model.loss.chunked_loss import TeacherTarget
from tests.model.test_distillation import all_selected, peak_bytes

NUM_POSITIONS, VOCAB = 33, 1003
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="inductor compiles with g++")
CASES = list(product(("all logits", "chunks"), (0.0, 0.1, 0.5, 1.0)))
# Compiling takes seconds.
CASES += [pytest.param("compiled", 0.1, marks=needs_compiler)]
CASES += [pytest.param("compiled", beta, marks=[needs_compiler, pytest.mark.slow]) for beta in (0.0, 0.5, 1.0)]


def exact(student_NV: torch.Tensor, teacher_NV: torch.Tensor, beta: float) -> torch.Tensor:
    """Return the divergences [N] of logits by the definition."""
    log_s, log_t = student_NV.log_softmax(-1), teacher_NV.log_softmax(-1)
    s, t = log_s.exp(), log_t.exp()
    if beta == 0:
        return (t * (log_t - log_s)).sum(-1)
    if beta == 1:
        return (s * (log_s - log_t)).sum(-1)
    log_m = ((1 - beta) * s + beta * t).log()
    return beta * (t * (log_t - log_m)).sum(-1) + (1 - beta) * (s * (log_s - log_m)).sum(-1)


def compute(path: str, states: torch.Tensor, weight: torch.Tensor, target: TeacherTarget, mesh) -> losses.TokenLoss:
    """Return the losses on one of the paths of `GPTModel`."""
    selected = all_selected(len(states))
    if path == "all logits":
        kind, beta = target.distance, target.weight
        return losses.distillation_loss(states @ weight.T, target.logits, kind, selected, mesh.tp, beta=beta)
    with torch.compiler.set_stance("default" if path == "compiled" else "force_eager"):
        return chunked_loss.chunked_loss(states, weight, target, selected, mesh.tp)


@pytest.mark.parametrize(("path", "beta"), CASES)
def test_losses_and_gradients_are_those_of_float64(path, beta, mesh, monkeypatch):
    """The teacher has another hidden size. Some of its probabilities are 0 in float32."""
    monkeypatch.setattr(chunked_loss, "CHUNK", 20)  # and 13 are left
    monkeypatch.setattr(losses, "MAX_POSITIONS", 20)
    random = torch.Generator().manual_seed(1)
    states, weight = torch.randn(NUM_POSITIONS, 24, generator=random), 0.3 * torch.randn(VOCAB, 24, generator=random)
    teacher, output = torch.randn(NUM_POSITIONS, 40, generator=random), 0.3 * torch.randn(VOCAB, 40, generator=random)
    teacher[::4] *= 20  # logits up to 150
    share = torch.rand(NUM_POSITIONS, generator=random)
    ours, theirs = [], []
    for tensor in (states, weight):
        ours.append(tensor.clone().requires_grad_())
        theirs.append(tensor.double().requires_grad_())
    found = compute(path, ours[0], ours[1], TeacherTarget(teacher, output, beta), mesh)
    (found.loss_BS[0] * share).sum().backward()
    expected = exact(theirs[0] @ theirs[1].T, teacher.double() @ output.double().T, beta)
    (expected * share).sum().backward()
    # Sums of 1,003 terms in float32.
    torch.testing.assert_close(found.loss_BS[0].double(), expected, rtol=1e-5, atol=1e-5)
    for one, other in zip(ours, theirs, strict=True):
        assert one.grad is not None
        assert other.grad is not None
        torch.testing.assert_close(one.grad.double(), other.grad, rtol=0, atol=2e-5 * float(other.grad.abs().max()))
    assert torch.equal(found.prediction_BS[0], (states @ weight.T).argmax(-1))


def test_a_teacher_takes_no_memory_of_all_logits(mesh):
    """The teacher's logits exist for a few positions at a time, also if those of the model exist for all."""
    num_positions, vocab_size, hidden = 20 * losses.MAX_POSITIONS, 500, 8
    weight, teacher = torch.randn(vocab_size, hidden), torch.randn(num_positions, hidden)
    states = torch.randn(num_positions, hidden, requires_grad=True)
    target = TeacherTarget(teacher, torch.randn(vocab_size, hidden), 0.5)

    def step(path: str) -> None:
        compute(path, states, weight, target, mesh).loss_BS.sum().backward()

    step("all logits")  # what the first call allocates once
    all_logits = num_positions * vocab_size * 4
    assert peak_bytes(lambda: step("all logits")) <= 1.5 * all_logits
    assert peak_bytes(lambda: step("chunks")) <= 6 * chunked_loss.CHUNK * vocab_size * 4
