"""Encoded rows as a few arrays: 8 bytes per token and about 80 bytes per row, instead of one object per row.

A `Part` has consecutive rows of one file. `row_cache.py` stores parts in files, which all ranks of a machine map into
their memory. `EncodedRows` are the rows of all files, and `Samples` are some of their samples, which are created when
they are read.
"""

import hashlib
import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from swiftlite.base.log import logger
from swiftlite.data.changed_samples import LazySamples
from swiftlite.data.encoder import Encoded, EncoderPool
from swiftlite.data.packing.packing import join_ranges
from swiftlite.data.rows.conversation import BadRow, Conversation
from swiftlite.data.rows.hub_rows import HubRows
from swiftlite.data.rows.sources import DataFile, checked_rows
from swiftlite.data.sample import IGNORED, Sample, digest, make_sample

PART_TOKENS = 1 << 23
PART_ROWS = 1 << 17
"""A part ends at this number of tokens or rows. A killed run loses at most the part that it was encoding."""
LOG_SECONDS = 10

TOKEN_COLUMNS = {"input_ids": np.int32, "loss_scale": np.float32}
"""One entry per token. Labels are not stored: the tokens with a weight above 0 are labels."""
SEQUENCE_COLUMNS = {"lengths": np.int32, "num_sequences": np.int32, "num_trained": np.int32, "trains_heads": np.uint8}
"""One entry per sequence. `num_sequences` is the number of sequences of the sample that begins with this sequence, and
0 for its other sequences."""
ROW_COLUMNS = {
    "numbers": np.int64,  # in the file, from 0
    "lines": np.int64,
    "num_samples": np.int32,
    "row_lengths": np.int32,  # before truncation
    "reserved": np.int32,
    "num_images": np.int32,
    "channels": np.int32,  # index in `PartFacts.channels`, -1 without a channel
}
"""One entry per row that is not bad."""
COLUMNS: dict[str, Any] = {**TOKEN_COLUMNS, **SEQUENCE_COLUMNS, **ROW_COLUMNS}


@dataclass
class PartFacts:
    """The values of a part that are not arrays.

    Attributes:
        num_rows: number of rows in the file, including bad rows and rows that are not in the sample.
        num_not_sampled: number of rows that are not in the sample of `FILE#N`.
        num_parsed: number of rows that were encoded, including those that cannot be encoded.
        channels: names of channels.
        unparsed: (line, problem, hint) of each row that is not valid.
        unencoded: the same for each row that is valid but cannot be encoded.
        num_special: number of rows with a special token in their text.
        special: line and special token of the first of these rows.
    """

    num_rows: int = 0
    num_not_sampled: int = 0
    num_parsed: int = 0
    channels: list[str] = field(default_factory=list)
    unparsed: list[tuple[int, str, str]] = field(default_factory=list)
    unencoded: list[tuple[int, str, str]] = field(default_factory=list)
    num_special: int = 0
    special: tuple[int, str] = (0, "")


@dataclass(frozen=True)
class Part:
    """Consecutive rows of one file.

    Attributes:
        columns: the arrays by name, see `COLUMNS`.
        extras: the extras of each sequence; empty if no sequence has any.
        can_be_stored: False if rows have extras, or images, whose files can change.
    """

    columns: Mapping[str, np.ndarray]
    facts: PartFacts
    extras: Sequence[Mapping[str, Any]] = ()
    can_be_stored: bool = True

    def is_consistent(self) -> bool:
        """Return whether the arrays fit together, so that reading a sample stays inside of them."""
        columns = self.columns
        sizes = {len(columns[name]) for name in ROW_COLUMNS}, {len(columns[name]) for name in SEQUENCE_COLUMNS}
        tokens = {len(columns[name]) for name in TOKEN_COLUMNS}
        lengths, counts = columns["lengths"].astype(np.int64), columns["num_sequences"].astype(np.int64)
        if any(len(size) > 1 for size in (*sizes, tokens)) or (lengths < 0).any() or (counts < 0).any():
            return False
        firsts = np.flatnonzero(counts)
        ends = np.cumsum(counts[firsts])
        channels = columns["channels"]
        return (
            tokens == {int(lengths.sum())}
            and np.array_equal(firsts, ends - counts[firsts])
            and (ends[-1] if len(ends) else 0) == len(counts)
            and not (columns["num_samples"] < 0).any()
            and int(columns["num_samples"].sum(dtype=np.int64)) == len(firsts)
            and not ((channels < -1) | (channels >= len(self.facts.channels))).any()
        )


class _PartBuilder:
    def __init__(self):
        self._tokens: dict[str, list[np.ndarray]] = {name: [np.empty(0, kind)] for name, kind in TOKEN_COLUMNS.items()}
        self._columns: dict[str, list[int]] = {name: [] for name in (*SEQUENCE_COLUMNS, *ROW_COLUMNS)}
        self._extras: list[Mapping[str, Any]] = []
        self._channels: dict[str, int] = {}
        self._num_tokens = 0
        self.can_be_stored = True  # of `Part`
        self.facts = PartFacts()

    @property
    def is_full(self) -> bool:
        return self._num_tokens >= PART_TOKENS or self.facts.num_rows >= PART_ROWS

    def add(self, number: int, line: int, row: Conversation | BadRow | None, encoded: Encoded | None) -> None:
        """Add a row.

        Args:
            row: None if it is not in the sample.
            encoded: the result of encoding a conversation.
        """
        facts = self.facts
        facts.num_rows += 1
        if row is None:
            facts.num_not_sampled += 1
        elif isinstance(row, BadRow):
            facts.unparsed.append((line, row.problem, row.hint))
        else:
            assert encoded is not None
            facts.num_parsed += 1
            self.can_be_stored &= not row.images
            if encoded.bad is not None:
                facts.unencoded.append((line, encoded.bad.problem, encoded.bad.hint))
            else:
                self._add_row(number, line, row, encoded)

    def _add_row(self, number: int, line: int, row: Conversation, encoded: Encoded) -> None:
        if encoded.special_token:
            if not self.facts.num_special:
                self.facts.special = (line, encoded.special_token)
            self.facts.num_special += 1
        for sample in encoded.samples:
            num_sequences = len(sample.sequences)
            for sequence in sample.sequences:
                self._add_sequence(sequence, num_sequences)
                num_sequences = 0
        channel = -1
        if row.channel is not None:
            channel = self._channels.setdefault(row.channel, len(self._channels))
        values = (number, line, len(encoded.samples), encoded.length, encoded.reserved, len(row.images), channel)
        for name, value in zip(ROW_COLUMNS, values, strict=True):
            self._columns[name].append(value)

    def _add_sequence(self, sequence: Sample, num_sequences: int) -> None:
        is_trained = sequence.loss_scale > 0
        if not np.array_equal(sequence.labels, np.where(is_trained, sequence.input_ids, IGNORED)):
            raise ValueError(f"{sequence.source}: labels must be the tokens with a weight above 0")
        self._num_tokens += len(sequence)
        for name, arrays in self._tokens.items():
            arrays.append(vars(sequence)[name])
        values = (len(sequence), num_sequences, int(is_trained.sum()), sequence.trains_heads)
        for name, value in zip(SEQUENCE_COLUMNS, values, strict=True):
            self._columns[name].append(value)
        self._extras.append(sequence.extras)
        self.can_be_stored &= not sequence.extras

    def build(self) -> Part:
        columns = {name: np.concatenate(arrays) for name, arrays in self._tokens.items()}
        columns |= {name: np.array(values, COLUMNS[name]) for name, values in self._columns.items()}
        self.facts.channels = list(self._channels)
        extras = self._extras if any(self._extras) else ()
        return Part(columns, self.facts, extras, self.can_be_stored)


def encode_file(
    file: DataFile | HubRows,
    pool: EncoderPool,
    *,
    system: str | None,
    seed: int,
    first: int = 0,
    to_store: bool = False,
) -> Iterator[Part]:
    """Encode the rows of a file from number `first`, and yield parts. Conversations are freed once they are encoded.

    Args:
        to_store: whether to end after the first row that cannot be stored, with a part that says so.

    Raises:
        UserError: the file does not have the format of its suffix.
    """
    rows, again = itertools.tee(checked_rows(file, system=system, parse=pool.encoder.parse, seed=seed, first=first))
    encoded = pool.encode(row if isinstance(row, Conversation) else None for _, row in again)
    progress = _Progress(file, first)
    builder = _PartBuilder()
    # `again` is read ahead of `rows`, which therefore ends second.
    for number, (result, (line, row)) in enumerate(zip(encoded, rows, strict=True), start=first):
        builder.add(number, line, row, result)
        if to_store and not builder.can_be_stored:
            break
        if builder.is_full:
            yield builder.build()
            builder = _PartBuilder()
        progress.log(number + 1)
    if builder.facts.num_rows:
        yield builder.build()


