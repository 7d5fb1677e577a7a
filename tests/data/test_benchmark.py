"""Test the questions of SPEED-Bench and Spec-Bench, in rows of the published formats with texts of our own."""

import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from swiftlite.base.errors import UserError
from swiftlite.data.dataset import load_prompts
from swiftlite.data.rows.benchmark import PLACEHOLDER
from swiftlite.data.rows.conversation import parse_row
from swiftlite.data.rows.row_error import RowError
from swiftlite.data.rows.sources import find_rows
from tests.messages import naming


def speed_row(number: int, category: str, *turns: str) -> dict[str, Any]:
    """Return a row with the fields of SPEED-Bench."""
    row = {"question_id": f"q{number}", "category": category, "sub_category": "a", "turns": list(turns)}
    return row | {"source": "s", "src_id": f"s_{number}", "difficulty": "", "multiturn": len(turns) > 1}


ROWS = [speed_row(0, "coding", "Sort a list.", "Now backwards."), speed_row(1, "math", "Add one.")]


def as_messages(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row as NeMo-Skills writes it: user turns in place of texts."""
    messages = [{"role": "user", "content": turn} for turn in row["turns"]]
    return {name: value for name, value in row.items() if name != "turns"} | {"messages": messages}


def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(params=["NeMo-Skills", "Model-Optimizer"])
def prepared(request, tmp_path) -> Path:
    """Return a directory as one of the programs prepares it, with two configurations."""
    for config, row in zip(("qualitative", "throughput_1k"), ROWS, strict=True):
        if request.param == "NeMo-Skills":
            write_jsonl(tmp_path / f"{config}.jsonl", [as_messages(row)])
        else:
            (tmp_path / config).mkdir()
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row]), tmp_path / config / "test.parquet")
    return tmp_path


def test_speed_bench(prepared):
    """Every configuration is read; a question is the first turn, and its channel the category."""
    chats = load_prompts([f"speed-bench:{prepared}"])
    assert [chat.messages for chat in chats] == [[{"role": "user", "content": row["turns"][0]}] for row in ROWS]
    assert [chat.channel for chat in chats] == ["coding", "math"]
    assert len(load_prompts([f"speed-bench:{prepared}#1"])) == 2
    with pytest.raises(UserError, match=naming(f"speed-bench:{prepared}")):
        find_rows(f"speed-bench:{prepared}")


def test_spec_bench(tmp_path):
    rows = [{"question_id": 81, "category": "writing", "turns": ["Write a post.", "Rewrite it."]}]
    rows += [{"question_id": 241, "category": "translation", "turns": ["Translate."], "reference": ["x"]}]
    chats = load_prompts([str(write_jsonl(tmp_path / "question.jsonl", rows))])
    assert [(chat.messages[-1]["content"], chat.channel) for chat in chats] == [
        ("Write a post.", "writing"),
        ("Translate.", "translation"),
    ]


@pytest.mark.parametrize(
    ("change", "tokens"),
    [
        ({"turns": []}, "turns"),
        ({"turns": "text"}, "turns"),
        ({"turns": [""]}, "turns[0]"),
        ({"turns": [7]}, "turns[0]"),
        ({"turns": [f"{PLACEHOLDER} FROM THE SOURCE"]}, "turns[0]"),
        ({"category": 7}, "category"),
    ],
)
def test_questions_that_are_invalid(change, tokens):
    with pytest.raises(RowError, match=naming(tokens)):
        parse_row(ROWS[0] | change, needs_answer=False)


def test_a_question_is_no_row_for_training():
    with pytest.raises(RowError, match=naming("turns --infer_backend")):
        parse_row(ROWS[0])


def test_a_row_with_an_answer_stays_a_conversation():
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    assert parse_row({"question_id": 1, "messages": messages}).answer() == "b"
