"""What an engine's own weight loader makes of tensors: which it reads, and which parameters it fills.

An engine's `load_weights` passes over what it does not know without a word. `RunningLoad` watches it while the model is
running. `DryLoad` watches it on torch's meta device, so that the check of a model of any size takes the time of its
loader's loops, and needs no memory for it.
"""

from bisect import bisect
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from swiftlite.bridge.tensors import Entry

COPY = torch.ops.aten.copy_.default
WRITES = (
    COPY,
    # Rows of an embedding beyond the vocabulary are padding.
    torch.ops.aten.fill_.Scalar,
    torch.ops.aten.fill_.Tensor,
    torch.ops.aten.zero_.default,
)
"""Operations by which weight loaders put numbers into (a part of) their first argument."""

CARRIED = ("visual.",)
"""Beginnings of the names, in both engines, of parameters beside a language model (Qwen3.5's vision tower). Training
carries them through (`Family.is_carried`), so no transfer brings them, and the engine keeps its own."""

Part = tuple[int, torch.Size, tuple[int, ...]]
"""Offset, shape and strides of a part of a storage."""


class LoadTracker(TorchDispatchMode):
    """A context in which a model loads tensors; every copy and every fill that its loader makes is recorded."""

    def __init__(self) -> None:
        super().__init__()
        # By storage: the parts that were written, each with the keys of the tensors that its numbers come from.
        self._written: dict[int, dict[Part, set[str]]] = defaultdict(dict)

    def unfilled(self, model: nn.Module, elsewhere: Iterable[str] = ()) -> dict[str, int]:
        """Parameters that the loader left as they were, wholly or in part: name -> numbers that were not written.

        Args:
            elsewhere: ends of names of those that get their numbers elsewhere, which are left out.
        """
        left = {}
        for name, parameter in model.named_parameters():
            written = sum(shape.numel() for _, shape, _ in self._written.get(_storage(parameter), ()))
            if written < parameter.numel() and not name.endswith(tuple(elsewhere)):
                left[name] = parameter.numel() - written
        return left

    def _parts_of(self, target: torch.Tensor) -> tuple[dict[Part, set[str]], Part]:
        """What was written of a tensor's storage, and which part of it the tensor is."""
        return self._written[_storage(target)], (int(target.storage_offset()), target.shape, target.stride())


class RunningLoad(LoadTracker):
    """For a model that is running; one for all buckets of a transfer."""

    def __init__(self) -> None:
        super().__init__()
        # By storage, where each expected tensor starts in it, in bytes, and its name; sorted. Several may share one.
        self._expected: dict[int, list[tuple[int, str]]] = defaultdict(list)
        self._unread: set[str] = set()

    def expect(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Tensors that are to be read: of a safetensors file, or pieces of one buffer that came over a network."""
        self._unread |= tensors.keys()
        for name, tensor in tensors.items():
            self._expected[_storage(tensor)].append((_start(tensor), name))
        for places in self._expected.values():
            places.sort()

    def take_unread(self) -> list[str]:
        """Names of expected tensors that no operation has read; they are expected no more."""
        unread = sorted(self._unread)
        self._unread.clear()
        self._expected.clear()
        return unread

    def unfilled(self, model: nn.Module, elsewhere: Iterable[str] = ()) -> dict[str, int]:
        """See `LoadTracker`; of the language model alone."""
        left = super().unfilled(model, elsewhere)
        return {name: count for name, count in left.items() if not name.startswith(CARRIED)}

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        for tensor in _tensors((args, kwargs)):
            self._note_read(tensor)
        if func in WRITES:
            written, part = self._parts_of(args[0])
            written[part] = set()
        return func(*args, **(kwargs or {}))

    def _note_read(self, tensor: torch.Tensor) -> None:
        """A part of an expected tensor is read: of the last one of its storage that does not start behind it."""
        places = self._expected.get(_storage(tensor), [])
        not_behind = bisect(places, _start(tensor), key=lambda place: place[0])
        if not_behind:
            self._unread.discard(places[not_behind - 1][1])


class DryLoad(LoadTracker):
    """For an engine's `load_weights` that runs on `weights()`, without a number being read or allocated.

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
        # By storage: which keys its numbers come from.
        self._keys: dict[int, set[str]] = defaultdict(set)
        self._kept: list[torch.Tensor] = []  # a storage that is freed would give its number to another one
        for key, tensor in self._tensors.items():
            self._keys[_storage(tensor)].add(key)
        self.keys = set(entries)
        self.used: set[str] = set()
        self.replaced: set[str] = set()

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(HF key, tensor on the meta device), as an engine's loader is given them."""
        yield from self._tensors.items()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        # Some classes put a parameter on their own device, into which nothing can be copied that has no numbers.
        is_without_numbers = func is COPY and args[1].is_meta and not args[0].is_meta
        result = args[0] if is_without_numbers else func(*args, **(kwargs or {}))
        keys = set().union(*(self._keys.get(_storage(tensor), ()) for tensor in _tensors((args, kwargs))))
        if func in WRITES:
            keys = self._keys.get(_storage(args[1]), set()) if func is COPY else set()
            written, part = self._parts_of(args[0])
            self.replaced |= written.get(part, keys) - keys
            written[part] = set(keys)
            self.used |= keys
        if keys:
            outputs = _tensors(result)
            for output in outputs:
                self._keys[_storage(output)] |= keys
            self._kept += outputs
        return result


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _start(tensor: torch.Tensor) -> int:
    """Where a tensor starts in its storage, in bytes."""
    return int(tensor.storage_offset()) * tensor.element_size()


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata
