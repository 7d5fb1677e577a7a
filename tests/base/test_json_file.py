"""Test reading untrusted JSON against the standard library, and texts that make the standard library fail."""

import json
import os

import pytest

from swiftlite.base.json_file import MAX_DEPTH, is_deeper, parse_json, read_json
from tests.messages import naming


@pytest.mark.parametrize("text", ["[1]", ' {"a": [1, {}]}\r\n\t', '"x"', "-0.5e3", "[" * MAX_DEPTH + "]" * MAX_DEPTH])
def test_what_is_json_is_what_the_standard_library_reads(text):
    assert parse_json(text) == json.loads(text)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[" * 100_000, "100"),
        ("[" * 101 + "]" * 101, "100"),
        ('{"a":' * 101 + "1" + "}" * 101, "100"),
        ("9" * 5000, "4300"),
        ("[1] x", "Extra data"),
        ("", "Expecting value"),
    ],
)
def test_what_is_not_json_is_one_kind_of_error(text, problem):
    with pytest.raises(json.JSONDecodeError, match=naming(problem)):
        parse_json(text)


def test_brackets_in_text_are_no_depth():
    assert parse_json(json.dumps(["[" * 500])) == ["[" * 500]
    assert not is_deeper([[[]], {"a": [1]}], 3)
    assert is_deeper([[[]], {"a": [1]}], 2)


def test_a_pipe_is_no_file(tmp_path):
    os.mkfifo(tmp_path / "config.json")
    with pytest.raises(OSError, match=naming(str(tmp_path / "config.json"))):
        read_json(tmp_path / "config.json")
