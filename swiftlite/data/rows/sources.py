"""Read conversations from .jsonl, .json, .parquet, .csv and .txt files; `FILE#500` selects a random sample of 500 rows.

.jsonl files can be compressed by gzip or zstd (.jsonl.gz, .jsonl.zst); lines are read while they are decompressed.
Datasets on the hub (`hub_rows.py`) have the same interface. Every row has its `file:line`. Bad rows are returned with
the good ones; `dataset.py` decides how many are allowed. `conversation.py` defines the formats of rows."""

import csv
import io
import itertools
import json
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol, cast

import numpy as np

from swiftlite.args.data_file import SPEED_BENCH, data_suffix, is_number_of_rows, split_sample
from swiftlite.base.errors import UserError
from swiftlite.base.json_file import decode_json, parse_json, skip_space
from swiftlite.data.packing.padding import padding_error
from swiftlite.data.rows.arrow_bytes import bytes_of_rows
from swiftlite.data.rows.conversation import BadRow, Conversation, RowError, parse_row
from swiftlite.data.rows.hub_rows import HubRows
from swiftlite.hub.name import dataset_name


class RowParser(Protocol):
    """A function that parses a row: `parse_row` (conversations), `parse_pair`, `parse_rated` or `parse_document`.

    Raises:
        RowError: a field is invalid.
    """

    def __call__(self, row: object, *, system: str | None, source: str) -> Conversation: ...


class UnparsedRow(NamedTuple):
    """A row of a file before it is parsed.

    Attributes:
        line: number of its line, counted from 1.
        parse: a function that parses the row.
        content: a function that returns what identifies the row, for digests.
    """

    line: int
    parse: Callable[[], Any]
    content: Callable[[], bytes]


@dataclass(frozen=True)
class DataFile:
    """A file, and the number of rows to draw from it (None: all)."""

    path: Path
    sample: int | None = None

    @property
    def name(self) -> str:
        """Name of the file; messages refer to its rows as `file:line`."""
        return str(self.path)

    def rows(self) -> Iterator[tuple[int, Any]]:
        """Yield (line, row) for each row of a file that is read as a whole (`READERS`)."""
        return READERS[data_suffix(self.name)](self.path)

    def unparsed_rows(self) -> Iterator[UnparsedRow]:
        """Yield the rows of a file that is read row by row (`UNPARSED_READERS`).

        The caller can parse only the rows it needs.
        """
        return UNPARSED_READERS[data_suffix(self.name)](self.path)

    def count_rows(self) -> int | None:
        """Return the number of rows if it is known without parsing them, or nearly: blank lines count as rows."""
        suffix = data_suffix(self.name)
        if suffix == ".jsonl":
            with self.path.open("rb") as file:
                return sum(block.count(b"\n") for block in iter(partial(file.read, 1 << 20), b""))
        if suffix == ".parquet":
            import pyarrow.parquet

            with _naming_parquet(self.path, 0):
                return pyarrow.parquet.read_metadata(self.path).num_rows
        return None


@dataclass
class FileRows:
    """The rows of one file: `num_rows == len(conversations) + len(bad_rows) + num_not_sampled`."""

    num_rows: int = 0
    conversations: list[Conversation] = field(default_factory=list)
    bad_rows: list[BadRow] = field(default_factory=list)
    num_not_sampled: int = 0
    note: str = ""


def find_rows(spec: str) -> DataFile | HubRows:
    """Return the rows that `spec` names: `FILE`, `FILE#N` or a name on the hub.

    The rules have already checked its format.

    Raises:
        UserError: the file does not exist.
    """
    if spec.startswith(SPEED_BENCH):
        raise UserError(f"{spec} has no answers", "use it for bench, infer, or evaluate --infer_backend vllm")
    name, sample = split_sample(spec)
    path = Path(name)
    dataset = dataset_name(name)
    is_valid = not sample or is_number_of_rows(sample)
    num_rows = None
    if sample and is_valid:
        num_rows = int(sample)
    if dataset is not None and is_valid:
        return HubRows(dataset, num_rows)
    if not path.is_file() or not is_valid:
        raise UserError(f"{spec} does not exist", "each node reads the files on its own disk")
    return DataFile(path, num_rows)


def read_rows(
    file: DataFile | HubRows,
    *,
    system: str | None = None,
    parse: RowParser = parse_row,
    seed: int = 42,
) -> FileRows:
    """Read, check and, for `FILE#N`, sample the rows of one file or dataset, see `checked_rows`.

    Args:
        file: result of `find_rows`.
        system: system prompt for rows without one.
        parse: function that parses each row.
        seed: seed of the sample.

    Raises:
        UserError: the file does not have the format of its suffix, or has no rows.
    """
    rows = FileRows()
    for _, row in checked_rows(file, system=system, parse=parse, seed=seed):
        rows.num_rows += 1
        if row is None:
            rows.num_not_sampled += 1
        elif isinstance(row, BadRow):
            rows.bad_rows.append(row)
        else:
            rows.conversations.append(row)
    if not rows.num_rows:
        raise UserError(f"{file.name} has no rows")
    rows.note = sample_note(file, len(rows.conversations))
    return rows


def sample_note(file: DataFile | HubRows, num_drawn: int) -> str:
    """Return a note if a file has fewer good rows than `FILE#N` asks for; otherwise an empty string."""
    if file.sample is None or num_drawn >= file.sample:
        return ""
    return f"{file.name}#{file.sample}: the file has only {num_drawn} good rows; all are used"


def checked_rows(
    file: DataFile | HubRows, *, system: str | None, parse: RowParser, seed: int = 42, first: int = 0
) -> Iterator[tuple[int, Conversation | BadRow | None]]:
    """Yield (line, row) for the rows of a file from number `first` (counted from 0); None for rows not in the sample.

    The sample of `FILE#N` is drawn from the good rows and keeps their order. It depends only on the seed and the file,
    not on other files of the run. The file is read twice for it, so that no row has to stay in memory.

    Raises:
        UserError: the file does not have the format of its suffix.
    """

    def check(line: int, parse_line: Callable[[], Any]) -> Conversation | BadRow:
        return check_row(parse_line(), f"{file.name}:{line}", system=system, parse=parse)

    left_out = np.zeros(0, bool)
    if file.sample is not None:
        is_bad = np.array([isinstance(check(*row), BadRow) for row in _unparsed(file)], bool)
        good = np.flatnonzero(~is_bad)
        # RandomState, because numpy guarantees its stream across versions, unlike that of Generator.
        left_out = ~is_bad
        left_out[good[np.random.RandomState(seed).permutation(len(good))[: file.sample]]] = False
    for number, (line, parse_line) in enumerate(_unparsed(file)):
        if number < first:
            continue
        if number < len(left_out) and left_out[number]:
            yield line, None
        else:
            yield line, check(line, parse_line)


def conversations_at(
    file: DataFile | HubRows, numbers: Collection[int], *, system: str | None, parse: RowParser
) -> dict[int, Conversation]:
    """Read some rows of a file again, by their number in the file, counted from 0.

    Raises:
        UserError: the file has changed since it was read first.
    """
    found: dict[int, Conversation] = {}
    wanted = set(numbers)
    for number, (line, parse_line) in enumerate(_unparsed(file)):
        if len(found) == len(wanted):
            break
        if number in wanted:
            row = check_row(parse_line(), f"{file.name}:{line}", system=system, parse=parse)
            if isinstance(row, Conversation):
                found[number] = row
    if len(found) < len(wanted):
        raise UserError(f"{file.name} has changed since it was tokenized", "start the command again")
    return found


def _unparsed(file: DataFile | HubRows) -> Iterator[tuple[int, Callable[[], Any]]]:
    """Yield (line, function that returns the row) for each row of a file of any format."""
    if isinstance(file, DataFile) and data_suffix(file.name) in UNPARSED_READERS:
        for row in file.unparsed_rows():
            yield row.line, row.parse
        return
    for line, row in file.rows():
        yield line, lambda row=row: row


def check_row(
    row: object, source: str, *, system: str | None = None, parse: RowParser = parse_row
) -> Conversation | BadRow:
    """Parse one row of a file; return a `BadRow` if it is invalid.

    Args:
        source: `file:line`.
    """
    try:
        if isinstance(row, RowError):
            raise row
        return parse(row, system=system, source=source)
    except RowError as error:
        return BadRow(source, error.problem, error.hint)


def _check_columns(where: str, names: list[str]) -> None:
    """Reject several columns with the same name, because a row would silently contain only the last of them."""
    for name, number in Counter(names).items():
        if number > 1:
            raise UserError(f"{where}: {number} columns have the name {name!r}", "rename or remove all but one")


# Readers yield rows with their lines, counted from 1. The row is a RowError if it cannot be read.


def _rows_of_jsonl(path: Path) -> Iterator[UnparsedRow]:
    for number, raw in enumerate(_lines(path), start=1):
        if number == 1:
            raw = raw.removeprefix(b"\xef\xbb\xbf")
        if raw.strip():
            # Without the line break, which the last line of a file can gain later.
            yield UnparsedRow(number, partial(_parse_line, raw, path), raw.strip)


def _lines(path: Path) -> Iterator[bytes]:
    """Yield the lines of a file, decompressed if it is an archive.

    Raises:
        UserError: an archive is damaged or incomplete, or has a line that is too long.
    """
    compression = COMPRESSIONS.get(data_suffix(str(path)))
    if compression is None:
        with path.open("rb") as file:  # binary, because text mode also splits at a single \r
            yield from file
        return
    import pyarrow

    with pyarrow.input_stream(str(path), compression=compression) as stream:
        file = io.BufferedReader(cast(io.RawIOBase, stream), BLOCK_BYTES)
        for number in itertools.count(1):
            try:
                raw = file.readline(LONGEST_LINE)
            except (pyarrow.ArrowException, OSError) as error:
                place = f"{path}:{number}: the archive is damaged or incomplete: {error}"
                raise UserError(place, "write or copy the file again") from None
            if not raw:
                return
            if len(raw) == LONGEST_LINE:
                raise UserError(f"{path}:{number} has over {LONGEST_LINE} bytes", "write one JSON object per line")
            yield raw


BLOCK_BYTES = 1 << 20
LONGEST_LINE = 1 << 28
"""Maximum number of bytes of a line in an archive, which can have a thousand times the bytes of the archive."""
COMPRESSIONS = {".jsonl.gz": "gzip", ".jsonl.zst": "zstd"}
"""pyarrow's names of the compressions, by extension."""
MAGIC_BYTES = {".jsonl.gz": b"\x1f\x8b", ".jsonl.zst": b"\x28\xb5\x2f\xfd"}
"""The first bytes of the archives, which are not valid UTF-8."""


def _parse_line(raw: bytes, path: Path) -> Any:
    try:
        return parse_json(raw.decode("utf-8").rstrip("\r\n"))
    except json.JSONDecodeError as error:
        return RowError(f"column {error.colno}", f"not JSON: {error.msg}")
    except UnicodeDecodeError as error:
        return RowError(f"byte {error.start + 1}", "not UTF-8", _encoding_hint(path))


def _read_json(path: Path) -> Iterator[tuple[int, Any]]:
    """Read a file with an array of rows, or with rows one after another."""
    text = _decode(path)
    position = skip_space(text, 0)
    is_array = text.startswith("[", position)
    if is_array:
        position = skip_space(text, position + 1)
    line = 1
    counted = 0  # characters up to which `line` has counted
    while position < len(text) and not (is_array and text[position] == "]"):
        line += text.count("\n", counted, position)
        counted = position
        try:
            row, position = decode_json(text, position)
        except json.JSONDecodeError as error:
            raise UserError(f"{path}:{error.lineno}: column {error.colno}: not JSON: {error.msg}") from None
        yield line, row
        position = skip_space(text, position)
        if is_array and text.startswith(",", position):
            position = skip_space(text, position + 1)
        elif is_array and not text.startswith("]", position):
            raise _not_json(path, text, position, "expected , or ]")
    if not is_array:
        return
    if position >= len(text):
        raise _not_json(path, text, position, "the array is not closed by ]")
    rest = skip_space(text, position + 1)
    if rest < len(text):
        raise _not_json(path, text, rest, "unexpected text after the array")


def _read_csv(path: Path) -> Iterator[tuple[int, Any]]:
    # The standard library instead of pyarrow.csv, whose line numbers are wrong after a row that spans several lines.
    reader = csv.reader(io.StringIO(_decode(path), newline=""), strict=True)
    limit = csv.field_size_limit(sys.maxsize)  # the default limit is 128 KiB
    rows: list[tuple[int, Any]] = []
    try:
        header = next(reader, [])
        _check_columns(f"{path}:1", header)
        start = reader.line_num + 1
        for values in reader:
            if values and len(values) != len(header):
                rows.append((start, RowError("row", f"has {len(values)} columns, the header has {len(header)}")))
            elif values:
                rows.append((start, dict(zip(header, values, strict=True))))
            start = reader.line_num + 1  # a quoted value can span lines
    except csv.Error as error:
        raise UserError(f"{path}:{reader.line_num}: not CSV: {error}") from None
    finally:
        csv.field_size_limit(limit)  # the limit applies to the whole process
    return iter(rows)


