"""Files to which several processes append records, and which they read at the same time. Does not import torch.

    PART-WRITER.data     the records of one process, one after the other
    PART-WRITER.index    an `ENTRY` of 48 bytes for each record, appended after the record

A writer is one process of one run, so no two processes append to the same file. A process that is killed leaves at most
a record without an entry, or the beginning of an entry; both are ignored. Nothing waits for the disk: after a power
failure entries can refer to lost bytes, which is found by the digest of the record. In memory, a record takes 16 bytes.
"""

import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from uuid import uuid4

import numpy as np

ENTRY = np.dtype([("key", "V16"), ("offset", "<u8"), ("size", "<u8"), ("digest", "V16")])
KEY_BYTES = 16
RUN_ENTRIES = 1 << 17
"""Maximum number of entries that are sorted together, so that sorting needs little memory."""
RECENT_ENTRIES = 1 << 12
"""Number of entries from which on they are sorted."""
_ENTRY_BITS = 40
"""Bits of the number of an entry in its file; the upper bits of a place are the number of the file."""


class DamagedRecord(Exception):
    """A record whose bytes are not those that were written. Its message is the path of the file."""


@dataclass
class RecordFiles:
    """The records of one part in a directory.

    Attributes:
        directory: an existing directory.
        part: first part of the names of the files; processes with other parts do not read them.
    """

    directory: Path
    part: str
    _writer: str = field(default_factory=lambda: uuid4().hex)
    _indexes: list[Path] = field(default_factory=list)
    _num_read: list[int] = field(default_factory=list)
    _recent: dict[int, int] = field(default_factory=dict)
    """Places of the newest records by the first half of their key."""
    _runs: list[tuple[np.ndarray, np.ndarray]] = field(default_factory=list)
    """Sorted first halves of keys with the places of the records, uint64 each; newest run last."""

    def __contains__(self, key: bytes) -> bool:
        """Return whether there is a record with this key, also of another process. Its bytes are not read."""
        return self._find(key) is not None

    def read(self, key: bytes) -> bytes | None:
        """Return the record with this key; None if it does not exist.

        Raises:
            DamagedRecord: its bytes are missing or others. It is removed, so that there is no such record afterwards.
        """
        found = self._find(key)
        if found is None:
            return None
        place, entry = found
        path = self._indexes[place >> _ENTRY_BITS].with_suffix(".data")
        content = _read_at(path, int(entry["offset"]), int(entry["size"]))
        if content is None or _digest(key, content) != entry["digest"].tobytes():
            self.remove(key)
            raise DamagedRecord(path)
        return content

    def remove(self, key: bytes) -> None:
        """Remove the record with this key for all processes, by overwriting its entry."""
        if found := self._find(key):
            place, _ = found
            with self._indexes[place >> _ENTRY_BITS].open("r+b") as file:
                file.seek(place % (1 << _ENTRY_BITS) * ENTRY.itemsize)
                file.write(bytes(ENTRY.itemsize))

    def add(self, key: bytes, content: bytes) -> None:
        """Append a record.

        Raises:
            OSError: the files cannot be written; the part of the record that was written is removed.
        """
        index = self.directory / f"{self.part}-{self._writer}.index"
        offset = _append(index.with_suffix(".data"), content)
        entry = np.zeros((), ENTRY)
        entry["key"], entry["digest"] = np.void(key), np.void(_digest(key, content))
        entry["offset"], entry["size"] = offset, len(content)
        _append(index, entry.tobytes())
        self._refresh()

    def _find(self, key: bytes) -> tuple[int, np.ndarray] | None:
        """Return the place and the entry of a record, after reading what other processes have added if needed."""
        found = self._find_known(key)
        if found is None:
            self._refresh()
            found = self._find_known(key)
        return found

    def _find_known(self, key: bytes) -> tuple[int, np.ndarray] | None:
        for place in self._places(int.from_bytes(key[:8], "little")):
            content = _read_at(
                self._indexes[place >> _ENTRY_BITS], place % (1 << _ENTRY_BITS) * ENTRY.itemsize, ENTRY.itemsize
            )
            entry = np.frombuffer(content or bytes(ENTRY.itemsize), ENTRY)[0]
            if entry["key"].tobytes() == key:  # a removed entry has another key
                return place, entry
        return None

    def _places(self, half: int) -> Iterator[int]:
        """Yield the places of records by the first half of their key, the newest first."""
        if half in self._recent:
            yield self._recent[half]
        for halves, places in reversed(self._runs):
            after = int(np.searchsorted(halves, np.uint64(half), side="right"))
            while after and halves[after - 1] == half:
                after -= 1
                yield int(places[after])

    def _refresh(self) -> None:
        """Read the entries that were added since the last call."""
        known = set(self._indexes)
        for path in sorted(self.directory.glob(f"{self.part}-*.index")):
            if path not in known:
                self._indexes.append(path)
                self._num_read.append(0)
        for number, path in enumerate(self._indexes):
            while self._read_entries(number, path):
                pass

    def _read_entries(self, number: int, path: Path) -> int:
        """Read further entries of a file, at most RUN_ENTRIES; return their number."""
        first = self._num_read[number]
        try:
            content = np.fromfile(path, np.uint8, RUN_ENTRIES * ENTRY.itemsize, offset=first * ENTRY.itemsize)
        except OSError:  # it was deleted
            return 0
        entries = content[: len(content) // ENTRY.itemsize * ENTRY.itemsize].view(ENTRY)
        if not len(entries):
            return 0
        self._num_read[number] += len(entries)
        halves = np.ascontiguousarray(entries["key"]).view("<u8")[::2]
        places = np.arange(first, first + len(entries), dtype=np.uint64) | np.uint64(number << _ENTRY_BITS)
        if len(entries) >= RECENT_ENTRIES:
            self._add_run(halves, places)
        else:
            self._recent.update(zip(halves.tolist(), places.tolist(), strict=True))
        if len(self._recent) >= RECENT_ENTRIES:
            self._add_run(np.array(list(self._recent), np.uint64), np.array(list(self._recent.values()), np.uint64))
            self._recent.clear()
        return len(entries)

    def _add_run(self, halves: np.ndarray, places: np.ndarray) -> None:
        if self._runs and len(self._runs[-1][0]) + len(halves) <= RUN_ENTRIES:
            last_halves, last_places = self._runs.pop()
            halves, places = np.concatenate([last_halves, halves]), np.concatenate([last_places, places])
        order = np.argsort(halves, kind="stable")
        self._runs.append((halves[order], places[order]))


def _digest(key: bytes, content: bytes) -> bytes:
    sha = hashlib.sha256(key)  # so that records cannot be exchanged
    sha.update(content)
    return sha.digest()[:16]


def _read_at(path: Path, offset: int, size: int) -> bytes | None:
    """Return the bytes of a file at an offset; None if it does not have them."""
    try:
        with path.open("rb") as file:
            if offset + size > os.fstat(file.fileno()).st_size:  # before memory is allocated for a damaged size
                return None
            file.seek(offset)
            return file.read(size)
    except OSError:
        return None


def _append(path: Path, content: bytes) -> int:
    """Append bytes to a file, and return the offset of the first one.

    Raises:
        OSError: the disk is full or fails; the file has its previous size.
    """
    with path.open("ab", buffering=0) as file:
        start = file.seek(0, os.SEEK_END)
        left = memoryview(content)
        try:
            while left:
                left = left[file.write(left) :]
        except OSError:
            file.truncate(start)
            raise
    return start
