"""Stream samples from files without holding the files in memory (`--streaming`). One or several ranks read.

Rows are numbered in file order through all epochs. Reader `n % size` parses and tokenizes row n, in a thread that reads
slightly ahead. Then the readers exchange the lengths of samples. Each reader thus knows the length of every sample but
holds only the samples that it has read. All readers compute the same order of samples, which depends neither on the
number of readers nor on how far they have read ahead.

Every reader computes a digest of each file up to each row. The state of a stream contains the digests up to its
position, so that a resumed run detects changes of rows that it has read; rows that it has not read may change.
"""

import hashlib
import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from swiftlite.base.errors import UserError
from swiftlite.base.log import logger
from swiftlite.data.encoder import Encoded, Encoder, special_token_note
from swiftlite.data.packing.mixture import Mixture
from swiftlite.data.packing.packing import StreamSample
from swiftlite.data.rows.conversation import BadRow
from swiftlite.data.rows.hub_rows import HubRows
from swiftlite.data.rows.sources import DataFile, check_row, find_rows
from swiftlite.data.sample import Sample
from swiftlite.data.sandbox import run_templates_unbounded

CHUNK_ROWS = 32
"""Number of rows that each reader reads between two exchanges of lengths."""
CHUNKS_AHEAD = 4

Gather = Callable[[list[int]], list[list[int]]]
"""A collective function. Each reader passes its list of numbers; the result contains the lists of all readers, by
rank."""
# Codes that a reader sends for a row instead of its number of samples.
BAD = -1
BAD_AGAIN = -2  # in a later epoch; counted in the first one
TOO_LONG = -3  # if --truncation_strategy is error


@dataclass
class Readers:
    """The readers of a stream: index of this reader, number of readers, and a collective function that exchanges
    numbers.
    """

    rank: int = 0
    size: int = 1
    gather: Gather = field(default=lambda numbers: [numbers])

    def owns(self, row: int) -> bool:
        return self.owner(row) == self.rank

    def owner(self, row: int) -> int:
        return row % self.size

    def say(self, owner: int, text: str) -> str:
        """Broadcast `text` from the reader `owner` to all readers; collective."""
        # As the numbers of its bytes, because readers exchange numbers.
        sent = list(text.encode()) if owner == self.rank else []
        return bytes(self.gather(sent)[owner]).decode()


class Position(NamedTuple):
    """A position in the files: the number of the file, the number of rows read from it, and their digest."""

    file: int
    num_rows: int = 0
    digest: bytes = b""

    def after(self, content: bytes) -> "Position":
        """Return the position after one more row.

        Digests are chained, so that each row has one and a resumed stream does not depend on the state of a hash.
        """
        digest = hashlib.blake2b(self.digest + content, digest_size=16).digest()
        return Position(self.file, self.num_rows + 1, digest)


class StreamRow(NamedTuple):
    """A function that parses a row, the row's `file:line`, and the position after it."""

    parse: Callable[[], Any]
    source: str
    position: Position


@dataclass(frozen=True)
class Chunk:
    """Consecutive rows, as read by one reader.

    Attributes:
        first: number of the first row.
        own: the rows of the chunk that this reader has read.
        said: for each row of `own`, a code such as `BAD`, or the number of the row's samples followed by their lengths.
        rows_per_epoch: number of rows of each part (`FilePart`); 0 until the end of the part has been read once.
        positions: the positions after each row of the chunk, including those of other readers.
    """

    first: int
    own: list[Encoded]
    said: list[int]
    rows_per_epoch: list[int]
    positions: list[Position]

    def facts(self) -> list[int]:
        """Return numbers that are equal on all readers if they read the same files."""
        digests = b"".join(position.digest for position in self.positions)
        # 7 bytes, so that the number fits into the int64 in which it is sent.
        return [*self.rows_per_epoch, int.from_bytes(hashlib.blake2b(digests, digest_size=7).digest())]


class FilePart(Iterator[StreamRow]):
    """An infinite iterator over the rows of some files, one file after another.

    Attributes:
        rows_per_epoch: number of rows of the files; 0 until their end has been read once.
        first: position in its epoch of the first row to return; earlier rows are skipped.

    Args:
        files: the files with their numbers in --dataset.
        known: by number of the file, a position that was reached before. It is replaced when a file has been read.
        num_read: number of rows that were already read.

    Raises:
        UserError: while iterating, if the files have no rows, or rows that were read before have changed.
    """

    def __init__(
        self,
        files: Mapping[int, DataFile],
        known: dict[int, Position],
        rows_per_epoch: int = 0,
        num_read: int = 0,
    ):
        self.files = files
        self._known = known
        self.rows_per_epoch = rows_per_epoch
        self.num_read = num_read
        self.first = _place(num_read, rows_per_epoch)
        self._num_to_pass = self.first
        self._rows: Iterator[tuple[int, StreamRow]] = self._read()

    def __next__(self) -> StreamRow:
        while self._num_to_pass:
            self._pass()
        _, row = next(self._rows)
        self.num_read += 1
        return row

    @property
    def is_first_epoch(self) -> bool:
        """Whether the last returned row belongs to the first epoch."""
        return not self.rows_per_epoch or self.num_read <= self.rows_per_epoch

    def one_epoch(self) -> Iterator[StreamRow]:
        """Yield the rows of all files once.

        Raises:
            UserError: rows that were read before have changed; after the first epoch, also if a file has more rows.
        """
        for number, file in self.files.items():
            known, position = self._known.get(number), Position(number)
            for row in file.unparsed_rows():
                position = position.after(row.content())
                # The digest after this row covers all rows before it.
                if known and position.num_rows == known.num_rows and position != known:
                    raise _changed(f"--dataset {file.name}")
                yield StreamRow(row.parse, f"{file.name}:{row.line}", position)
            if known and (position.num_rows < known.num_rows or (self.rows_per_epoch and position != known)):
                raise _changed(f"--dataset {file.name}")
            self._known[number] = position

    def up_to_first(self) -> Iterator[tuple[int, StreamRow]]:
        """Yield (position, row) for each skipped row and for the first row to return.

        Iterating over this object afterwards starts with the first row to return.
        """
        while self._num_to_pass:
            yield self._pass()
        # The first row as well: if some of its samples were returned, these may have to be held.
        first = next(self._rows)
        self._rows = itertools.chain([first], self._rows)
        yield first

    def _pass(self) -> tuple[int, StreamRow]:
        self._num_to_pass -= 1
        return next(self._rows)

    def _read(self) -> Iterator[tuple[int, StreamRow]]:
        """Yield (position, row) from the start of an epoch, with the rows to skip.

        Example: a part has 5 rows, of which 7 were already read. Positions 0 and 1 are skipped; 2, 3, 4, 0, ...
        follow."""
        at_least = self.first
        while True:
            num_rows = 0
            for row in self.one_epoch():
                yield num_rows, row
                num_rows += 1
            # With fewer rows than were skipped, or than in the first epoch, all later positions would be others.
            if num_rows < at_least or self.rows_per_epoch not in (0, num_rows):
                raise _changed("--dataset")
            if not num_rows:
                raise UserError(f"{', '.join(file.name for file in self.files.values())} has no rows")
            self.rows_per_epoch = num_rows
            at_least = 0


class Stream(Iterator[StreamSample]):
    """An infinite iterator over positions and lengths of samples. `take` returns the samples that this reader has read.

    Attributes:
        num_read: number of rows whose samples have all been returned.
        rows_per_epoch: number of rows of each part (`FilePart`), 0 until the number is known.

    Args:
        files: files in formats that are read row by row, without sampling.
        encoder: encodes rows in a thread; it must not be used elsewhere at the same time.
        readers: the readers that share the work; default: only this one.
        probabilities: weight of each file; default: the files are read one after another.
        seed: seed of the draws.
        max_bad_rows: maximum number of bad rows per epoch.
        system: system prompt for rows without one.
        state: to continue an earlier stream, its `state()`. The earlier stream must have the same options except
            `max_bad_rows`, but can have another number of readers. Rows after its position may have changed.

    Raises:
        UserError: a file is missing. While iterating, on every reader: there are more bad rows than allowed, a row is
            too long with --truncation_strategy error, no row is kept, or files have changed.
    """

    def __init__(
        self,
        files: Sequence[str],
        encoder: Encoder,
        *,
        readers: Readers | None = None,
        probabilities: Sequence[float] = (),
        seed: int = 0,
        max_bad_rows: int = 0,
        system: str | None = None,
        state: Mapping[str, Any] | None = None,
    ):
        self._mixture = Mixture(probabilities, seed)
        self._encoder = encoder
        self._readers = readers or Readers()
        self._max_bad_rows = max_bad_rows
        self._system = system
        self._has_warned = False
        self._left_out: list[str] = []
        zeros = [0] * self._mixture.num_parts
        state = state or {"num_read": 0, "piece": 0, "rows_per_epoch": zeros, "num_kept": zeros, "num_bad": 0}
        self.num_read: int = state["num_read"]
        self._piece: int = state["piece"]  # samples of row `num_read` that were returned
        self.rows_per_epoch: list[int] = list(state["rows_per_epoch"])
        self._num_kept: list[int] = list(state["num_kept"])
        self._num_bad: int = state["num_bad"]
        read_before = [(number, bytes.fromhex(digest)) for number, digest in state.get("files", ())]
        # Files that were read must stay in --dataset; the others may be left out.
        if any(number for number, _ in read_before[len(files) :]):
            raise _changed("--dataset")
        # Up to which row each file was read, of those whose samples were returned.
        self._positions = [Position(file) for file in range(len(files))]
        for file, (number, digest) in enumerate(read_before[: len(files)]):
            self._positions[file] = Position(file, number, digest)
        counts = self._mixture.counts(self.num_read)
        self._parts: list[FilePart] = []
        for part, of_part in enumerate(_parts_of(files, self._mixture.num_parts)):
            known = {file: self._positions[file] for file in of_part if self._positions[file].num_rows}
            self._parts.append(FilePart(of_part, known, self.rows_per_epoch[part], counts[part]))
        self._held: dict[tuple[int, int], Sample] = {}  # by row and piece
        self._entries = self._read()

    def __next__(self) -> StreamSample:
        return next(self._entries)

    def take(self, entries: Iterable[StreamSample]) -> list[Sample]:
        """Return the samples among `entries` that this reader holds, and release them."""
        return [self._held.pop((entry.row, entry.piece)) for entry in entries if self._readers.owns(entry.row)]

    def owner(self, entry: StreamSample) -> int:
        """Return the reader that holds the sample."""
        return self._readers.owner(entry.row)

    def take_left_out(self) -> list[str]:
        """Return messages about the bad rows that were left out since the last call, the same on every reader."""
        taken, self._left_out = self._left_out, []
        return taken

    def state(self) -> dict[str, Any]:
        """Return the state of this stream for JSON; a new `Stream` can continue from it.

        The new stream must call `hold` for samples that were returned but not taken."""
        counts = self._counts()
        return {
            "num_read": self.num_read,
            "piece": self._piece,
            # In its first epoch, a part may still become longer or shorter, although its end was read ahead.
            "rows_per_epoch": [
                num_rows if count > num_rows else 0 for num_rows, count in zip(self.rows_per_epoch, counts, strict=True)
            ],
            "num_kept": list(self._num_kept),
            "num_bad": self._num_bad,
            "files": [[position.num_rows, position.digest.hex()] for position in self._positions],
        }

    def _counts(self) -> list[int]:
        """Return the number of rows of each part of which samples were returned, or that were left out before."""
        return self._mixture.counts(self.num_read + (self._piece > 0))

    def hold(self, entries: Iterable[StreamSample]) -> None:
        """Read samples again that an earlier stream has returned, but that were not taken. No other rows are tokenized.

        The rows of these samples are read while the stream skips to its position, before it returns the first sample.
        After the first epoch of a part, all its files are read to their ends, because the stream has read all rows.

        Raises:
            UserError: a row that the stream has read before has changed.
        """
        wanted: dict[tuple[int, int], list[StreamSample]] = {}  # by part and row; a row can be held in several epochs
        for entry in entries:
            if not self._readers.owns(entry.row):
                continue
            part, number = self._mixture.place(entry.row)
            place = _place(number, self.rows_per_epoch[part])
            wanted.setdefault((part, place), []).append(entry)
        for number, (part, count) in enumerate(zip(self._parts, self._counts(), strict=True)):
            rows = part.up_to_first()
            if part.rows_per_epoch:
                rows = enumerate(part.one_epoch())
                count = part.rows_per_epoch
            for place, row in rows:
                if place < count:
                    self._advance(row.position)  # of a checkpoint without digests
                for entry in wanted.pop((number, place), ()):
                    self._hold(entry, self._encode(row.parse(), row.source))
        if wanted:
            raise _changed("--dataset")

    def _hold(self, entry: StreamSample, encoded: Encoded) -> None:
        if entry.piece >= len(encoded.samples) or len(encoded.samples[entry.piece]) != entry.length:
            raise _changed(encoded.source)
        self._held[entry.row, entry.piece] = encoded.samples[entry.piece]

    def _read(self) -> Iterator[StreamSample]:
        """Yield samples from the current position, after the readers have exchanged the lengths."""
        for chunk in _ahead(self._chunks()):
            own = iter(chunk.own)
            # Sent along with the lengths, because one exchange per chunk is enough for both.
            facts = chunk.facts()
            said = [iter(numbers) for numbers in self._readers.gather(facts + chunk.said)]
            for numbers in said:
                if list(itertools.islice(numbers, len(facts))) != facts:
                    problem = "--dataset differs between the nodes of this run"
                    raise UserError(problem, "use the same files on each node")
            # Of this chunk: the thread has read ahead, and may have reached the end of an epoch already.
            self.rows_per_epoch = chunk.rows_per_epoch
            for row, position in enumerate(chunk.positions, start=chunk.first):
                encoded = next(own) if self._readers.owns(row) else Encoded()
                yield from self._samples_of(row, position, encoded, said[self._readers.owner(row)])
            self._check_all_parts_have_rows()

    def _samples_of(
        self, row: int, position: Position, encoded: Encoded, said: Iterator[int]
    ) -> Iterator[StreamSample]:
        """Yield the samples of row number `row` that the stream has not returned yet.

        Args:
            position: the position after the row.
            said: iterator over the numbers that the row's reader sent, positioned at the numbers of this row.
        """
        num_samples = next(said)
        if num_samples in (BAD, TOO_LONG):
            self._leave_out(row, encoded, num_samples)
        self._advance(position)
        lengths = list(itertools.islice(said, max(0, num_samples)))
        for piece in range(self._piece, len(lengths)):
            if self._readers.owns(row):
                self._held[row, piece] = encoded.samples[piece]
            # At the first piece only: a stream that resumes within a row has counted it before.
            self._num_kept[self._mixture.part(row)] += piece == 0
            # Before the yield: `state` can be called while the generator waits there.
            self._piece = piece + 1
            yield StreamSample(row, piece, lengths[piece])
        self.num_read = row + 1
        self._piece = 0

    def _advance(self, position: Position) -> None:
        if position.num_rows > self._positions[position.file].num_rows:  # in later epochs, the whole file was read
            self._positions[position.file] = position

    def _leave_out(self, row: int, encoded: Encoded, why: int) -> None:
        """Count a row that is left out for the reason `why` (BAD or TOO_LONG), on every reader.

        Raises:
            UserError: there are too many bad rows, or the row is too long and --truncation_strategy is error.
        """
        problem, hint = "", ""
        if why == TOO_LONG:
            problem = f"{encoded.source} has {encoded.length} tokens, over --max_length {self._encoder.max_length}"
            hint = f"use --max_length {encoded.length} or more, or --truncation_strategy delete, left or right"
        else:
            self._num_bad += 1
            if self._num_bad <= self._max_bad_rows:
                self._left_out.append(self._readers.say(self._readers.owner(row), str(encoded.bad)))
                return
            problem = str(encoded.bad)
            if self._max_bad_rows:
                problem += f"; {self._max_bad_rows} bad rows before it were skipped"
            hint = f"use --resume --max_bad_rows {self._num_bad} to skip it, but no bad row after it"
            if encoded.bad and encoded.bad.hint:
                hint = f"{encoded.bad.hint}\n    {hint}"
        # All readers raise the same error, whose text only the row's reader has.
        owner = self._readers.owner(row)
        raise UserError(self._readers.say(owner, problem), self._readers.say(owner, hint))

    def _check_all_parts_have_rows(self) -> None:
        for part, num_rows, num_kept in zip(self._parts, self.rows_per_epoch, self._num_kept, strict=True):
            if num_rows and not num_kept:
                flag = "--dataset"
                if len(self._parts) > 1:
                    flag = f"--dataset {next(iter(part.files.values())).name}"
                raise UserError(
                    f"{flag}: all {num_rows} rows are bad or over --max_length {self._encoder.max_length}",
                    "use a larger --max_length, or --truncation_strategy right",
                )

    # Methods that run in the thread

    def _chunks(self) -> Iterator[Chunk]:
        """Yield this reader's rows from the current position."""
        for first in itertools.count(self.num_read, CHUNK_ROWS * self._readers.size):
            own: list[Encoded] = []
            said: list[int] = []
            positions: list[Position] = []
            # Each reader also passes the rows of the others, for the digests, but neither parses nor tokenizes them.
            for row in range(first, first + CHUNK_ROWS * self._readers.size):
                part = self._parts[self._mixture.part(row)]
                parse, source, position = next(part)
                positions.append(position)
                if self._readers.owns(row):
                    encoded = self._encode(parse(), source)
                    own.append(encoded)
                    said += self._outcome(encoded, part.is_first_epoch)
            yield Chunk(first, own, said, [part.rows_per_epoch for part in self._parts], positions)

    def _outcome(self, encoded: Encoded, is_first_epoch: bool) -> list[int]:
        """Return the numbers that this reader sends for a row, in the format of `Chunk.said`."""
        if encoded.bad and is_first_epoch:
            return [BAD]
        if encoded.bad:
            return [BAD_AGAIN]
        if not encoded.samples and self._encoder.truncation_strategy == "error":
            return [TOO_LONG]
        return [len(encoded.samples), *map(len, encoded.samples)]

    def _encode(self, row: object, source: str) -> Encoded:
        parsed = check_row(row, source, system=self._system, parse=self._encoder.parse)
        if isinstance(parsed, BadRow):
            return Encoded(bad=parsed, source=source)
        encoded = self._encoder(parsed)
        if encoded.special_token and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "%s; further rows are not reported", special_token_note(encoded.source, encoded.special_token)
            )
        return encoded


def _parts_of(files: Sequence[str], num_parts: int) -> list[dict[int, DataFile]]:
    """Return the files of each part, with their numbers in --dataset."""
    found: dict[int, DataFile] = {}
    for number, name in enumerate(files):
        file = find_rows(name)
        assert not isinstance(file, HubRows), "rules let no dataset of the hub be streamed"
        found[number] = file
    if num_parts == 1:
        return [found]
    return [{number: file} for number, file in found.items()]


def _ahead(chunks: Iterator[Chunk]) -> Iterator[Chunk]:
    """Yield the chunks, each read ahead in a thread."""
    # One thread: a generator runs in one at a time, and the futures are in the order of its chunks.
    pool = ThreadPoolExecutor(1, "reads --dataset", initializer=run_templates_unbounded)
    pending = deque(pool.submit(next, chunks) for _ in range(CHUNKS_AHEAD))
    try:
        while True:
            chunk = pending.popleft().result()
            pending.append(pool.submit(next, chunks))
            yield chunk
    finally:
        pool.shutdown(cancel_futures=True)


def _place(number: int, rows_per_epoch: int) -> int:
    """Return the index of a row in its epoch; in the first epoch, `rows_per_epoch` is 0."""
    if not rows_per_epoch:
        return number
    return number % rows_per_epoch


def _changed(what: str) -> UserError:
    return UserError(
        f"{what} has changed since this run read it",
        "restore the rows that the run has read (rows after them may change), or start a new run",
    )
