"""Track which tensors an engine's own weight loader reads and which parameters it fills.

An engine's `load_weights` silently skips unknown tensors. `RunningLoad` tracks `load_weights` in a running engine.
`DryLoad` tracks it on torch's meta device, so that checking a model of any size takes only the time of the loader's
loops, without memory."""

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
"""Operations of weight loaders that write to their first argument."""
ITEM = torch.ops.aten._local_scalar_dense.default
"""The operation of `Tensor.item()`, with which SGLang reads a tensor of one number before it fills the parameter."""

CARRIED = ("visual.",)
"""Name prefixes, in vLLM and SGLang, of parameters outside of the language model (Qwen3.5's vision tower). A transfer
may lack them: if training does not change them (`--freeze_vit`), they are not sent, and the engine keeps its values.
"""

Part = tuple[int, torch.Size, tuple[int, ...]]
"""Offset, shape and strides of a part of a storage."""


class LoadTracker(TorchDispatchMode):
    """Context manager for loading a model. It records every copy and fill of the model's weight loader.

    Attributes:
        casts: for each tensor that was cast between numbers and codes of a quantization, by name, its dtype and that of
            the parameter. Its module is quantized in the files but not in the engine, or the reverse, and its scale is
            not used or missing.
    """

    def __init__(self) -> None:
        super().__init__()
        self.casts: dict[str, tuple[torch.dtype, torch.dtype]] = {}
        # The written parts of each storage, with the keys of their source tensors.
        self._written: dict[int, dict[Part, set[str]]] = defaultdict(dict)

    def unfilled(self, model: nn.Module, elsewhere: Iterable[str] = ()) -> dict[str, int]:
        """Return the parameters that were not written completely, with the number of unwritten elements.

        Args:
            elsewhere: name endings of parameters that the loader does not fill, such as parameters shared with another
                model; they are not returned.
        """
        left = {}
        for name, parameter in model.named_parameters():
            # By parts, so that a fused parameter of which only q and k were loaded counts as unfilled.
            written = sum(shape.numel() for _, shape, _ in self._written.get(_storage(parameter), ()))
            if written < parameter.numel() and not name.endswith(tuple(elsewhere)):
                left[name] = parameter.numel() - written
        return left

    def cast_problems(self) -> list[str]:
        """Return a problem (one line) for each tensor in `casts`."""
        return [
            f"{name} is {_name(stored)}, but its module was built for {_name(built)}: quantization_config does not "
            "describe the files"
            for name, (stored, built) in self.casts.items()
        ]

    def _note_cast(self, name: str, stored: torch.dtype, parameter: torch.Tensor) -> None:
        if _are_codes(stored) != _are_codes(parameter.dtype):
            self.casts[name] = (stored, parameter.dtype)

    def _parts_of(self, target: torch.Tensor) -> tuple[dict[Part, set[str]], Part]:
        """Return all written ranges of the storage that a tensor belongs to, and the range of the tensor itself."""
        return self._written[_storage(target)], (int(target.storage_offset()), target.shape, target.stride())


class RunningLoad(LoadTracker):
    """Tracker for a running model; one instance covers all buckets of a transfer."""

    def __init__(self) -> None:
        super().__init__()
        # Byte offset and name of the expected tensors in each storage, sorted. Several tensors may share a storage.
        self._expected: dict[int, list[tuple[int, str]]] = defaultdict(list)
        self._unread: set[str] = set()

    def expect(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Expect tensors to be read: those of a safetensors file, or views of one received buffer."""
        self._unread |= tensors.keys()
        for name, tensor in tensors.items():
            self._expected[_storage(tensor)].append((_start(tensor), name))
        # Sorted for `bisect`: views of one received buffer share a storage, and only their offsets tell them apart.
        for places in self._expected.values():
            places.sort()

    def take_unread(self) -> list[str]:
        """Return the names of expected tensors that were not read, and clear all expectations."""
        unread = sorted(self._unread)
        self._unread.clear()
        self._expected.clear()
        return unread

    def unfilled(self, model: nn.Module, elsewhere: Iterable[str] = ()) -> dict[str, int]:
        """Return the parameters of the language model that were not written completely, with the number of unwritten
        elements.
        """
        left = super().unfilled(model, elsewhere)
        return {name: count for name, count in left.items() if not name.startswith(CARRIED)}

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        for tensor in _tensors((args, kwargs)):
            self._note_read(tensor)
        if func is COPY and (name := self._name_of(args[1])):
            self._note_cast(name, args[1].dtype, args[0])
        if func in WRITES:
            written, part = self._parts_of(args[0])
            # A part that is written twice counts once.
            written[part] = set()
        return func(*args, **(kwargs or {}))

    def _note_read(self, tensor: torch.Tensor) -> None:
        """Mark the expected tensor that contains `tensor` as read."""
        if name := self._name_of(tensor):
            self._unread.discard(name)

    def _name_of(self, tensor: torch.Tensor) -> str | None:
        """Return the name of the expected tensor that contains `tensor`; None if no expected tensor does.

        This is the last expected tensor that starts at or before the start of `tensor`.
        """
        places = self._expected.get(_storage(tensor), [])
        not_behind = bisect(places, _start(tensor), key=lambda place: place[0])
        if not not_behind:
            return None
        return places[not_behind - 1][1]


class DryLoad(LoadTracker):
    """Tracker for an engine's `load_weights` on the tensors of `weights()`, without reading or allocating tensors.

    Args:
        entries: shape and dtype of each tensor of the checkpoint, by HF key.

    Attributes:
        keys: keys of all tensors.
        used: keys of which at least one element was copied into a parameter.
        replaced: keys whose elements in a parameter were later overwritten by those of another key.
    """

    def __init__(self, entries: Mapping[str, Entry]):
        super().__init__()
        self._tensors = {
            key: torch.empty(entry.shape, dtype=entry.dtype, device="meta") for key, entry in entries.items()
        }
        # The keys of the source tensors of each storage.
        self._keys: dict[int, set[str]] = defaultdict(set)
        self._kept: list[torch.Tensor] = []  # the identifier of a freed storage could be reused
        for key, tensor in self._tensors.items():
            self._keys[_storage(tensor)].add(key)
        self.keys = set(entries)
        self.used: set[str] = set()
        self.replaced: set[str] = set()

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (HF key, tensor on the meta device) for an engine's loader."""
        yield from self._tensors.items()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func is ITEM and (read := self._keys.get(_storage(args[0]))):
            self.used |= read
            return 0.0  # a tensor on the meta device has no number
        # Some classes create a parameter on another device, to which meta tensors cannot be copied.
        is_without_numbers = func is COPY and args[1].is_meta and not args[0].is_meta
        if is_without_numbers:
            result = args[0]
        else:
            result = func(*args, **(kwargs or {}))
        keys = set().union(*(self._keys.get(_storage(tensor), ()) for tensor in _tensors((args, kwargs))))
        if func in WRITES:
            keys = set()
            if func is COPY:
                keys = self._keys.get(_storage(args[1]), keys)
                for key in keys:
                    # A loader may cast numbers to codes before this copy, or dequantize codes.
                    dtype = args[1].dtype
                    if not _are_codes(self._tensors[key].dtype):
                        dtype = self._tensors[key].dtype
                    self._note_cast(key, dtype, args[0])
            written, part = self._parts_of(args[0])
            # The first write of a part replaces nothing: keys - keys is empty.
            self.replaced |= written.get(part, keys) - keys
            written[part] = set(keys)
            self.used |= keys
        if keys:
            # A result has the keys of its arguments, because loaders transpose, split and concatenate before they copy.
            outputs = _tensors(result)
            for output in outputs:
                self._keys[_storage(output)] |= keys
            self._kept += outputs
        return result


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _are_codes(dtype: torch.dtype) -> bool:
    """Return whether tensors of this dtype are codes of a quantization, and not numbers.

    float8_e8m0fnu is a dtype of scales, which loaders may cast.
    """
    return not dtype.is_floating_point or (dtype.itemsize == 1 and dtype is not torch.float8_e8m0fnu)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _start(tensor: torch.Tensor) -> int:
    """Return the offset of a tensor in its storage, in bytes."""
    return int(tensor.storage_offset()) * tensor.element_size()


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata
