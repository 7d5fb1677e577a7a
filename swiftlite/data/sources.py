"""Data files to conversations: .jsonl, .json, .parquet, .csv, and `FILE#500` for a random sample of 500 rows.

Every row knows its `file:line`. A bad row is returned beside the good ones, never dropped in silence; how many are
allowed is decided in `dataset.py`. What a row may hold is in `conversation.py`.
"""

import csv
import io
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from swiftlite.args.data_file import is_number_of_rows, split_sample
from swiftlite.data.conversation import BadRow, Conversation, RowError, parse_row
from swiftlite.errors import UserError
from swiftlite.json_file import decode_json, parse_json, skip_space


@dataclass(frozen=True)
class DataFile:
    """A file a user named, and how many of its rows to take (None: all)."""

    path: Path
    sample: int | None = None


@dataclass
class FileRows:
    """What one file held: `num_rows == len(conversations) + len(bad_rows) + num_not_sampled`."""

    num_rows: int = 0
    conversations: list[Conversation] = field(default_factory=list)
    bad_rows: list[BadRow] = field(default_factory=list)
    num_not_sampled: int = 0
    note: str = ""


def find_file(spec: str) -> DataFile:
    """Take `FILE` or `FILE#N` apart. Whether one can write it so, rules have looked at, on the first rank.

    Raises:
        UserError: no such file.
    """
    name, sample = split_sample(spec)
    path = Path(name)
    if not path.is_file() or (sample and not is_number_of_rows(sample)):
        raise UserError(f"{spec} does not exist", "every node reads the files of its own disk")
    return DataFile(path, int(sample) if sample else None)


def read_file(file: DataFile, *, system: str | None = None, needs_answer: bool = True, seed: int = 42) -> FileRows:
    """Read, check and, for `FILE#N`, sample the rows of one file.

    The sample is drawn from the good rows and keeps their order; it depends on the seed and the file alone, not on
    the other files of the run.

    Args:
        file: from `find_file`.
        system: system prompt for rows that bring none.
        needs_answer: whether each row must end with the assistant's turn.
        seed: of the sample.
    Raises:
        UserError: a file that is not what its suffix says, or holds no rows.
    """
    rows = FileRows()
    for line, row in READERS[file.path.suffix.lower()](file.path):
        rows.num_rows += 1
        parsed = check_row(row, f"{file.path}:{line}", system=system, needs_answer=needs_answer)
        if isinstance(parsed, BadRow):
            rows.bad_rows.append(parsed)
        else:
            rows.conversations.append(parsed)
    if not rows.num_rows:
        raise UserError(f"{file.path} holds no rows")
    if file.sample is not None:
        num_good = len(rows.conversations)
        if file.sample > num_good:
            rows.note = f"{file.path}#{file.sample}: the file has {num_good} good rows; all are taken"
        # RandomState, because numpy promises its stream for good and Generator's only within a version.
        order = np.random.RandomState(seed).permutation(num_good)[: file.sample]
        rows.conversations = [rows.conversations[i] for i in np.sort(order)]
        rows.num_not_sampled = num_good - len(rows.conversations)
    return rows


def check_row(
    row: object, source: str, *, system: str | None = None, needs_answer: bool = True
) -> Conversation | BadRow:
    """One row as a reader gives it.

    Args:
        source: `file:line`.
    """
    try:
        if isinstance(row, RowError):
            raise row
        return parse_row(row, system=system, needs_answer=needs_answer, source=source)
    except RowError as error:
        return BadRow(source, error.problem, error.hint)


def _check_columns(where: str, names: list[str]) -> None:
    """Of two columns of one name, a row would have the last in silence."""
    for name, number in Counter(names).items():
        if number > 1:
            raise UserError(f"{where}: {number} columns are called {name!r}", "rename or remove all but one")


# Readers yield (line, row), counting lines from 1; a row that cannot be read alone comes as its RowError.


def _read_jsonl(path: Path) -> Iterator[tuple[int, Any]]:
    with path.open("rb") as file:  # bytes: text mode would also split at a lone \r
        for number, raw in enumerate(file, start=1):
            raw = raw.removeprefix(b"\xef\xbb\xbf") if number == 1 else raw
            if not raw.strip():
                continue
            try:
                yield number, parse_json(raw.decode("utf-8").rstrip("\r\n"))
            except json.JSONDecodeError as error:
                yield number, RowError(f"column {error.colno}", f"not JSON: {error.msg}")
            except UnicodeDecodeError as error:
                yield number, RowError(f"byte {error.start + 1}", "not UTF-8", _encoding_hint(path))


def _read_json(path: Path) -> Iterator[tuple[int, Any]]:
    """One array of rows, or rows one after the other."""
    text = _decode(path)
    position = skip_space(text, 0)
    is_array = text.startswith("[", position)
    if is_array:
        position = skip_space(text, position + 1)
    line = 1
    counted = 0  # characters whose lines are counted in `line`
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
        raise _not_json(path, text, rest, "something follows the array")


def _read_csv(path: Path) -> Iterator[tuple[int, Any]]:
    # By the standard library and not pyarrow.csv, which does not know the line of a row behind one that spans lines.
    reader = csv.reader(io.StringIO(_decode(path), newline=""), strict=True)
    limit = csv.field_size_limit(sys.maxsize)  # the default of 128 KiB is shorter than many a document
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
            start = reader.line_num + 1  # a quoted value may span lines
    except csv.Error as error:
        raise UserError(f"{path}:{reader.line_num}: not CSV: {error}") from None
    finally:
        csv.field_size_limit(limit)  # the module has one limit for the whole process
    return iter(rows)


def _read_parquet(path: Path) -> Iterator[tuple[int, Any]]:
    import pyarrow
    import pyarrow.parquet

    number = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            _check_columns(str(path), file.schema_arrow.names)
            for batch in file.iter_batches(batch_size=1024):
                for row in batch.to_pylist():
                    number += 1
                    yield number, _padding_error(row) or row
    # Damage shows as an error of pyarrow or of the disk, text that is not UTF-8 and dates before the year 1 as these.
    except (pyarrow.ArrowException, OSError, ValueError, OverflowError) as error:
        place = f"{path}: after row {number}" if number else f"{path}"
        raise UserError(f"{place}: not Parquet: {error}", "write or copy the file again") from None


READERS: dict[str, Callable[[Path], Iterator[tuple[int, Any]]]] = {
    ".jsonl": _read_jsonl,
    ".json": _read_json,
    ".parquet": _read_parquet,
    ".csv": _read_csv,
}


def _padding_error(row: dict[str, Any]) -> RowError | None:
    """Parquet gives every struct of a column the same fields, so fields of other rows' tools come as nulls in this one.

    Returns:
        The error of a row that holds such nulls.
    """
    nested = [("tools", row.get("tools"))]
    for number, message in enumerate(_list(row.get("messages"))):
        for call in _list(_dict(message).get("tool_calls")):
            function = _dict(_dict(call).get("function"))
            nested.append((f"messages[{number}].tool_calls", function.get("arguments")))
    for path, value in nested:
        if value is not None and _holds_null(value):
            problem = "has nulls: Parquet has padded it with fields of other rows"
            return RowError(path, problem, "store it as JSON text (json.dumps) in a text column")
    return None


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _holds_null(value: Any) -> bool:
    if isinstance(value, dict):
        return any(map(_holds_null, value.values()))
    if isinstance(value, list):
        return any(map(_holds_null, value))
    return value is None


def _decode(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = path.read_bytes().count(b"\n", 0, error.start) + 1
        raise UserError(f"{path}:{line}: not UTF-8", _encoding_hint(path)) from None


def _encoding_hint(path: Path) -> str:
    with path.open("rb") as file:
        is_utf16 = file.read(2) in (b"\xff\xfe", b"\xfe\xff")
    return f"convert it: iconv -f {'UTF-16' if is_utf16 else 'LATIN1'} -t UTF-8 {path} > new{path.suffix}"


def _not_json(path: Path, text: str, position: int, problem: str) -> UserError:
    line = text.count("\n", 0, position) + 1
    column = position - (text.rfind("\n", 0, position) + 1) + 1
    return UserError(f"{path}:{line}: column {column}: not JSON: {problem}")
