"""Test how the rows of a dataset are divided among rounds."""

import itertools
import json
from pathlib import Path

import pytest

from swiftlite.args.commands import SpeedupArgs
from swiftlite.errors import UserError
from swiftlite.speedup.dataset import DatasetRows
from tests.messages import naming


@pytest.fixture
def files(tmp_path):
    """Write two files of 30 and 10 rows."""
    paths = []
    for name, number in (("a", 30), ("b", 10)):
        paths.append(tmp_path / f"{name}.jsonl")
        rows = [{"query": f"{name} {row}", "channel": name} for row in range(number)]
        paths[-1].write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [str(path) for path in paths]


def questions(rows: DatasetRows, rounds: list[int]) -> list[list[str]]:
    """Return the questions of each round."""
    found = []
    for number in range(1, len(rounds) + 1):
        found.append([chat.messages[0]["content"] for chat in rows.of_round(rounds[:number])])
    return found


def test_no_row_is_used_twice(files):
    first, second, third = questions(DatasetRows(SpeedupArgs(dataset=files)), [24, 40, 100])  # a half from files
    assert [len(each) for each in (first, second, third)] == [12, 20, 8]
    assert len({*first, *second, *third}) == 40
    assert sum(question.startswith("a") for question in first) == 6
    assert first != sorted(first)


def test_rounds_depend_on_the_seed_alone(files):
    one, same, other = (questions(DatasetRows(SpeedupArgs(dataset=files, seed=seed)), [24, 40]) for seed in (1, 1, 2))
    assert one == same != other


def test_a_sample_of_a_file_is_all_that_is_used(files):
    rows = DatasetRows(SpeedupArgs(dataset=[f"{files[0]}#5", files[1]], self_prompts_share=0.0))
    everything = list(itertools.chain.from_iterable(questions(rows, [10, 10])))
    assert [sum(question.startswith(name) for question in everything) for name in "ab"] == [5, 10]


def test_rounds_end_with_the_rows_if_the_model_writes_none(files):
    rows = DatasetRows(SpeedupArgs(dataset=files, self_prompts_share=0.0))
    assert [rows.largest_round(rounds) for rounds in ([], [30], [30, 10], [50])] == [40, 10, 0, 0]
    assert DatasetRows(SpeedupArgs(dataset=files)).largest_round([30]) is None
    assert DatasetRows(SpeedupArgs()).largest_round([]) is None
    assert DatasetRows(SpeedupArgs()).of_round([128]) == []


def test_a_bad_row_is_named(files):
    path = Path(files[1])
    path.write_text(path.read_text() + "{}\n")
    with pytest.raises(UserError, match=naming(f"{files[1]}:11")):
        DatasetRows(SpeedupArgs(dataset=files))