class _Progress:
    """Logs the progress of reading a file.

    Args:
        first: number of rows that were read before.
    """

    def __init__(self, file: DataFile | HubRows, first: int):
        self._file = file
        self._first = first
        self._start = self._logged = time.monotonic()
        self._total: int | None = None

    def log(self, num_rows: int) -> None:
        """Log the number of rows that have been read, unless this was done recently."""
        now = time.monotonic()
        if now - self._logged < LOG_SECONDS:
            return
        if self._logged == self._start and isinstance(self._file, DataFile):
            self._total = self._file.count_rows()
        self._logged = now
        rate = (num_rows - self._first) / (now - self._start)
        words = f"{self._file.name}: {num_rows:,} rows tokenized, {rate:,.0f} rows/s"
        if self._total is not None:
            left = max(self._total - num_rows, 0) / rate
            words += f", {left / 60:.0f} min left" if left > 90 else f", {left:.0f} s left"
        logger.info("%s", words)


class EncodedRows:
    """The rows of several files.

    The attributes that end in `_R` are arrays with one entry per row, and those in `_S` with one entry per sequence.

    Args:
        files: the files with their parts.
    """

    def __init__(self, files: Sequence[tuple[DataFile | HubRows, Sequence[Part]]]):
        self.files = [file for file, _ in files]
        self.parts = [part for _, parts in files for part in parts]
        numbers = [number for number, (_, parts) in enumerate(files) for _ in parts]
        num_rows = [len(part.columns["numbers"]) for part in self.parts]
        num_sequences = [len(part.columns["lengths"]) for part in self.parts]
        self.file_R = np.repeat(np.array(numbers, np.int32), num_rows)
        self.number_R = self._join("numbers")
        self.line_R = self._join("lines")
        self.length_R = self._join("row_lengths")
        self.reserved_R = self._join("reserved")
        self.num_images_R = self._join("num_images")
        self.num_samples_R = self._join("num_samples")
        self.channel_R = self._join("channels")
        self.part_starts = np.cumsum([0, *num_sequences])
        self.length_S = self._join("lengths")
        self.num_sequences_S = self._join("num_sequences")
        self.num_trained_S = self._join("num_trained")
        self.trains_heads_S = self._join("trains_heads")
        # The first token of each sequence in its part.
        ends = np.cumsum(self.length_S, dtype=np.int64)
        starts = ends - self.length_S
        self.start_S = starts - np.repeat(np.append(starts, 0)[self.part_starts[:-1]], num_sequences)
        self.row_of_S = np.repeat(np.arange(len(self.file_R), dtype=np.int32), self._num_sequences_R())

    def _join(self, name: str) -> np.ndarray:
        return np.concatenate([np.empty(0, COLUMNS[name]), *(part.columns[name] for part in self.parts)])

    def _num_sequences_R(self) -> np.ndarray:
        firsts = np.flatnonzero(self.num_sequences_S)
        row_of_sample = np.repeat(np.arange(len(self.file_R)), self.num_samples_R)
        counts = np.zeros(len(self.file_R), np.int64)
        np.add.at(counts, row_of_sample, self.num_sequences_S[firsts])
        return counts

    def __len__(self) -> int:
        return len(self.file_R)

    def source(self, row: int) -> str:
        """Return `file:line` of a row."""
        return f"{self.files[self.file_R[row]].name}:{self.line_R[row]}"

    def part_of(self, sequence: int) -> int:
        """Return the number of the part with a sequence."""
        return int(np.searchsorted(self.part_starts, sequence, side="right")) - 1

    def samples_of(self, rows: np.ndarray) -> "Samples":
        """Return the samples of some rows, in the order of `rows`."""
        firsts = np.flatnonzero(self.num_sequences_S)
        ends = np.cumsum(self.num_samples_R, dtype=np.int64)
        counts = self.num_samples_R[rows].astype(np.int64)
        return Samples(self, firsts[join_ranges(ends[rows] - counts, counts)])

    def sequence(self, number: int) -> Sample:
        """Return a sequence as a sample."""
        part_number = self.part_of(number)
        part, row = self.parts[part_number], int(self.row_of_S[number])
        start, length = int(self.start_S[number]), int(self.length_S[number])
        here = slice(start, start + length)
        channel = None
        if self.channel_R[row] >= 0:
            channel = part.facts.channels[self.channel_R[row]]
        columns = part.columns
        sample = make_sample(columns["input_ids"][here], columns["loss_scale"][here], self.source(row), channel)
        extras = part.extras[number - self.part_starts[part_number]] if part.extras else {}
        if extras or not self.trains_heads_S[number]:
            sample = replace(sample, trains_heads=bool(self.trains_heads_S[number]), extras=extras)
        return sample


class Samples(LazySamples):
    """Samples of encoded rows. Each is created when it is read; a slice is again `Samples`.

    Args:
        rows: the rows.
        firsts: int64 `[num_samples]`, the first sequence of each sample.
    """

    def __init__(self, rows: EncodedRows, firsts: np.ndarray):
        self.rows = rows
        self._firsts = firsts

    def __len__(self) -> int:
        return len(self._firsts)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return Samples(self.rows, self._firsts[index])
        first = int(self._firsts[index])
        sample, *others = map(self.rows.sequence, range(first, first + int(self.rows.num_sequences_S[first])))
        return replace(sample, others=tuple(others)) if others else sample

    @property
    def are_sequences(self) -> bool:
        """Whether each sample is a single sequence without extras."""
        has_extras = any(part.extras for part in self.rows.parts)
        return not has_extras and bool((self.rows.num_sequences_S[self._firsts] == 1).all())

    def sequences(self) -> np.ndarray:
        """Return the numbers of all sequences in order, int64."""
        return join_ranges(self._firsts, self.rows.num_sequences_S[self._firsts].astype(np.int64))

    def lengths(self) -> tuple[np.ndarray, np.ndarray]:
        counts = self.rows.num_sequences_S[self._firsts].astype(np.int64)
        return self.rows.length_S[self.sequences()].astype(np.int64), np.cumsum(counts) - counts


CHUNK_TOKENS = 1 << 17


def digest_of(*groups: Samples) -> str:
    """Return `sample.digest` of the samples of all groups, without creating the samples if they have no extras."""
    if any(part.extras for group in groups for part in group.rows.parts):
        return digest(itertools.chain(*groups))
    sha = hashlib.sha256()
    for group in groups:
        for words, _ in _words(group):
            sha.update(words.data)
    return sha.hexdigest()


CHUNK_SAMPLES = 1 << 14


def keys_of(samples: Sequence[Sample]) -> np.ndarray:
    """Return the first 8 bytes of `sample.digest` of each sample, uint64. Few samples are in memory at a time."""
    keys = np.empty(len(samples), np.uint64)
    for first in range(0, len(samples), CHUNK_SAMPLES):
        some = samples[first : first + CHUNK_SAMPLES]
        keys[first : first + len(some)] = np.frombuffer(b"".join(_digests(some)), "<u8")
    return keys


def _digests(samples: Sequence[Sample]) -> Iterator[bytes]:
    """Yield the first 8 bytes of `sample.digest` of each sample."""
    if isinstance(samples, Samples) and samples.are_sequences:
        for words, sizes in _words(samples):
            content, end = words.tobytes(), 0
            for size in sizes.tolist():
                first, end = end, end + 4 * size
                yield hashlib.sha256(content[first:end]).digest()[:8]
        return
    for sample in samples:
        yield bytes.fromhex(digest([sample]))[:8]


def _words(samples: Samples) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield what `sample.digest` hashes: for each sequence its length as 8 bytes, tokens, labels and weights.

    The second array has the number of words of each sequence.
    """
    rows, sequences = samples.rows, samples.sequences()
    part_numbers = np.searchsorted(rows.part_starts, sequences, side="right") - 1
    lengths = rows.length_S[sequences].astype(np.int64)
    # A chunk has sequences of one part, and ends after about CHUNK_TOKENS.
    chunk_numbers = np.cumsum(lengths) // CHUNK_TOKENS
    is_first = (np.diff(part_numbers, prepend=-1) != 0) | (np.diff(chunk_numbers, prepend=-1) != 0)
    bounds = [*np.flatnonzero(is_first).tolist(), len(sequences)]
    for first, end in itertools.pairwise(bounds):
        columns = rows.parts[part_numbers[first]].columns
        here = slice(first, end)
        tokens = join_ranges(rows.start_S[sequences[here]], lengths[here])
        sizes = 2 + 3 * lengths[here]  # in words of 4 bytes
        starts = np.cumsum(sizes) - sizes
        words = np.zeros(int(sizes.sum()), np.int32)
        words[starts] = lengths[here]  # the upper 4 bytes are zero
        places = join_ranges(starts + 2, lengths[here])
        shifts = np.repeat(lengths[here], lengths[here])
        ids, weights = columns["input_ids"][tokens], columns["loss_scale"][tokens]
        words[places] = ids
        words[places + shifts] = np.where(weights > 0, ids, IGNORED)
        words[places + 2 * shifts] = weights.view(np.int32)
        yield words, sizes
