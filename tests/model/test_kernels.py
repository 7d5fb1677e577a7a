"""Fused kernels on a CPU: what they compute, and that no layer asks the host for anything, or copies to the device."""

from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.fusions.fused_bias_swiglu import bias_swiglu_impl
from megatron.core.transformer import mlp
from torch.utils._python_dispatch import TorchDispatchMode

from swiftlite.acceptance import statistics
from swiftlite.heads import Heads
from swiftlite.model import gpt, rope
from swiftlite.model import norm as norm_module
from swiftlite.model.attention import CoreAttention, offsets, slices_of
from swiftlite.model.context_parallel import causal_segments, describe_packed
from swiftlite.model.head_size import fill_values
from swiftlite.plan.kernels import Kernels
from swiftlite.train.objective import total_loss
from tests.model.test_attention import varlen
from tests.model.test_distillation import make_batch
from tests.model.test_logits import load_megatron
from tests.model.traffic import Traffic
from tests.tiny import make_tiny_hf

FUSED = Kernels(is_fused=True)
# Each makes a GPU's queue run dry: its result, or the size of it, must come to the host first.
WAITING = (
    "aten._local_scalar_dense",
    "aten.nonzero",
    "aten.item",
    "aten.masked_select",
    "aten.masked_scatter_backward",  # which is a masked_select
)


class Operations(TorchDispatchMode):
    """Counts operations."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        name = str(func)
        moves = name.startswith("aten._to_copy") and (kwargs or {}).get("device") not in (None, args[0].device)
        self.counts["to another device" if moves else name] += 1
        if name.startswith("aten.index"):  # by a mask: how many entries it has must be known
            indices = args[1] if isinstance(args[1], (list, tuple)) else []
            is_mask = [index is not None and index.dtype is torch.bool for index in indices]
            self.counts["aten.nonzero of an index"] += any(is_mask)
        return out

    @property
    def waiting(self) -> dict[str, int]:
        of_host = (*WAITING, "to another device", "aten.lift_fresh")  # torch.tensor(...) of numbers
        return {name: count for name, count in self.counts.items() if count and name.startswith(of_host)}


def run(model: Any, packed: bool) -> torch.Tensor:
    batch = make_batch(1, packed)
    tokens, positions, labels = batch.tokens_KBS, batch.position_ids_BS, batch.labels_KBS
    found: Any = model(
        tokens[0],
        positions,
        labels=labels[0],
        mtp_input_ids=tokens[1:],
        mtp_labels=labels[1:],
        packed_seq_params=describe_packed(batch.cu_seqlens),
    )
    return found.main.loss_BS.sum() + found.mtp[0].loss_BS.sum()


@pytest.fixture
def load(tmp_path, mesh):
    def load(family: str, kernels: Kernels, dtype: torch.dtype = torch.float32, **options: Any):
        directory = make_tiny_hf(tmp_path / f"{family}{len(options)}", family, depth=1, **options)
        return load_megatron(directory, mesh, dtype, kernels=kernels)

    return load


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "deepseek_v3", "qwen3_next"])
def test_fused_kernels_compute_the_same(family, load):
    """In float32 up to roundings; parameters have the same names."""
    plain, fused = load(family, Kernels()), load(family, FUSED)
    assert list(plain.state_dict()) == list(fused.state_dict())
    losses = [run(model, packed=family != "qwen3_next") for model in (plain, fused)]
    torch.testing.assert_close(losses[1], losses[0], rtol=2e-6, atol=0)
    for loss in losses:
        loss.backward()
    ours = dict(fused.named_parameters())
    for name, parameter in plain.named_parameters():
        theirs, gradient = parameter.grad, ours[name].grad
        if theirs is not None:
            assert gradient is not None, name
            # Measured up to 3.5e-6 (qwen3_next).
            torch.testing.assert_close(gradient, theirs, rtol=0, atol=1e-5 * float(theirs.abs().max()) + 1e-9)


def test_a_fused_norm_rounds_once(mesh):
    """In bfloat16 transformers rounds before it multiplies by the weight, and after; the fused norm after alone."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    from swiftlite.model.norm import FusedRMSNorm, RMSNorm

    config = TransformerConfig(num_layers=1, hidden_size=64, num_attention_heads=4, params_dtype=torch.bfloat16)
    hidden = torch.randn(50, 64, dtype=torch.bfloat16)
    for is_zero_centered in (False, True):
        config.layernorm_zero_centered_gamma = is_zero_centered
        plain, fused = RMSNorm(config, 64), FusedRMSNorm(config, 64)
        weight = torch.randn(64, dtype=torch.bfloat16)
        for norm in (plain, fused):
            norm.weight.data = weight
        exact = hidden.double() * torch.rsqrt(hidden.double().pow(2).mean(-1, keepdim=True) + 1e-5)
        exact = exact * (weight.double() + is_zero_centered)
        # Half an ulp of bfloat16's 8 bits for each rounding: of the result, and of 1 + weight.
        roundings = 2 if is_zero_centered else 1
        torch.testing.assert_close(fused(hidden).double(), exact, rtol=roundings * 2**-8, atol=1e-6)
        torch.testing.assert_close(plain(hidden), fused(hidden), rtol=2**-6, atol=1e-6)


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("family", ["qwen3", "deepseek_v3"])
def test_a_layer_asks_the_host_for_nothing(family, packed, load):
    """With 4 layers as many operations that wait as with 2: none is a layer's. Of the dense layers: a mixture's router
    says how many tokens are whose, and experts are called one by one."""
    counted = []
    for num_layers in (2, 4):
        sizes = {"num_hidden_layers": num_layers}
        if family == "deepseek_v3":
            sizes["first_k_dense_replace"] = num_layers - 1
        model = load(family, FUSED, **sizes)
        for module in model.modules():
            if isinstance(module, CoreAttention):
                # What the reference in torch asks is not asked on a GPU.
                module.varlen = fill_values(without_counting(varlen))
        offsets.cache_clear()
        with Operations() as operations:
            run(model, packed).backward()
        counted.append(operations.waiting)
    assert counted[0] == counted[1]


@pytest.mark.parametrize("kernels", [Kernels(), FUSED], ids=["all logits", "in chunks"])
@pytest.mark.parametrize(("mtp_loss", "drafted"), [("ce", ()), ("kl", ()), ("kl", tuple(range(3, 128, 5)))])
def test_the_loss_waits_for_nothing(mtp_loss, drafted, kernels, tmp_path, mesh, monkeypatch):
    """From states to gradients and statistics. The labels are on the host (`on_this_rank`), where what is made of them
    may be asked for."""
    model = load_megatron(
        make_tiny_hf(tmp_path, "qwen3", depth=1),
        mesh,
        torch.float32,
        kernels=kernels,
        heads=Heads(1, draft_vocab=drafted),
        mtp_loss=mtp_loss,
        freeze_trunk=mtp_loss == "kl",
    )
    monkeypatch.setattr(gpt, "pick", without_counting(gpt.pick))
    monkeypatch.setattr(gpt, "zigzag_positions", without_counting(gpt.zigzag_positions))
    # It puts one number where a mask says, which a GPU does without waiting.
    stock = tensor_parallel.vocab_parallel_cross_entropy
    monkeypatch.setattr(tensor_parallel, "vocab_parallel_cross_entropy", without_counting(stock))
    for packed in (False, True):
        batch = make_batch(1, packed)
        num_rows, length = batch.position_ids_BS.shape
        states_SBH = [torch.randn(length, num_rows, 64, requires_grad=True) for _ in range(2)]
        with Operations() as operations:
            losses: Any = model.forward_postprocess(states_SBH, list(batch.labels_KBS), batch.cu_seqlens)
            total_loss(losses, batch.loss_scale_KBS, [0.3]).backward()
            statistics.sum_up(losses, batch.loss_scale_KBS, mesh, batch.cu_seqlens)
        assert operations.waiting == {}
        assert states_SBH[1].grad is not None


def without_counting(function: Callable[..., Any]) -> Callable[..., Any]:
    """What a function does is the host's own, or one kernel."""
    from torch.utils._python_dispatch import _disable_current_modes

    def uncounted(*args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes():
            return function(*args, **kwargs)

    return uncounted


TOKENS = 26  # of `make_batch`
SIZE = 4  # bytes of a number
HIDDEN, QUERIES, KEYS, FFN, HEAD = 64, 2 * 32, 32, 96, 32  # sizes of the tiny Qwen3


def layer_traffic() -> int:
    """Bytes that a layer moves, forward and backward, where each of its parts reads what it needs and writes what it
    makes once."""
    matrices = [(HIDDEN, QUERIES + 2 * KEYS), (QUERIES, HIDDEN), (HIDDEN, 2 * FFN), (FFN, HIDDEN)]
    # A product, the gradient of its input, and of its weight: each reads two of the three and writes the third.
    products = sum(3 * (TOKENS * (size_in + size_out) + size_in * size_out) for size_in, size_out in matrices)
    # Of states twice, of queries, of keys: 2 forward and 3 backward, with their weights.
    norms = 5 * TOKENS * (2 * HIDDEN + QUERIES + KEYS) + 3 * (2 * HIDDEN + 2 * HEAD)
    activation = (3 + 5) * TOKENS * FFN
    attention = TOKENS * (2 * QUERIES + 2 * KEYS) + TOKENS * (3 * QUERIES + 4 * KEYS)
    # Queries and keys in and out, both ways, each time with cosines and sines.
    rotations = 4 * TOKENS * (QUERIES + KEYS) + 4 * TOKENS * 2 * HEAD
    # Two sums forward; backward two of the gradients of what went both ways. Those of queries, keys, values are joined.
    sums = 4 * 3 * TOKENS * HIDDEN + 2 * TOKENS * (QUERIES + 2 * KEYS)
    return SIZE * (products + norms + activation + attention + rotations + sums)


@pytest.mark.parametrize("is_fused", [True, False])
def test_a_layer_moves_no_more_bytes_than_its_parts_need(is_fused, load, monkeypatch):
    """Within 15 % of the arithmetic, the rest being offsets and the like; and what is not fused is far from it."""
    moved = []
    for num_layers in (2, 4):
        model = load("qwen3", Kernels(is_fused=is_fused), num_hidden_layers=num_layers)
        with Traffic() as traffic, monkeypatch.context() as patches:
            if is_fused:
                as_on_a_gpu(traffic, patches)
            for module in model.modules():
                if isinstance(module, CoreAttention):
                    module.varlen = traffic.kernel(varlen)
            offsets.cache_clear()
            run(model, packed=True).backward()
        moved.append(sum(traffic.bytes.values()))
    ratio = (moved[1] - moved[0]) / 2 / layer_traffic()
    assert 0.85 < ratio < 1.15 if is_fused else ratio > 1.3


def as_on_a_gpu(traffic: Traffic, patches: pytest.MonkeyPatch) -> None:
    """Count what is one kernel on a GPU as one."""
    norm = traffic.kernel(lambda hidden, weight, shape, eps: F.rms_norm(hidden, shape, weight, eps))
    activation = traffic.kernel(lambda gate_up: bias_swiglu_impl(gate_up, None))

    def rms_norm(hidden: torch.Tensor, shape: Any, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return norm(hidden, weight, shape=shape, eps=eps)

    patches.setattr(norm_module, "F", SimpleNamespace(rms_norm=rms_norm))
    patches.setattr(mlp, "bias_swiglu_impl", lambda gate_up, *options: activation(gate_up))
    patches.setattr(rope, "fused_rotate", traffic.kernel(rope.rotate))


def test_offsets_are_made_once_for_a_row():
    offsets.cache_clear()
    segments = causal_segments((16, 8, 104), 0, 1)
    first = offsets(segments, 1, 128, torch.device("cpu"))
    again = offsets(causal_segments((16, 8, 104), 0, 1), 1, 128, torch.device("cpu"))
    assert again.cu_q is first.cu_q
    assert first.cu_q.tolist() == first.cu_k.tolist() == [0, 16, 24, 128]
    assert (first.keys_T, first.longest_q) == (None, 104)


def test_slices_are_made_once_for_a_row():
    """Of more segments than `offsets` has places for."""
    segments = causal_segments((4,) * 40, 0, 2)
    assert slices_of(segments, torch.device("cpu")) is slices_of(segments, torch.device("cpu"))
