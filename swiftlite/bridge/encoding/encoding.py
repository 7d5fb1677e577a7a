"""Define interfaces for encodings.

A file stores a tensor as plain numbers, or as codes with scales in separate tensors.

`Checkpoint` decodes slices of tensors, and `ShardedFiles` encodes them. No other code depends on the encoding.
config.json declares a checkpoint's encoding (`index.py`). Tensors that the encoding does not recognize are plain.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from swiftlite.bridge.entry import Box, Entry
from swiftlite.errors import UserError


class Encoding(Protocol):
    """An encoding that can be read.

    Example: FP8 stores `w` [300, 130] as codes `w` and scales `w_scale_inv` [3, 2], one for each block of 128 x 128.
    Decoding rows 130 to 139 requires rows 130 to 139 of the codes and row 1 of the scales.
    """

    def entries(self, name: str) -> tuple[str, ...]:
        """Return the keys of the tensors in the file that together store the tensor `name`."""
        ...

    def boxes(self, box: Box) -> tuple[Box, ...]:
        """Return the box (one range per axis) of each stored tensor that is needed to decode this box of the tensor."""
        ...

    def read(self, parts: Sequence[torch.Tensor], box: Box) -> torch.Tensor:
        """Decode a box of the tensor from the `boxes` of its stored tensors; the caller casts the result."""
        ...


class DeclaredEncoding(Encoding, Protocol):
    """An encoding that is declared in config.json. The files show which tensors have this encoding."""

    def find(self, key: str, entries: Mapping[str, Entry]) -> tuple[str, Entry] | None:
        """Return the name and the `Entry` of the decoded tensor whose codes are stored under this key.

        The entry has the shape of the tensor, a floating-point dtype and the file position of the codes. Returns None
        if the key does not hold codes of this encoding.

        Raises:
            UserError: a tensor that belongs to the codes is missing or has another shape.
        """
        ...


class WritableEncoding(Encoding, Protocol):
    """An encoding that can be written."""

    def aligned(self, box: Box, shape: tuple[int, ...]) -> Box:
        """Return the smallest box of whole blocks that contains `box`. Only boxes of whole blocks can be written."""
        ...

    def write(self, tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Encode a box of whole blocks, and return the part of each stored tensor (for example codes and scales).

        If `tensor` is on the meta device, the parts are as well.
        """
        ...


@dataclass(frozen=True)
class Plain:
    """A tensor stored in one dtype without encoding."""

    dtype: torch.dtype

    def entries(self, name: str) -> tuple[str, ...]:
        return (name,)

    def boxes(self, box: Box) -> tuple[Box, ...]:
        return (box,)

    def read(self, parts: Sequence[torch.Tensor], box: Box) -> torch.Tensor:
        return parts[0]

    def aligned(self, box: Box, shape: tuple[int, ...]) -> Box:
        return box

    def write(self, tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (tensor.to(self.dtype),)


@dataclass(frozen=True)
class Found:
    """The tensors in files, after decoding.

    Attributes:
        tensors: every tensor, by name.
        encoded: for each encoded tensor, by name, its stored tensors, such as codes and scales.
        problems: one line for each tensor that cannot be decoded; such tensors are treated as plain.
    """

    tensors: dict[str, Entry]
    encoded: dict[str, tuple[Entry, ...]]
    problems: list[str]


def find_tensors(entries: Mapping[str, Entry], encoding: DeclaredEncoding | None) -> Found:
    """Return the tensors of a file after decoding, in the order of the file.

    If `encoding` is None, all tensors are plain.
    """
    if encoding is None:
        return Found(dict(entries), {}, [])
    by_codes: dict[str, tuple[str, Entry]] = {}
    problems = []
    for key in entries:
        try:
            found = encoding.find(key, entries)
        except UserError as error:
            problems.append(error.problem)
            continue
        if found:
            by_codes[key] = found
    encoded = {name: tuple(entries[part] for part in encoding.entries(name)) for name, _ in by_codes.values()}
    used = {part for name in encoded for part in encoding.entries(name)}
    tensors = {}
    for key, entry in entries.items():
        if key in by_codes or key not in used:
            name, seen = by_codes.get(key, (key, entry))
            tensors[name] = seen
    return Found(tensors, encoded, problems)
