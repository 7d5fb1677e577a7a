"""Test the bytes that identify rows of Arrow batches: equal rows have equal bytes, and other rows other bytes."""

import datetime
import itertools
from typing import Any

import pyarrow
import pytest

from swiftlite.data.rows.arrow_bytes import bytes_of_rows

MESSAGE = pyarrow.struct({"role": pyarrow.string(), "content": pyarrow.string()})
SCHEMA = pyarrow.schema(
    {
        "messages": pyarrow.list_(MESSAGE),
        "system": pyarrow.string(),
        "channel": pyarrow.large_string(),
        "weight": pyarrow.float64(),
        "tags": pyarrow.large_list(pyarrow.list_(pyarrow.large_string())),
        "day": pyarrow.date32(),
        "extra": pyarrow.map_(pyarrow.string(), pyarrow.int64()),
    }
)


def message(content: str | None, role: str | None = "user") -> dict[str, str | None]:
    return {"role": role, "content": content}


# Neighbors differ by one value, by a null, or by the place of a boundary.
ROWS: list[dict[str, Any]] = [
    {},
    {"messages": []},
    {"messages": [None]},
    {"messages": [message(None, None)]},
    {"messages": [message("", None)]},
    {"messages": [message("", "")]},
    {"messages": [message("é", "ab")]},
    {"messages": [message("bé", "a")]},
    {"messages": [message("bé", "a"), None]},
    {"messages": [message("a"), message("b")]},
    {"messages": [message("ab"), message("")]},
    {"messages": [message("a")], "system": "b"},
    {"messages": [message("a")], "system": ""},
    {"system": "b"},
    {"channel": "b"},
    {"channel": "bc"},
    {"weight": 1.0},
    {"weight": -1.0},
    {"tags": [[]]},
    {"tags": []},
    {"tags": [["a"], ["b"]]},
    {"tags": [["a", "b"]]},
    {"tags": [["a"], ["b"], None]},
    {"day": datetime.date(2024, 2, 29)},
    {"extra": [("a", 1)]},
    {"extra": [("a", 2)]},
]


def all_bytes(rows: list[dict[str, Any]], schema: pyarrow.Schema = SCHEMA) -> list[bytes]:
    return list(map(bytes_of_rows(pyarrow.RecordBatch.from_pylist(rows, schema)), range(len(rows))))


def test_different_rows_have_different_bytes():
    assert len(set(all_bytes(ROWS))) == len(ROWS)


def test_the_bytes_of_a_row_do_not_depend_on_other_rows():
    alone = [all_bytes([row])[0] for row in ROWS]
    assert all_bytes(ROWS) == alone
    assert all_bytes(ROWS[::-1]) == alone[::-1]
    batch = pyarrow.RecordBatch.from_pylist(ROWS, SCHEMA)
    for start, end in itertools.combinations(range(0, len(ROWS) + 1, 5), 2):
        part = bytes_of_rows(batch.slice(start, end - start))
        assert [part(index) for index in range(end - start)] == alone[start:end]


@pytest.mark.parametrize("text", [pyarrow.large_string(), pyarrow.string()])
def test_the_bytes_of_a_row_do_not_depend_on_how_texts_are_stored(text):
    message = pyarrow.struct({"role": text, "content": text})
    schema = pyarrow.schema({"messages": pyarrow.large_list(message), "system": text})
    other = pyarrow.schema({"messages": SCHEMA.field("messages").type, "system": pyarrow.string()})
    assert all_bytes(ROWS, schema) == all_bytes(ROWS, other)


def test_a_column_whose_first_text_comes_later_changes_no_row_before_it():
    rows = [{"system": None}, {"system": None}]
    untyped = pyarrow.schema({"system": pyarrow.null()})
    assert (
        all_bytes(rows, untyped)
        == all_bytes([*rows, {"system": "a"}], pyarrow.schema({"system": pyarrow.string()}))[:2]
    )
