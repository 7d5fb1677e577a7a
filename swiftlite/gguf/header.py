"""Read the keys in the header of a GGUF file, and check its lengths against the size of the file.

The package `gguf` trusts these lengths: with a damaged one, it reads elements of an array for hours.
"""

import mmap
import struct
from pathlib import Path

from swiftlite.base.errors import UserError

_SCALARS = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
"""Bytes of a number, by the type that the format gives to it (uint8 is 0, float64 is 12)."""
_STRING, _ARRAY = 8, 9
_MAX_DEPTH = 4  # of arrays in arrays


class _Header:
    """The bytes of a file, with the position after the part that was read."""

    def __init__(self, content: mmap.mmap):
        self._content = content
        self._position = 4  # after the magic number

    def number(self, form: str) -> int:
        """Read a number in one of struct's formats."""
        begin = self._position
        self.skip(struct.calcsize(form))
        return struct.unpack(form, self._content[begin : self._position])[0]

    def skip(self, length: int) -> None:
        """Move the position.

        Raises:
            UserError: the file is shorter.
        """
        if length > len(self._content) - self._position:
            raise UserError("a length in the header is larger than the file", "copy or download it again")
        self._position += length

    def string(self) -> str:
        """Read a string."""
        length = self.number("<Q")
        begin = self._position
        self.skip(length)
        return self._content[begin : self._position].decode("utf-8")

    def value(self, kind: int, depth: int = 0) -> None:
        """Skip a value of metadata."""
        if kind in _SCALARS:
            self.skip(_SCALARS[kind])
        elif kind == _STRING:
            self.skip(self.number("<Q"))
        elif kind == _ARRAY and depth < _MAX_DEPTH:
            self._array(depth)
        else:
            raise UserError(f"a value in the header has the unknown type {kind}", "copy or download it again")

    def _array(self, depth: int) -> None:
        kind, length = self.number("<I"), self.number("<Q")
        if kind in _SCALARS:
            self.skip(length * _SCALARS[kind])
            return
        for _ in range(length):  # each element has a length of 8 bytes, so a damaged `length` ends at the file's end
            self.value(kind, depth + 1)


def read_keys(file: Path) -> list[str]:
    """Check the metadata of a file, and return their keys. The package `gguf` needs seconds for a large vocabulary.

    Raises:
        UserError: the file is not a little-endian GGUF file of version 2 or 3, or a length is larger than the file.
        UnicodeDecodeError: a key is not UTF-8.
    """
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as content:
        if content[:4] != b"GGUF":
            raise UserError("it does not start with GGUF", "copy or download it again")
        header = _Header(content)
        version = header.number("<I")
        if version not in (2, 3):
            raise UserError(f"GGUF version {version} is not supported", "convert the model again")
        num_tensors, num_values = header.number("<Q"), header.number("<Q")
        keys = []
        for _ in range(num_values):
            keys.append(header.string())
            header.value(header.number("<I"))
        for _ in range(num_tensors):
            header.value(_STRING)
            header.skip(header.number("<I") * 8 + 12)  # dimensions, type and offset
    return keys
