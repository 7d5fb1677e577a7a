"""Test chunked losses against the same losses from all logits: values, gradients, predictions, and memory."""

import re
import shutil
from typing import Any, get_args

import pytest
import torch
from torch._inductor.utils import run_and_get_code
from torch.utils.checkpoint import checkpoint

from swiftlite.args.fields import MtpLoss
from swiftlite.base.heads import Heads
from swiftlite.model.context_parallel import describe_packed
from swiftlite.model.inputs import ModelInputs, Target
from swiftlite.model.layers.tensor_parallel import add_product_
from swiftlite.model.loss import chunked_loss
from swiftlite.model.loss import losses as loss
from swiftlite.model.loss.chunked_loss import CHUNK, EntropyTarget, LabelTarget, TrunkTarget
from swiftlite.plan.kernels import Kernels
from tests.model.test_distillation import make_batch, peak_bytes
from tests.model.test_logits import load_megatron
from tests.model.traffic import Traffic
from tests.tiers import pairwise
from tests.tiny import make_tiny_hf

HEADS = {
    "two": Heads(2),
    "unrolled": Heads(1, unroll=2),
    "draft vocabulary": Heads(2, draft_vocab=tuple(range(3, 128, 5))),
}


@pytest.mark.parametrize(
    ("kind", "heads", "tied", "cap"), pairwise(get_args(MtpLoss), [*HEADS], [False, True], [None, 3.0])
)
def test_losses_and_gradients_are_those_from_all_logits(kind, heads, tied, cap, tmp_path, mesh, monkeypatch):
    """In chunks, the weights of the targets are known in the backward or in the forward pass.

    With a draft vocabulary, heads are trained with a distance and under a frozen trunk. Logits with a cap are divided
    by a temperature, after the cap.
    """
    is_frozen = heads == "draft vocabulary"
    if is_frozen and kind == "ce":
        pytest.skip("cross-entropy knows no draft vocabulary")
    monkeypatch.setattr(chunked_loss, "CHUNK", 4)  # of some 20 positions
    options = {} if cap is None else {"family": "gemma4_text", "final_logit_softcapping": cap}
    directory = make_tiny_hf(tmp_path, depth=HEADS[heads].layers, tied=tied, **options)
    temperature = 1.0 if cap is None else 0.7
    batch = make_batch(2, packed=True)
    tokens, positions, labels = batch.tokens_KBS, batch.position_ids_BS, batch.labels_KBS
    shares = torch.rand(labels.shape)  # of each target in the sum
    results = []
    for in_chunks, are_known in ((False, False), (True, False), (True, True)):
        model = load_megatron(directory, mesh, torch.float32, mtp_loss=kind, freeze_trunk=is_frozen, heads=HEADS[heads])
        model.loss_in_chunks, model.temperature = in_chunks, temperature
        found: Any = model(
            ModelInputs(
                tokens[0], positions, mtp_input_ids=tokens[1:], packed_seq_params=describe_packed(batch.cu_seqlens)
            ),
            Target(labels[0], labels[1:], with_entropy=not are_known, weights=list(shares) if are_known else None),
        )
        losses = [found.main, *found.mtp]
        learned = losses[1:] if is_frozen else losses
        assert all((one.total is not None) == (are_known and not is_frozen) for one in losses)
        parts = [
            (one.loss_BS * share).sum() if one.total is None else one.total
            for one, share in zip(learned, shares[-len(learned) :], strict=True)
        ]
        torch.stack(parts).sum().backward()
        gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        results.append((losses, gradients))
    (whole, expected), *in_chunks = results
    for chunked, ours in in_chunks:
        for one, other in zip(whole, chunked, strict=True):
            assert torch.equal(one.prediction_BS, other.prediction_BS)
            # The same sums over 128 words, of which megatron-core subtracts the target's logit elsewhere.
            torch.testing.assert_close(other.loss_BS, one.loss_BS, rtol=1e-6, atol=2e-6)
        assert ours.keys() == expected.keys()
        for name, gradient in expected.items():
            # Float32 sums in another order.
            torch.testing.assert_close(ours[name], gradient, rtol=0, atol=1e-5 * float(gradient.abs().max()) + 1e-9)
    torch.testing.assert_close(in_chunks[0][0][0].entropy_BS, whole[0].entropy_BS, rtol=1e-6, atol=2e-6)


@pytest.mark.parametrize("are_known", [False, True])
@pytest.mark.parametrize("is_trained", [False, True])
def test_columns_without_gradient(is_trained, are_known, mesh, monkeypatch):
    """Frozen columns of the output matrix: the same loss and gradients as with one matrix, except for theirs."""
    monkeypatch.setattr(chunked_loss, "CHUNK", 4)
    states_NH, weight_VH = torch.randn(10, 12), torch.randn(32, 12)
    label_BS, share_BS = torch.randint(0, 32, (2, 5)), torch.rand(2, 5)
    selected, group = loss.select(label_BS, states_NH.device), mesh.groups.tp
    results = []
    for width in (0, 8):
        states, trained = states_NH.clone().requires_grad_(), weight_VH[:, width:].clone().requires_grad_(is_trained)
        found = chunked_loss.chunked_loss(
            states,
            trained,
            LabelTarget(selected.label_N),
            selected,
            group,
            share_BS=share_BS if are_known else None,
            frozen_VH=weight_VH[:, :width] if width else None,
        )
        total = (found.loss_BS * share_BS).sum() if found.total is None else found.total
        total.backward()
        results.append((found.loss_BS, states.grad, trained.grad))
    (loss_BS, of_states, of_matrix), (ours_BS, our_states, our_matrix) = results
    torch.testing.assert_close(ours_BS, loss_BS)
    torch.testing.assert_close(our_states, of_states)
    if is_trained:
        torch.testing.assert_close(our_matrix, of_matrix[:, 8:])


@pytest.mark.parametrize("kind", ["ce", "lk_hybrid"])  # of the distances the one with the most tensors
def test_memory_is_that_of_one_chunk(kind, mesh):
    """The positions, 16,384, are split into four chunks.

    With cross-entropy, the logits of one chunk are in memory. With distances, the trunk's logits and one more tensor of
    this size are in memory as well, as without chunks.
    """
    num_positions, hidden, vocab_size = 4 * CHUNK, 16, 1 << 12
    weight = torch.randn(vocab_size, hidden, requires_grad=True)
    states = torch.randn(num_positions, hidden, requires_grad=True)
    selected = loss.select(torch.zeros(1, num_positions, dtype=torch.int64), weight.device)
    trunk = torch.randn(num_positions, hidden)

    def from_all_logits() -> None:
        if kind == "ce":
            found = loss.token_loss(states @ weight.T, selected, mesh.tp)
        else:
            rows = lambda rows: trunk[rows] @ weight.T  # noqa: E731
            found = loss.distillation_loss(states @ weight.T, rows, kind, selected, mesh.tp)
        found.loss_BS.sum().backward()

    def in_chunks() -> None:
        target = LabelTarget(selected.label_N) if kind == "ce" else TrunkTarget(trunk, kind, weight.detach())
        chunked_loss.chunked_loss(states, weight, target, selected, mesh.tp).loss_BS.sum().backward()

    in_chunks()  # what the first call allocates once
    logits_of_chunk = CHUNK * vocab_size * 4
    peaks = peak_bytes(from_all_logits) / logits_of_chunk, peak_bytes(in_chunks) / logits_of_chunk
    assert peaks[0] >= 4
    assert peaks[1] <= (1.1 if kind == "ce" else 3.1), peaks  # a tenth for what has no vocabulary


def test_kernels_say_so(tmp_path, mesh):
    directory = make_tiny_hf(tmp_path, "qwen3", depth=1)
    for is_fused in (False, True):
        kernels = Kernels(is_fused=is_fused)
        assert load_megatron(directory, mesh, torch.float32, kernels=kernels).loss_in_chunks is is_fused


def exact_loss(kind: str, states: torch.Tensor, weight: torch.Tensor, words: torch.Tensor, trunk: torch.Tensor) -> Any:
    """Compute the loss of the logits `states @ weight.T` by its definition, in the precision of the inputs."""
    log_h = (states @ weight.T).log_softmax(-1)
    if kind == "ce":
        return -log_h.gather(1, words[:, None])[:, 0]
    log_t = (trunk @ weight.T).detach().log_softmax(-1)
    h, t = log_h.exp(), log_t.exp()
    kl, overlap = (t * (log_t - log_h)).sum(-1), torch.minimum(h, t).sum(-1)
    share = torch.exp(-3 * overlap).detach()
    return {"kl": kl, "tv": 1 - overlap, "nla": -overlap.log(), "lk_hybrid": share * kl + (1 - share) * (1 - overlap)}[
        kind
    ]


COMPILED = [("ce", torch.bfloat16), ("lk_hybrid", torch.float32)]


def test_entropy_is_that_of_the_distribution(mesh, monkeypatch):
    monkeypatch.setattr(chunked_loss, "CHUNK", 4)
    # Large logits, so that some probabilities underflow.
    states, weight = torch.randn(10, 8) * 20, torch.randn(100, 8)
    log_p = (states.double() @ weight.T.double()).log_softmax(-1)
    expected = -(log_p.exp() * log_p).sum(-1)
    selected = loss.select(torch.zeros(1, 10, dtype=torch.int64), weight.device)
    target = LabelTarget(selected.label_N, torch.empty(10))
    found = chunked_loss.chunked_loss(states, weight, target, selected, mesh.tp).entropy_BS
    assert found is not None
    # Rounding of float32 logits up to 300 is 1.5e-5.
    torch.testing.assert_close(found[0].double(), expected, rtol=0, atol=1e-4)


def test_the_gradient_of_the_entropy_is_that_of_autograd(mesh, monkeypatch):
    logits = torch.randn(6, 50, dtype=torch.float64, requires_grad=True)
    expected = torch.distributions.Categorical(logits=logits).entropy()
    expected.sum().backward()
    gradient = logits.detach().clone()
    torch.testing.assert_close(loss.entropy_(gradient, None), expected.detach(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(gradient, logits.grad, rtol=1e-12, atol=1e-14)

    monkeypatch.setattr(chunked_loss, "CHUNK", 4)
    states, weight = (torch.randn(*size, requires_grad=True) for size in ((10, 8), (50, 8)))
    shares = torch.rand(10)
    selected = loss.select(torch.zeros(1, 10, dtype=torch.int64), weight.device)
    found = chunked_loss.chunked_loss(states, weight, EntropyTarget(), selected, mesh.tp).loss_BS[0]
    gradients = torch.autograd.grad((found * shares).sum(), (states, weight))
    wide = [each.detach().double().requires_grad_() for each in (states, weight)]
    by_autograd = torch.distributions.Categorical(logits=wide[0] @ wide[1].T).entropy()
    for ours, theirs in zip(gradients, torch.autograd.grad((by_autograd * shares).sum(), wide), strict=True):
        # Float32 products of up to 50 numbers.
        torch.testing.assert_close(ours.double(), theirs, rtol=0, atol=2e-6 * float(theirs.abs().max()))


needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="inductor compiles with g++")


@needs_compiler
@pytest.mark.parametrize("is_share_known", [False, True])
@pytest.mark.parametrize(("kind", "dtype"), COMPILED)
def test_the_compiled_loss_is_that_of_float64(kind, dtype, is_share_known, mesh, monkeypatch):
    """The loss is compiled by inductor as on a GPU, but to C++. The vocabulary is not divisible by a power of 2."""
    monkeypatch.setattr(chunked_loss, "CHUNK", 20)  # and 13 are left
    generator = torch.Generator().manual_seed(1)
    states, trunk = (torch.randn(33, 24, generator=generator).to(dtype) for _ in range(2))
    weight = torch.randn(1003, 24, generator=generator).to(dtype)
    words, share = torch.randint(0, 1003, (33,), generator=generator), torch.rand(33, generator=generator)
    selected = loss.select(words[None], weight.device)
    target = LabelTarget(words) if kind == "ce" else TrunkTarget(trunk, kind, weight.detach())
    ours = states.clone().requires_grad_(), weight.clone().requires_grad_()
    exact = states.double().requires_grad_(), weight.double().requires_grad_()
    with torch.compiler.set_stance("default"):
        found = chunked_loss.chunked_loss(
            *ours, target, selected, mesh.tp, share_BS=share[None] if is_share_known else None
        )
        total = (found.loss_BS[0] * share).sum() if found.total is None else found.total
        total.backward()
    expected = exact_loss(kind, *exact, words, trunk.double())
    (expected * share).sum().backward()
    # float32: sums of 1,003 terms. bfloat16: logits up to 20 are rounded to 2^-9 of themselves, gradients twice.
    bound = 1e-5 if dtype is torch.float32 else 2e-2
    torch.testing.assert_close(found.loss_BS[0].double(), expected, rtol=bound, atol=5 * bound)
    for one, other in zip(ours, exact, strict=True):
        assert one.grad is not None
        assert other.grad is not None
        assert float((one.grad.double() - other.grad).abs().max() / other.grad.abs().max()) < bound
    assert torch.equal(found.prediction_BS[0], (states @ weight.T).max(-1).indices)


@needs_compiler
def test_the_compiled_cross_entropy_keeps_no_probabilities():
    """The compiled code allocates no memory of the size of the logits (in float32, twice their size).

    It reads the logits three times, for maximum and prediction, for the sum and for the gradient, and writes them once.
    """
    logits = torch.randn(30, 1003).bfloat16()
    words = torch.randint(0, 1003, (30,))
    torch._dynamo.reset()
    with torch.compiler.set_stance("default"):
        label_logits = logits.gather(1, words[:, None])
        _, (code,) = run_and_get_code(chunked_loss._fused_cross_entropy_, logits, label_logits, words, None)
    allocated = re.findall(r"empty_strided_cpu\(\((.*?)\), \(", code)
    assert allocated
    assert all(sizes.replace(" ", "").endswith((",1", ",")) for sizes in allocated), allocated
    whole_vectors = r"[^;]*x1 [^;]*, static_cast<int64_t>\(\d+\)\)"  # of a row, without its end
    assert len(re.findall(rf"BFloat16>::loadu\({whole_vectors}", code)) == 3
    assert len(re.findall(rf"\.store\({whole_vectors}", code)) == 1


@pytest.mark.parametrize("kind", ["ce", "kl"])
def test_bytes_that_the_compiled_loss_moves(kind, mesh, monkeypatch):
    """In bfloat16, at most 10 bytes per logit are moved outside of matrix products, forward and backward.

    A compiled kernel reads the logits for the maximum and the prediction, for the sum, for the sum of a distance, and
    for the gradient, which overwrites them. `kl` has as many logits of the trunk. If the weights of positions are known
    only in the backward pass, the kernel runs twice. Without compilation, 100 and 128 bytes are moved then.
    """
    num_positions, hidden, vocab_size = 1024, 8, 4001
    weight = torch.randn(vocab_size, hidden).bfloat16().requires_grad_()
    states = torch.randn(num_positions, hidden).bfloat16().requires_grad_()
    selected = loss.select(torch.randint(0, vocab_size, (1, num_positions)), weight.device)
    trunk, share = torch.randn(num_positions, hidden).bfloat16(), torch.rand(1, num_positions)
    target = LabelTarget(selected.label_N) if kind == "ce" else TrunkTarget(trunk, kind, weight.detach())

    def uncounted(function: Any, *args: Any) -> Any:
        with traffic.uncounted():
            return function(*args)

    def as_one_kernel(function: Any, passes: int) -> Any:
        def run(*args: Any) -> Any:
            results = uncounted(function, *args)
            whole = [arg for arg in args if isinstance(arg, torch.Tensor) and arg.shape == args[0].shape]
            traffic.add("kernel", whole * passes, args[:1])
            return results

        return run

    moved = {}
    for name in ("not compiled", "compiled", "compiled, weights known"):
        with Traffic() as traffic, monkeypatch.context() as patches:
            # On a GPU a product of bfloat16 adds to float32. A CPU has to convert its factors.
            patches.setattr(chunked_loss, "add_product_", lambda *args: uncounted(add_product_, *args))
            if name != "not compiled":
                ce, distance = chunked_loss._whole_cross_entropy_, chunked_loss._distance_
                patches.setattr(chunked_loss, "_fused_cross_entropy_", as_one_kernel(ce, 3))
                patches.setattr(chunked_loss, "_fused_distance_", as_one_kernel(distance, 4))
            share_BS = share if name.endswith("known") else None
            found = chunked_loss.chunked_loss(states, weight, target, selected, mesh.tp, share_BS=share_BS)
            (found.loss_BS.sum() if found.total is None else found.total).backward()
        outside = sum(count for function, count in traffic.bytes.items() if "mm" not in function)
        num_logits = num_positions * vocab_size * (1 if kind == "ce" else 2)
        moved[name] = outside / num_logits
    assert moved["not compiled"] > 90, moved
    assert 15 < moved["compiled"] < 20, moved
    assert 7 < moved["compiled, weights known"] <= 10, moved


@pytest.mark.parametrize(("kind", "are_known"), pairwise(get_args(MtpLoss), [True, False]))
def test_the_gradient_of_the_matrix_is_summed_in_float32(kind, are_known, mesh):
    """With 8,192 positions, the error is 2e-6 of the largest element, the rounding of logits included."""
    generator = torch.Generator().manual_seed(1)
    states, trunk = (torch.randn(8192, 64, generator=generator) / 8 for _ in range(2))
    weight = torch.randn(2000, 64, generator=generator)
    words, share = torch.randint(0, 2000, (8192,), generator=generator), torch.rand(8192, generator=generator)
    selected = loss.select(words[None], weight.device)
    target = LabelTarget(words) if kind == "ce" else TrunkTarget(trunk, kind, weight)
    ours: Any = weight.clone().requires_grad_()
    ours.main_grad = torch.zeros_like(weight)
    found = chunked_loss.chunked_loss(
        states, ours, target, selected, mesh.tp, share_BS=share[None] if are_known else None, returns_gradient=False
    )
    assert (found.total is not None) == are_known
    total: Any = found.total if are_known else (found.loss_BS * share[None]).sum()
    total.backward()
    assert ours.grad is None
    exact = weight.double().requires_grad_()
    (exact_loss(kind, states.double(), exact, words, trunk.double()) * share).sum().backward()
    assert exact.grad is not None
    assert float((ours.main_grad.double() - exact.grad).abs().max() / exact.grad.abs().max()) <= 2e-6


def test_products_of_bfloat16_are_summed_in_float32():
    """The sum over eight chunks equals the exact sum up to 2e-6, where bfloat16 sums differ by more than 1e-3."""
    generator = torch.Generator().manual_seed(1)
    left, right = (torch.randn(8192, size, generator=generator).bfloat16() for size in (200, 64))
    exact = left.double().T @ right.double()
    errors = []
    for dtype in (torch.float32, torch.bfloat16):
        total = torch.zeros(200, 64, dtype=dtype)
        for left_part, right_part in zip(left.split(1024), right.split(1024), strict=True):
            add_product_(total, left_part.T, right_part)
        errors.append(float((total.double() - exact).abs().max() / exact.abs().max()))
    assert errors[0] <= 2e-6
    assert errors[1] > 1e-3


def test_main_grad_is_added_to_once(mesh):
    """Neither a pass without gradients nor recomputation adds to `main_grad`, and each micro-batch adds to it."""
    states, words = torch.randn(10, 8, requires_grad=True), torch.randint(0, 50, (10,))
    weight: Any = torch.randn(50, 8, requires_grad=True)
    selected = loss.select(words[None], weight.device)
    share = torch.rand(1, 10)

    def total(states: torch.Tensor) -> torch.Tensor:
        target = LabelTarget(words)
        found = chunked_loss.chunked_loss(
            states, weight, target, selected, mesh.tp, share_BS=share, returns_gradient=False
        )
        return (found.loss_BS * share).sum() if found.total is None else found.total

    total(states).backward()  # without `main_grad`, autograd gets the gradient
    expected, weight.grad = weight.grad, None
    weight.main_grad = torch.zeros_like(weight)
    with torch.no_grad():
        total(states)
    assert not weight.main_grad.any()
    checkpoint(total, states, use_reentrant=True).backward()
    assert torch.equal(weight.main_grad, expected)
    total(states).backward()
    # Float32 sums in another order.
    torch.testing.assert_close(weight.main_grad, 2 * expected, rtol=0, atol=1e-6 * float(expected.abs().max()))
    assert weight.grad is None
