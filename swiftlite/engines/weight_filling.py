"""What a model's own loader makes of tensors while the model is running: which it reads, and which parameters it fills.

An engine's `load_weights` passes over what it does not know without a word.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Filling(TorchDispatchMode):
    """A context in which a model loads tensors; one for all buckets of a transfer."""

    def __init__(self) -> None:
        super().__init__()
        self._names: dict[int, str] = {}
        # By storage, the parts (offset, shape) that were copied into.
        self._written: dict[int, set[tuple[int, torch.Size]]] = defaultdict(set)

    def expect(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Tensors that are to be read, each with a storage of its own, as those of a safetensors file have."""
        self._names |= {_storage(tensor): name for name, tensor in tensors.items()}

    def take_unread(self) -> list[str]:
        """Names of expected tensors that no operation has read; they are expected no more."""
        unread, self._names = sorted(self._names.values()), {}
        return unread

    def unfilled(self, model: nn.Module, shared: Iterable[str] = ()) -> list[str]:
        """Parameters of which some numbers were not written.

        Args:
            shared: ends of names of those that another model fills.
        """
        left = []
        for name, parameter in model.named_parameters():
            written = sum(shape.numel() for _, shape in self._written.get(_storage(parameter), ()))
            if written < parameter.numel() and not name.endswith(tuple(shared)):
                left.append(name)
        return left

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, torch.Tensor):
                self._names.pop(_storage(leaf), None)
        if func is torch.ops.aten.copy_.default:
            target = args[0]
            self._written[_storage(target)].add((target.storage_offset(), target.shape))
        return func(*args, **(kwargs or {}))


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata
