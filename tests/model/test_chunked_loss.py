"""Losses in chunks against the same from all logits: values, gradients, predictions, and the memory of both."""

from typing import Any, get_args

import pytest
import torch

from swiftlite.args.fields import MtpLoss
from swiftlite.heads import Heads
from swiftlite.model import chunked_loss, loss
from swiftlite.model.chunked_loss import CHUNK, TrunkStates, Words
from swiftlite.model.context_parallel import describe_packed
from swiftlite.plan.kernels import Kernels
from tests.model.test_distillation import make_batch, peak_bytes
from tests.model.test_logits import load_megatron
from tests.tiny import make_tiny_hf

HEADS = {
    "two": Heads(2),
    "unrolled": Heads(1, unroll=2),
    "draft vocabulary": Heads(2, draft_vocab=tuple(range(3, 128, 5))),
}


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("kind", get_args(MtpLoss))
def test_losses_and_gradients_are_those_from_all_logits(kind, heads, tied, tmp_path, mesh, monkeypatch):
    """A draft vocabulary is learned by distances, under a frozen trunk."""
    is_frozen = heads == "draft vocabulary"
    if is_frozen and kind == "ce":
        pytest.skip("cross-entropy knows no draft vocabulary")
    monkeypatch.setattr(chunked_loss, "CHUNK", 4)  # of some 20 positions
    directory = make_tiny_hf(tmp_path, "qwen3", depth=HEADS[heads].layers, tied=tied)
    batch = make_batch(2, packed=True)
    tokens, positions, labels = batch.tokens_KBS, batch.position_ids_BS, batch.labels_KBS
    shares = torch.rand(labels.shape)  # of each target in the sum
    results = []
    for in_chunks in (False, True):
        model = load_megatron(directory, mesh, torch.float32, mtp_loss=kind, freeze_trunk=is_frozen, heads=HEADS[heads])
        model.loss_in_chunks = in_chunks
        found: Any = model(
            tokens[0],
            positions,
            labels=labels[0],
            mtp_input_ids=tokens[1:],
            mtp_labels=labels[1:],
            packed_seq_params=describe_packed(batch.cu_seqlens),
        )
        losses = [found.main, *found.mtp]
        learned = losses[1:] if is_frozen else losses
        parts = [(one.loss_BS * share).sum() for one, share in zip(learned, shares[-len(learned) :], strict=True)]
        torch.stack(parts).sum().backward()
        gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        results.append((losses, gradients))
    (whole, expected), (chunked, ours) = results
    for one, other in zip(whole, chunked, strict=True):
        assert torch.equal(one.prediction_BS, other.prediction_BS)
        # The same sums over 128 words, of which megatron-core subtracts the target's logit elsewhere.
        torch.testing.assert_close(other.loss_BS, one.loss_BS, rtol=1e-6, atol=2e-6)
    assert ours.keys() == expected.keys()
    for name, gradient in expected.items():
        # Float32 sums in another order.
        torch.testing.assert_close(ours[name], gradient, rtol=0, atol=1e-5 * float(gradient.abs().max()) + 1e-9)


@pytest.mark.parametrize("kind", ["ce", "lk_hybrid"])  # of the distances the one with the most tensors
def test_memory_is_that_of_one_chunk(kind, mesh):
    """Of eight chunks of positions: with cross-entropy the logits of one, with distances the trunk's beside them and
    one more of their size, as without chunks."""
    num_positions, hidden, vocab_size = 8 * CHUNK, 16, 1 << 12
    weight = torch.randn(vocab_size, hidden, requires_grad=True)
    states = torch.randn(num_positions, hidden, requires_grad=True)
    picked = loss.pick(torch.zeros(1, num_positions, dtype=torch.int64), weight.device)
    trunk = torch.randn(num_positions, hidden)

    def from_all_logits() -> None:
        if kind == "ce":
            found = loss.token_loss(states @ weight.T, picked, mesh.tp)
        else:
            rows = lambda rows: trunk[rows] @ weight.T  # noqa: E731
            found = loss.distillation_loss(states @ weight.T, rows, kind, picked, mesh.tp)
        found.loss_BS.sum().backward()

    def in_chunks() -> None:
        target = Words(picked.word_N) if kind == "ce" else TrunkStates(trunk, kind)
        chunked_loss.chunked_loss(states, weight, target, picked, mesh.tp).loss_BS.sum().backward()

    in_chunks()  # what the first call allocates once
    logits_of_chunk = CHUNK * vocab_size * 4
    peaks = peak_bytes(from_all_logits) / logits_of_chunk, peak_bytes(in_chunks) / logits_of_chunk
    assert peaks[0] >= 8
    assert peaks[1] <= (1.1 if kind == "ce" else 3.1), peaks  # a tenth for what has no vocabulary


def test_kernels_say_so(tmp_path, mesh):
    directory = make_tiny_hf(tmp_path, "qwen3", depth=1)
    for is_fused in (False, True):
        kernels = Kernels(is_fused=is_fused)
        assert load_megatron(directory, mesh, torch.float32, kernels=kernels).loss_in_chunks is is_fused
