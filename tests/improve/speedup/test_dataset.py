"""Test how the rows of a dataset are divided among rounds."""

import json
from pathlib import Path

import pytest

from swiftlite.args.commands import SpeedupArgs
from swiftlite.base.errors import UserError
from swiftlite.improve.speedup.dataset import RoundRows
from tests.messages import naming


def write(path: Path, number: int) -> str:
    rows = [{"query": f"{path.stem} {row}", "channel": path.stem} for row in range(number)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture
def files(tmp_path) -> list[str]:
    """Write two files of 30 and 10 rows."""
    return [write(tmp_path / "a.jsonl", 30), write(tmp_path / "b.jsonl", 10)]


def divided(directory: Path, rounds: list[int], **options) -> list[list[str]]:
    """Return the questions of each round."""
    directory.mkdir(exist_ok=True)
    rows = RoundRows(SpeedupArgs(**options), directory)
    found = []
    for number, prompts in enumerate(rounds, start=1):
        found.append([row["messages"][0]["content"] for row in rows.of_round(number, prompts)])
    return found


def test_no_row_is_used_twice(files, tmp_path):
    first, second, third, fourth = divided(tmp_path / "out", [24, 40, 100, 100], dataset=files)  # a half from files
    assert [len(each) for each in (first, second, third, fourth)] == [12, 20, 8, 0]
    assert len({*first, *second, *third}) == 40
    assert sum(question.startswith("a") for question in first) == 6
    assert first != sorted(first)


def test_rounds_depend_on_the_seed_alone(files, tmp_path):
    one, same, other = (divided(tmp_path / str(out), [24, 40], dataset=files, seed=out // 2) for out in (2, 3, 4))
    assert one == same != other


def test_a_sample_of_a_file_is_all_that_is_used(files, tmp_path):
    dataset = [f"{files[0]}#5", files[1]]
    (first, second) = divided(tmp_path / "out", [10, 10], dataset=dataset, self_prompts_share=0.0)
    assert [sum(question.startswith(name) for question in first + second) for name in "ab"] == [5, 10]


def test_a_corrected_row_replaces_a_refused_one(files, tmp_path):
    """A chat template may refuse a row, and `regenerate` then ends before its first answer."""
    out = tmp_path / "out"
    (refused,) = divided(out, [80], dataset=files)
    write(tmp_path / "a.jsonl", 5)
    (corrected,) = divided(out, [80], dataset=files)
    assert (len(refused), len(corrected)) == (40, 15)
    (out / "round-1" / "answers").mkdir()
    write(tmp_path / "a.jsonl", 3)
    assert divided(out, [80], dataset=files) == [corrected]


def test_a_file_may_grow_between_two_calls(files, tmp_path):
    rounds = divided(tmp_path / "out", [24, 40], dataset=files)
    for number in (1, 2):
        (tmp_path / "out" / f"round-{number}" / "answers").mkdir()
    write(tmp_path / "b.jsonl", 40)
    again = divided(tmp_path / "out", [24, 40, 100], dataset=files)
    assert again[:2] == rounds
    assert len({*again[0], *again[1], *again[2]}) == 70


def test_rounds_end_with_the_rows_if_the_model_writes_none(files, tmp_path):
    rows = RoundRows(SpeedupArgs(dataset=files, self_prompts_share=0.0), tmp_path)
    sizes = [rows.largest_round()]
    for number in (1, 2):
        rows.of_round(number, 30)
        sizes.append(rows.largest_round())
    assert sizes == [40, 10, 0]
    assert RoundRows(SpeedupArgs(dataset=files), tmp_path).largest_round() is None
    for args in (SpeedupArgs(), SpeedupArgs(dataset=files, self_prompts_share=1.0)):
        rows = RoundRows(args, tmp_path)
        assert (rows.largest_round(), rows.of_round(9, 128)) == (None, [])


def test_equal_rows_are_used_once(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"query": "same"}\n{"query": "other"}\n{"query": "same"}\n')
    (first,) = divided(tmp_path / "out", [10], dataset=[str(path)])
    assert sorted(first) == ["other", "same"]


def test_a_bad_row_is_named(files, tmp_path):
    path = Path(files[1])
    path.write_text(path.read_text() + "{}\n")
    with pytest.raises(UserError, match=naming(f"{files[1]}:11")):
        RoundRows(SpeedupArgs(dataset=files), tmp_path)
