"""What an engine's weight loader fills, and from which tensors, without a number being read or allocated.

Parameters and the checkpoint's tensors are on torch's meta device; every copy and every fill that the loader makes is
recorded. So the check of a model of any size takes the time of its loader's loops, and needs no memory for it.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from swiftlite.bridge.tensors import Entry
from swiftlite.engines.loading.weight_filling import WRITES


class WeightRecorder(TorchDispatchMode):
    """A context in which an engine's `load_weights` runs on `weights()`.

    Args:
        entries: the checkpoint's tensors: HF key -> shape and dtype.

    Attributes:
        keys: of all tensors.
        used: keys of which at least one number went into a parameter.
        replaced: keys whose numbers were in a parameter until those of another key were put in their place.
    """

    def __init__(self, entries: Mapping[str, Entry]):
        super().__init__()
        self._tensors = {
            key: torch.empty(entry.shape, dtype=entry.dtype, device="meta") for key, entry in entries.items()
        }
        # By storage: which keys its numbers come from, and which parts (offset, shape, strides) were written by which.
        self._keys: dict[int, set[str]] = defaultdict(set)
        self._written: dict[int, dict[tuple, set[str]]] = defaultdict(dict)
        self._kept: list[torch.Tensor] = []  # a storage that is freed would give its number to another one
        for key, tensor in self._tensors.items():
            self._keys[_storage(tensor)].add(key)
        self.keys = set(entries)
        self.used: set[str] = set()
        self.replaced: set[str] = set()

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(HF key, tensor on the meta device), as an engine's loader is given them."""
        yield from self._tensors.items()

    def unfilled(self, model: nn.Module) -> dict[str, int]:
        """Parameters that the loader left as they were, wholly or in part: name -> numbers that were not written."""
        left = {}
        for name, parameter in model.named_parameters():
            written = sum(torch.Size(shape).numel() for _, shape, _ in self._parts(parameter))
            if written < parameter.numel():
                left[name] = parameter.numel() - written
        return left

    def _parts(self, parameter: torch.Tensor) -> Iterable[tuple]:
        return self._written.get(_storage(parameter), {})

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        is_copy = func is torch.ops.aten.copy_.default
        # Some classes put a parameter on their own device, into which nothing can be copied that has no numbers.
        is_without_numbers = is_copy and args[1].is_meta and not args[0].is_meta
        result = args[0] if is_without_numbers else func(*args, **(kwargs or {}))
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        keys = set().union(*(self._keys.get(_storage(tensor), ()) for tensor in tensors))
        if func in WRITES:
            target = args[0]
            keys = self._keys.get(_storage(args[1]), set()) if is_copy else set()
            written = self._written[_storage(target)]
            part = (target.storage_offset(), target.shape, target.stride())
            self.replaced |= written.get(part, keys) - keys
            written[part] = set(keys)
            self.used |= keys
        if keys:
            outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
            for output in outputs:
                self._keys[_storage(output)] |= keys
            self._kept += outputs
        return result


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata
