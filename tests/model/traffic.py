"""Count the bytes that a model moves to and from memory on a CPU: the inputs and results of operations.

Kernels that exist on a GPU but not on a CPU are counted as one operation each (`Traffic.kernel`).
"""

from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves


class Traffic(TorchDispatchMode):
    """Counts bytes by operation. Views move no bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        read, written = _tensors((args, kwargs)), _tensors(out)
        if func in (torch.ops.aten.new_empty.default, torch.ops.aten.empty_like.default):
            return out  # memory that nothing was written to
        if func is torch.ops.aten.copy_.default:
            read = read[1:]
        if func is torch.ops.aten.gather.default:
            read = [args[2], out]  # of the source what the indices name
        if func is torch.ops.aten.scatter_add_.default:
            read, written = [args[2], args[3], args[3]], [args[3]]
        storages = {tensor.untyped_storage().data_ptr() for tensor in read}
        is_view = all(tensor.untyped_storage().data_ptr() in storages for tensor in written)
        is_in_place = func._schema.is_mutable
        if is_in_place or not is_view:
            self.add(str(func), read, written)
        return out

    def add(self, name: str, read: Iterable[torch.Tensor], written: Iterable[torch.Tensor]) -> None:
        self.bytes[name] += sum(map(_bytes, read)) + sum(map(_bytes, written))

    def kernel(self, function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        """Return the same function, counted as one operation in the forward and one in the backward pass.

        The backward pass reads the gradients of the results and all inputs, and writes the gradients that are needed.
        """

        def one(*args: Any, **options: Any) -> torch.Tensor:
            return _OneKernel.apply(self, lambda *tensors: function(*tensors, **options), *args)  # type: ignore[return-value]

        return one

    def without_gradient(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the same function, counted as one operation. Autograd does not differentiate it."""

        def one(*args: Any) -> Any:
            with self.uncounted():
                out = function(*args)
            self.add("kernel", _tensors(args), _tensors(out))
            return out

        return one

    @contextmanager
    def uncounted(self):
        with _disable_current_modes():
            yield


class _OneKernel(torch.autograd.Function):
    @staticmethod
    def forward(ctx, traffic: Traffic, function: Callable[..., torch.Tensor], *args: Any) -> torch.Tensor:
        own = [arg.detach() if isinstance(arg, torch.Tensor) else arg for arg in args]
        for arg, learns in zip(own, ctx.needs_input_grad[2:], strict=True):
            if learns:
                arg.requires_grad_()
        with traffic.uncounted(), torch.enable_grad():
            out = function(*own)
        ctx.traffic, ctx.own, ctx.out = traffic, own, out
        traffic.add("kernel", _tensors(own), [out])
        return out.detach()

    @staticmethod
    def backward(ctx, *grad_outputs: torch.Tensor) -> Any:
        learning = [arg for arg, learns in zip(ctx.own, ctx.needs_input_grad[2:], strict=True) if learns]
        with ctx.traffic.uncounted():
            gradients = torch.autograd.grad(ctx.out, learning, grad_outputs)
        ctx.traffic.add("kernel backward", [*grad_outputs, *_tensors(ctx.own)], gradients)
        found = iter(gradients)
        return None, None, *[next(found) if learns else None for learns in ctx.needs_input_grad[2:]]


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _bytes(tensor: torch.Tensor) -> int:
    """Return the bytes of a tensor's distinct elements. The elements of an expanded dimension count once."""
    count = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        count *= size if stride else 1
    return count * tensor.element_size()