def _rows_of_parquet(path: Path) -> Iterator[UnparsedRow]:
    for number, batch in _batches_of_parquet(path):
        all_bytes = cache(partial(_bytes_of_rows, batch, path, number))  # once per batch, and only for digests
        for index in range(batch.num_rows):
            parse = partial(_row_of_batch, batch, index, path, number)
            yield UnparsedRow(number + index, parse, partial(_bytes_of, all_bytes, index))


def _bytes_of_rows(batch: Any, path: Path, number: int) -> Callable[[int], bytes]:
    with _naming_parquet(path, number - 1):
        return bytes_of_rows(batch)


def _bytes_of(all_bytes: Callable[[], Callable[[int], bytes]], index: int) -> bytes:
    return all_bytes()(index)


def _row_of_batch(batch: Any, index: int, path: Path, number: int) -> Any:
    with _naming_parquet(path, number - 1):
        (row,) = batch.slice(index, 1).to_pylist()
    return padding_error(row) or row


def _batches_of_parquet(path: Path) -> Iterator[tuple[int, Any]]:
    """Yield (number of the batch's first row, batch)."""
    import pyarrow.parquet

    number = 1
    with _naming_parquet(path, 0):
        file = pyarrow.parquet.ParquetFile(path)
    with file:
        _check_columns(str(path), file.schema_arrow.names)
        batches = file.iter_batches(batch_size=1024)
        while True:
            with _naming_parquet(path, number - 1):
                batch = next(batches, None)
            if batch is None:
                return
            yield number, batch
            number += batch.num_rows


@contextmanager
def _naming_parquet(path: Path, num_read: int) -> Iterator[None]:
    """Convert errors in the context to a UserError that names the file and the last row that was read."""
    import pyarrow

    try:
        yield
    # Damaged files raise errors of pyarrow or OSError; text that is not UTF-8 and dates before year 1 raise the others.
    except (pyarrow.ArrowException, OSError, ValueError, OverflowError) as error:
        place = str(path)
        if num_read:
            place += f": after row {num_read}"
        raise UserError(f"{place}: not Parquet: {error}", "write or copy the file again") from None


def _read_txt(path: Path) -> Iterator[tuple[int, Any]]:
    """Read the whole file as one document."""
    yield 1, {"text": _decode(path)}


READERS: dict[str, Callable[[Path], Iterator[tuple[int, Any]]]] = {
    ".json": _read_json,
    ".csv": _read_csv,
    ".txt": _read_txt,
}
UNPARSED_READERS: dict[str, Callable[[Path], Iterator[UnparsedRow]]] = {
    ".jsonl": _rows_of_jsonl,
    ".jsonl.gz": _rows_of_jsonl,
    ".jsonl.zst": _rows_of_jsonl,
    ".parquet": _rows_of_parquet,
}


def _decode(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = path.read_bytes().count(b"\n", 0, error.start) + 1
        raise UserError(f"{path}:{line}: not UTF-8", _encoding_hint(path)) from None


def _encoding_hint(path: Path) -> str:
    if data_suffix(str(path)) in COMPRESSIONS:
        return "write the rows in UTF-8"
    with path.open("rb") as file:
        begin = file.read(4)
    for extension, magic in MAGIC_BYTES.items():
        if begin.startswith(magic):
            if path.suffix == ".jsonl":
                return f"it is compressed: name it {path.with_suffix(extension)}"
            return "it is compressed: decompress it"
    encoding = "UTF-16" if begin[:2] in (b"\xff\xfe", b"\xfe\xff") else "LATIN1"
    return f"convert it: iconv -f {encoding} -t UTF-8 {path} > new{path.suffix}"


def _not_json(path: Path, text: str, position: int, problem: str) -> UserError:
    line = text.count("\n", 0, position) + 1
    column = position - (text.rfind("\n", 0, position) + 1) + 1
    return UserError(f"{path}:{line}: column {column}: not JSON: {problem}")
