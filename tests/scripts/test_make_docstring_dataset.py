import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "make_docstring_dataset.py"

SOURCE = '''
class Box:
    """Holds things."""

    def __init__(self, size: int = 3, *, lid=None):
        """Not asked about."""

    def put(self, thing: str, /, where=(0, 0)) -> None:
        """Put one thing in.

        Second paragraph.
        """

    @classmethod
    def of(cls, *things):
        """A box of these."""

    @staticmethod
    def sizes(upto):
        """Known sizes."""

    @property
    def lid(self):
        """Is read, not called."""

    def _hidden(self):
        """Private."""

def undocumented(): pass

raise SystemExit("importing this file would end the program")
'''


@pytest.fixture(scope="module")
def dataset(load_script):
    return load_script("make_docstring_dataset")


@pytest.fixture(scope="module")
def entries(dataset):
    return {entry.name: entry for entry in dataset.stdlib_entries()}


@pytest.fixture(scope="module")
def rows(dataset):
    return dataset.make_rows(max_rows=6000, val_rows=40)


def question_and_answer(row):
    question, answer = row["messages"]
    assert (question["role"], answer["role"]) == ("user", "assistant")
    return question["content"], answer["content"]


def test_entries_of_a_source_file_are_found_without_running_it(dataset):
    found = {entry.name: entry.signature for entry in dataset.parsed_entries(SOURCE, "boxes")}
    assert found == {
        "boxes.Box": "(size=3, *, lid=None)",
        "boxes.Box.put": "(thing, /, where=(0, 0))",
        "boxes.Box.of": "(*things)",
        "boxes.Box.sizes": "(upto)",
    }


def test_rows_about_a_known_function_are_true(dataset, entries):
    entry = entries["textwrap.dedent"]
    answers = {row["channel"]: question_and_answer(row)[1] for row in dataset.rows_of(entry, dataset.random.Random(0))}
    assert answers == {
        "purpose": "Remove any common leading whitespace from every line in `text`.",
        "arguments": "Call it as `dedent(text)`.",
        "module": "`dedent` is in the module `textwrap`.",
    }


def test_c_modules_are_in_with_the_arguments_a_caller_gives(entries):
    assert entries["builtins.str.isdigit"].signature == "()"
    assert entries["math.sqrt"].signature == "(x, /)"


@pytest.mark.parametrize(
    ("docstring", "text"),
    [
        ("One\nline.\n\nMore.", "One line."),
        ("range(stop) -> range object\n\nReturn numbers.", "Return numbers."),
        ("Short. " + "x" * 300, "Short."),
        ("x" * 300, ""),
    ],
)
def test_a_purpose_is_one_short_paragraph(dataset, docstring, text):
    assert dataset.purpose(docstring) == text


def test_a_few_thousand_short_rows(rows):
    training, held_out = rows
    assert len(training) == 6000
    assert len(held_out) == 40
    assert {row["channel"] for row in training} == {"purpose", "arguments", "module"}
    assert max(len(question_and_answer(row)[1]) for row in training) < 400  # LONGEST_PURPOSE, the name twice, the words


def test_nothing_about_a_held_out_function_is_in_training(rows):
    def names(row):
        return re.findall("`(.+?)`", question_and_answer(row)[0])

    training, held_out = rows
    full_names = {name for row in held_out for name in names(row) if row["channel"] != "module"}
    assert full_names
    assert full_names.isdisjoint(name for row in training for name in names(row))


@pytest.mark.slow
def test_the_same_python_writes_the_same_files(tmp_path):
    def write(directory, hash_seed):
        command = [sys.executable, SCRIPT, "--output", directory / "t.jsonl", "--val_output", directory / "v.jsonl"]
        subprocess.run(command, check=True, capture_output=True, env={"PYTHONHASHSEED": hash_seed})
        return (directory / "t.jsonl").read_bytes(), (directory / "v.jsonl").read_bytes()

    first = write(tmp_path / "a", "1")
    assert first == write(tmp_path / "b", "2")
    assert all(json.loads(line)["messages"] for line in first[0].splitlines())
