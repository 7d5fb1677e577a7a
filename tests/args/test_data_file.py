"""Test FILE and FILE#N, with # in names of files."""

import pytest

from swiftlite.args.data_file import split_sample


@pytest.fixture(autouse=True)
def files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "c#").mkdir()
    for name in ("t.jsonl", "c#/t.jsonl", "a#1.jsonl", "a#5", "2#.jsonl"):
        (tmp_path / name).touch()


@pytest.mark.parametrize(
    ("spec", "file", "sample"),
    [
        ("t.jsonl", "t.jsonl", ""),
        ("t.jsonl#5", "t.jsonl", "5"),
        ("t.jsonl#all", "t.jsonl", "all"),
        ("t.jsonl#-1", "t.jsonl", "-1"),
        ("t.jsonl#" + "9" * 99, "t.jsonl", "9" * 99),
        ("c#/t.jsonl", "c#/t.jsonl", ""),
        ("c#/t.jsonl#7", "c#/t.jsonl", "7"),
        ("c#/absent.jsonl", "c#/absent.jsonl", ""),
        ("c#/absent.jsonl#7", "c#/absent.jsonl", "7"),
        ("a#1.jsonl", "a#1.jsonl", ""),
        ("a#5", "a#5", ""),
        ("a#5#6", "a#5", "6"),
        ("2#.jsonl#3", "2#.jsonl", "3"),
        ("#5", "#5", ""),
    ],
)
def test_a_number_sign_is_of_the_name_where_it_can_be(spec, file, sample):
    assert split_sample(spec) == (file, sample)
