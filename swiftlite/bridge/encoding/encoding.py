"""Define interfaces for encodings.

A file stores a tensor as plain numbers, or as codes with scales in separate tensors.

`Checkpoint` decodes slices of tensors, and `ShardedFiles` encodes them. No other code depends on the encoding.
config.json declares the format of a checkpoint (`index.py`), which finds encoded tensors in the files, each with its
`Encoding`. Tensors that the format does not recognize are plain.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from swiftlite.base.errors import UserError
from swiftlite.bridge.entry import Box, Entry


class Encoding(Protocol):
    """An encoding of one tensor that can be read.

    Example: FP8 stores `x.weight` [300, 130] as codes `x.weight` and scales `x.weight_scale_inv` [3, 2], one for each
    block of 128 x 128. Decoding rows 130 to 139 requires rows 130 to 139 of the codes and row 1 of the scales.
    """

    @property
    def axis(self) -> int:
        """The axis along which a tensor is divided into chunks, such that a chunk is contiguous in the file."""
        ...

    def entries(self, name: str) -> tuple[str, ...]:
        """Return the keys of the tensors in the file that together store the tensor `name`."""
        ...

    def boxes(self, box: Box) -> tuple[Box, ...]:
        """Return the box (one range per axis) of each stored tensor that is needed to decode this box of the tensor."""
        ...

    def read(self, parts: Sequence[torch.Tensor], box: Box) -> torch.Tensor:
        """Decode a box of the tensor from the `boxes` of its stored tensors; the caller casts the result."""
        ...


class EncodedTensor(NamedTuple):
    """A tensor that is stored with an encoding.

    Attributes:
        name: name of the tensor.
        entry: shape of the tensor, its floating-point dtype after decoding, and the file position of the codes.
        encoding: how the tensor is stored.
    """

    name: str
    entry: Entry
    encoding: Encoding


class Format(Protocol):
    """A storage format that is declared in config.json. The files show which tensors are encoded."""

    def find(self, key: str, entries: Mapping[str, Entry]) -> EncodedTensor | None:
        """Return the tensor whose codes are stored under this key; None if the key does not hold codes.

        Raises:
            UserError: a tensor that belongs to the codes is missing or has another shape.
        """
        ...

    def is_for_serving(self, key: str) -> bool:
        """Return whether a stored tensor is only used by engines, such as the scale of activations."""
        ...


class WritableEncoding(Encoding, Protocol):
    """An encoding of one tensor that can be written."""

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

    @property
    def axis(self) -> int:
        return 0

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
class Transposed(Plain):
    """The transpose of a matrix, stored in one dtype."""

    @property
    def axis(self) -> int:
        return 1

    def boxes(self, box: Box) -> tuple[Box, ...]:
        return (box[::-1],)

    def read(self, parts: Sequence[torch.Tensor], box: Box) -> torch.Tensor:
        return parts[0].T

    def write(self, tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (tensor.T.to(self.dtype),)


def unquantized(entry: Entry) -> Plain:
    """Return the encoding of a tensor that is stored in one dtype."""
    if entry.is_transposed:
        return Transposed(entry.dtype)
    return Plain(entry.dtype)


@dataclass(frozen=True)
class Stored:
    """Describe how a tensor is stored: its encoding, and the location of each part, such as codes and scales."""

    encoding: Encoding
    entries: tuple[Entry, ...]


@dataclass(frozen=True)
class Found:
    """The tensors in files, after decoding.

    Attributes:
        tensors: every tensor, by name.
        encoded: how each encoded tensor is stored, by name.
        problems: one line for each tensor that cannot be decoded; such tensors are treated as plain.
    """

    tensors: dict[str, Entry]
    encoded: dict[str, Stored]
    problems: list[str]


def find_tensors(entries: Mapping[str, Entry], format: Format | None) -> Found:
    """Return the tensors of a file after decoding, in the order of the file.

    Tensors that are only used by engines are omitted. If `format` is None, all tensors are plain.
    """
    if format is None:
        return Found(dict(entries), {}, [])
    by_codes: dict[str, EncodedTensor] = {}
    used: set[str] = set()
    problems = []
    for key in entries:
        try:
            found = format.find(key, entries)
        except UserError as error:
            # One line for each tensor, because a wrong quantization_config concerns many of them.
            problems.append(error.problem)
            continue
        if found:
            by_codes[key] = found
            # Scales and zero points are not tensors of the model; what remains is plain and must have a row.
            used.update(found.encoding.entries(found.name))
    # In a second pass, when all scales are known: they can be in the file before their codes.
    tensors = {}
    encoded = {}
    for key, entry in entries.items():
        if key in by_codes:
            name, decoded, encoding = by_codes[key]
            tensors[name] = decoded
            encoded[name] = Stored(encoding, tuple(entries[part] for part in encoding.entries(name)))
        elif key not in used and not format.is_for_serving(key):
            tensors[key] = entry
    return Found(tensors, encoded, problems)
