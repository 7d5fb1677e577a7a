"""Test the division into training and held-out rows."""

import itertools

import pytest

from swiftlite.base.errors import UserError
from swiftlite.improve.speedup.held_out import divide, read_rows, without_similar, write_rows
from swiftlite.serve.answers import as_line
from tests.messages import naming


def row(text: str) -> dict:
    turns = [("system", "Be brief."), ("user", text), ("assistant", "Yes.")]
    return {"messages": [{"role": role, "content": content} for role, content in turns]}


@pytest.mark.parametrize(("number", "held_out"), [(48, 16), (200, 20), (1000, 48)])
def test_every_row_is_in_one_part_and_the_parts_are_spread(number, held_out):
    training, kept = divide(range(number))
    assert sorted([*training, *kept]) == list(range(number))
    assert len(kept) == held_out
    gaps = {after - before for before, after in itertools.pairwise(kept)}
    assert max(gaps) - min(gaps) <= 1


def test_too_few_rows_are_an_error():
    with pytest.raises(UserError, match=naming("47 48")):
        divide(range(47))


def test_training_rows_do_not_resemble_held_out_ones(tmp_path):
    held_out = [row("What are the main causes of the French Revolution?"), row("What is 1 plus 1, and why is it so?")]
    rows = [
        row("How do I bake bread?"),
        row("what are the main causes of the french revolution") | {"channel": "self_prompts"},
        row("How do I bake bread?"),
        row("Naïve question: 日本?\u2028\x85Please."),
    ]
    found = without_similar(rows, held_out)
    assert found == [rows[0], *rows[2:]]
    write_rows(tmp_path / "rows.jsonl", found)
    assert read_rows(tmp_path / "rows.jsonl") == found
    (tmp_path / "rows.jsonl").write_bytes(b"".join(map(as_line, found)))  # as `regenerate` writes them
    assert read_rows(tmp_path / "rows.jsonl") == found


def test_rows_of_a_dataset_may_share_an_instruction():
    held_out = [row("Classify the sentiment of this review as good or bad: it is number 1")]
    rows = [row(f"Classify the sentiment of this review as good or bad: it is number {number}") for number in (1, 2, 3)]
    assert without_similar(rows, held_out) == rows[1:]
    with pytest.raises(UserError, match=naming("--dataset")):
        without_similar(rows[:1], held_out)


def test_a_damaged_file_is_named(tmp_path):
    path = tmp_path / "rows.jsonl"
    with pytest.raises(UserError, match=naming(str(path))):
        read_rows(path)
    path.write_text('{"messages": [')
    with pytest.raises(UserError, match=naming(str(path))):
        read_rows(path)


def test_a_file_that_cannot_be_written_is_named(tmp_path):
    with pytest.raises(UserError, match=naming(f"--output_dir: {tmp_path / 'no' / 'rows.jsonl'}")):
        write_rows(tmp_path / "no" / "rows.jsonl", [])
