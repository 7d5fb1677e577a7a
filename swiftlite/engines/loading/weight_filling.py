"""What a model's own loader makes of tensors while the model is running: which it reads, and which parameters it fills.

An engine's `load_weights` passes over what it does not know without a word.
"""

from bisect import bisect
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

WRITES = (
    torch.ops.aten.copy_.default,
    # Rows of an embedding beyond the vocabulary are padding.
    torch.ops.aten.fill_.Scalar,
    torch.ops.aten.fill_.Tensor,
    torch.ops.aten.zero_.default,
)
"""Operations by which weight loaders put numbers into (a part of) their first argument."""

CARRIED = ("visual.",)
"""Beginnings of the names, in both engines, of parameters beside a language model (Qwen3.5's vision tower). Training
carries them through (`Family.is_carried`), so no transfer brings them, and the engine keeps its own."""


class Filling(TorchDispatchMode):
    """A context in which a model loads tensors; one for all buckets of a transfer."""

    def __init__(self) -> None:
        super().__init__()
        # By storage, where each expected tensor starts in it, in bytes, and its name; sorted. Several may share one.
        self._expected: dict[int, list[tuple[int, str]]] = defaultdict(list)
        self._unread: set[str] = set()
        # By storage, the parts (offset, shape) that were written.
        self._written: dict[int, set[tuple[int, torch.Size]]] = defaultdict(set)

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

    def unfilled(self, model: nn.Module, shared: Iterable[str] = ()) -> list[str]:
        """Parameters of the language model of which some numbers were not written.

        Args:
            shared: ends of names of those that another model fills.
        """
        left = []
        for name, parameter in model.named_parameters():
            written = sum(shape.numel() for _, shape in self._written.get(_storage(parameter), ()))
            is_expected = not name.startswith(CARRIED) and not name.endswith(tuple(shared))
            if is_expected and written < parameter.numel():
                left.append(name)
        return left

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, torch.Tensor):
                self._note_read(leaf)
        if func in WRITES:
            target = args[0]
            self._written[_storage(target)].add((target.storage_offset(), target.shape))
        return func(*args, **(kwargs or {}))

    def _note_read(self, tensor: torch.Tensor) -> None:
        """A part of an expected tensor is read: of the last one of its storage that does not start behind it."""
        places = self._expected.get(_storage(tensor), [])
        not_behind = bisect(places, _start(tensor), key=lambda place: place[0])
        if not_behind:
            self._unread.discard(places[not_behind - 1][1])


def _start(tensor: torch.Tensor) -> int:
    """Where a tensor starts in its storage, in bytes."""
    return int(tensor.storage_offset()) * tensor.element_size()


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata
