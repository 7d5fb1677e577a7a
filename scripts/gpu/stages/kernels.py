"""Compare fused kernels with float64 references: results and gradients for random inputs.

The kernels are norm, activation, rotations, experts, loss and packed attention. The norm of the difference from the
reference, relative to the norm of the reference, must be at most 1e-2 in bfloat16 and 1e-4 in float32.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.fusions.fused_bias_swiglu import bias_swiglu_impl
from result import Results, Settings

from swiftlite.model.attention import cudnn
from swiftlite.model.attention.rope import fused_rotate, rotate
from swiftlite.model.layers.experts import fused_add_reversed_, grouped_linear
from swiftlite.model.layers.kernels import modules_of, varlen_kernel
from swiftlite.model.layers.norm import fused_zero_centered_norm
from swiftlite.model.layers.tensor_parallel import add_product_, sums_products_in_float32
from swiftlite.model.loss.chunked_loss import LabelTarget, chunked_loss
from swiftlite.model.loss.losses import select
from swiftlite.plan.kernels import automatic, this_machine
from swiftlite.runtime.distributed import session

BOUNDS = {torch.float32: 1e-4, torch.bfloat16: 1e-2}
Compute = Callable[..., torch.Tensor]


def run(settings: Settings, results: Results) -> None:
    tokens, width, vocab = 8192, 4096, 151_936
    if settings.tiny:
        tokens, width, vocab = 64, 128, 500
    with session() as mesh:
        device = mesh.device.torch_device
        for dtype in BOUNDS:
            word = str(dtype).removeprefix("torch.")
            states, weight = numbers(device, dtype, (tokens, width), (width,))
            compare(results, f"norm, {word}", fused_norm, norm, states, weight)
            near_zero = (weight.detach() * 0.05).requires_grad_()
            compare(results, f"zero-centered norm, {word}", fused_centered, centered, states, near_zero)
            (gate_and_up,) = numbers(device, dtype, (tokens, 2 * width))
            compare(results, f"SwiGLU, {word}", lambda both: bias_swiglu_impl(both, None), swiglu, gate_and_up)
            check_rotations(results, f"rotations, {word}", *numbers(device, dtype, (tokens, 1, 4, width)))
            check_loss(
                results, f"loss in chunks, {word}", mesh.tp, *numbers(device, dtype, (tokens, 128), (vocab, 128))
            )
        check_experts(results, device, tokens)
        check_sums(results, device)
        check_attention(results, settings, device)


def numbers(device: torch.device, dtype: torch.dtype, *shapes: tuple[int, ...]) -> list[torch.Tensor]:
    return [torch.randn(shape, device=device, dtype=dtype, requires_grad=True) for shape in shapes]


def compare(results: Results, name: str, kernel: Compute, reference: Compute, *inputs: torch.Tensor) -> None:
    """Compare the result and the gradients of a kernel with the reference, and add the largest difference to the
    results.
    """
    exact = [tensor.detach().double().requires_grad_() for tensor in inputs]
    ours, expected = kernel(*inputs), reference(*exact)
    share = torch.randn_like(expected)
    found = [ours, *torch.autograd.grad(ours, inputs, share.to(ours.dtype))]
    wanted = [expected, *torch.autograd.grad(expected, exact, share)]
    worst = max(difference(*pair) for pair in zip(found, wanted, strict=True))
    results.at_most(name, worst, BOUNDS[inputs[0].dtype])


def difference(ours: torch.Tensor, expected: torch.Tensor) -> float:
    return float((ours.double() - expected).norm() / expected.norm())


def fused_norm(states: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(states, weight.shape, weight, 1e-6)


def norm(states: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return states * torch.rsqrt(states.square().mean(-1, keepdim=True) + 1e-6) * weight


def fused_centered(states: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return fused_zero_centered_norm(states, weight, 1e-6)


def centered(states: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return norm(states, 1 + weight)


def swiglu(gate_and_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_and_up.chunk(2, -1)
    return F.silu(gate) * up


def check_rotations(results: Results, name: str, channels: torch.Tensor) -> None:
    """Compare rotations of the first half of each head's channels."""
    angles = torch.rand(len(channels), 1, 1, channels.size(-1) // 4, device=channels.device).repeat(1, 1, 1, 2)
    turns = torch.stack([angles.cos(), angles.sin()]).to(channels.dtype)
    compare(results, name, lambda x: fused_rotate(x, turns), lambda x: rotate(x, turns.double()), channels)


def check_experts(results: Results, device: torch.device, tokens: int) -> None:
    """Compare eight experts. One of them has no tokens."""
    counts = [tokens // 2, 0, tokens // 4, *[tokens // 20] * 5]
    ends = torch.tensor(counts, device=device).cumsum(0).to(torch.int32)
    hidden, *weights = numbers(device, torch.bfloat16, (sum(counts), 128), *[(64, 128)] * len(counts))
    unused = weights.pop(1)  # its gradient is zero, so a relative difference is undefined

    def grouped(hidden: torch.Tensor, first: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        return grouped_linear(hidden, ends, [first, unused, *others])

    def one_by_one(hidden: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        parts = hidden.split([count for count in counts if count])
        return torch.cat([part @ weight.T for part, weight in zip(parts, weights, strict=True)])

    compare(results, "experts, bfloat16", grouped, one_by_one, hidden, *weights)


def check_sums(results: Results, device: torch.device) -> None:
    """Compare sums of bfloat16 gradients in float32.

    They are computed in the matrix product, and for all experts in one kernel.
    """
    left, right = (torch.randn(256, 128, device=device, dtype=torch.bfloat16) for _ in range(2))
    if device.type == "cuda" and sums_products_in_float32(torch.bfloat16):
        total = torch.randn(256, 256, device=device)
        expected = total.double() + left.double() @ right.double().t()
        add_product_(total, left, right.t())
        results.at_most("a product added to a float32 sum", difference(total, expected), BOUNDS[torch.float32])
    else:
        results.add("a product added to a float32 sum", "addmm of this torch has no out_dtype")
    sums, gradients = torch.randn(4, 256, 128, device=device), torch.stack([left, right] * 2)
    expected = sums.double() + gradients.double().flip(0)
    fused_add_reversed_(sums, gradients)
    results.at_most("gradients of all experts added in one kernel", difference(sums, expected), BOUNDS[torch.float32])


def check_loss(results: Results, name: str, group, states: torch.Tensor, matrix: torch.Tensor) -> None:
    words = torch.randint(len(matrix), (len(states),), device=states.device)

    def ours(states: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
        selected = select(words[None], words.device)
        return chunked_loss(states, matrix, LabelTarget(words), selected, group).loss_BS[0]

    def exact(states: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(states @ matrix.T, words, reduction="none")

    # Logits of about 1, as in models. Float64 logits of more positions would not fit in memory.
    states, matrix = (states[:2048].detach().requires_grad_(), (matrix.detach() / 11).requires_grad_())
    words = words[:2048]
    compare(results, name, ours, exact, states, matrix)


def check_attention(results: Results, settings: Settings, device: torch.device) -> None:
    """Compare attention over rows of 1 to 100 sequences with two query heads per key, with all available kernels."""
    chosen = automatic(settings.device == "cuda", is_float32=False)
    kernel = varlen_kernel(chosen)
    if kernel is None:
        results.add("packed attention", "no kernel for packed rows on this device")
        return
    compare_attention(results, "packed attention", kernel, device)
    for impl in this_machine(settings.device == "cuda").flash_impls:
        newer = replace(chosen, attention="torch_varlen", flash_impl=impl)
        modules_of(newer)  # activates the kernel
        kernel = varlen_kernel(newer)
        assert kernel is not None
        compare_attention(results, f"packed attention by {impl}", kernel, device)
    if settings.device == "cuda" and this_machine(is_cuda=True).has_cudnn_frontend:
        compare_attention(results, "packed attention by cuDNN", packed_cudnn, device, SIZES[:2])


def packed_cudnn(query, key, value, starts, *others: Any, scale: float) -> torch.Tensor:
    return cudnn.attend_packed(query, key, value, tuple(starts.diff().tolist()), scale)


SIZES = ((64, 64), (128, 128), (192, 192), (192, 128))
"""Channels per head of queries and keys, and of values."""


def compare_attention(
    results: Results,
    what: str,
    kernel: Callable[..., torch.Tensor],
    device: torch.device,
    sizes: Sequence[tuple[int, int]] = SIZES,
) -> None:
    for lengths in ((1000,), (1, 30, 500), (37,) * 100):
        for channels, of_values in sizes:
            shapes = [(sum(lengths), *each) for each in ((8, channels), (4, channels), (4, of_values))]
            starts = torch.tensor([0, *lengths], device=device).cumsum(0, dtype=torch.int32)

            def packed(*qkv: torch.Tensor, starts: torch.Tensor = starts, longest: int = max(lengths)) -> torch.Tensor:
                return kernel(*qkv, starts, starts, longest, longest, scale=qkv[0].size(-1) ** -0.5)

            def alone(*qkv: torch.Tensor, lengths: tuple[int, ...] = lengths) -> torch.Tensor:
                parts = zip(*(tensor.split(lengths) for tensor in qkv), strict=True)
                return torch.cat([one_sequence(*part) for part in parts])

            name = f"{what}, {len(lengths)} sequences, {channels} channels, {of_values} of values"
            compare(results, name, packed, alone, *numbers(device, torch.bfloat16, *shapes))


def one_sequence(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Compute causal attention over [T, heads, channels]."""
    query, key, value = (tensor.transpose(0, 1) for tensor in (query, key, value))
    return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True).transpose(0, 1)
