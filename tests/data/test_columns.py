"""Test `--columns` on rows in the formats of published datasets, up to the samples and the columns of rewards."""

import json
from pathlib import Path
from typing import Any

import pytest

from swiftlite import rules
from swiftlite.args.commands import DpoArgs, GkdArgs, GrpoArgs, PtArgs, SftArgs
from swiftlite.base.errors import OptionError, UserError
from swiftlite.data.rows.columns import renamed
from swiftlite.data.rows.prompt import COLUMNS
from swiftlite.data.rows.row_error import RowError
from swiftlite.data.template import load_tokenizer
from swiftlite.families.resolved import resolve
from swiftlite.rewards.index import accuracy
from swiftlite.rewards.settings import RewardSettings
from swiftlite.train.methods.training import training_of
from tests.messages import mentions, naming
from tests.tiny import make_tiny_hf

GSM8K = {"question": "What is 2 + 2?", "answer": "It is 2 + 2 = <<2+2=4>>4.\n#### 4"}
MATH = {"problem": "What is $2^2$?", "level": "Level 1", "type": "Algebra", "solution": "It is $\\boxed{4}$."}


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return make_tiny_hf(tmp_path_factory.mktemp("model") / "hf", "qwen3", with_tokenizer=True)


def load(args: Any, model: Path, rows: list[dict[str, Any]]) -> Any:
    """Return the samples of rows that a run with these options reads."""
    hf_model = resolve(model)
    path = Path(args.dataset[0])
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    training = training_of(args)
    encoder = training.encoder(args, load_tokenizer(model), hf_model)
    rows_of = [encoder.parse(row, system=None, source=f"{path}:1") for row in rows]
    return [encoder(row).samples[0] for row in rows_of]


@pytest.mark.parametrize(
    ("row", "columns"),
    [(GSM8K, {"question": "query", "answer": "response"}), (MATH, {"problem": "query", "solution": "response"})],
)
def test_published_rows_are_conversations(model, tmp_path, row, columns):
    named = {new: row[old] for old, new in columns.items()}
    dataset = [str(tmp_path / "rows.jsonl")]
    (found,) = load(SftArgs(model=str(model), dataset=dataset, columns=columns), model, [row])
    (expected,) = load(SftArgs(model=str(model), dataset=dataset), model, [named])
    assert found.input_ids.tolist() == expected.input_ids.tolist()
    assert found.labels.tolist() == expected.labels.tolist()
    (answered,) = load(GkdArgs(model=str(model), dataset=dataset, columns=columns, lmbda=0.5), model, [row])
    assert answered.input_ids.tolist() == expected.input_ids.tolist()


@pytest.mark.parametrize(("row", "columns"), [(GSM8K, {"question": "query"}), (MATH, {"problem": "prompt"})])
def test_published_rows_are_scored(model, tmp_path, row, columns):
    """Columns that are not renamed are passed to the reward functions."""
    args = GrpoArgs(model=str(model), dataset=[str(tmp_path / "rows.jsonl")], columns=columns)
    (found,) = load(args, model, [row])
    rest = json.loads(found.extras[COLUMNS])
    assert rest == {name: value for name, value in row.items() if name not in columns}
    references = {name: [rest[name]] * 2 for name in ("answer", "solution") if name in rest}
    assert accuracy(RewardSettings(), completions=["It is 4.", "It is 5."], **references) == [1.0, 0.0]


def test_pairs_and_documents(model, tmp_path):
    dataset = [str(tmp_path / "rows.jsonl")]
    pair = {"question": "Hi?", "good": "Hello.", "bad": "No."}
    columns = {"question": "prompt", "good": "chosen", "bad": "rejected"}
    (found,) = load(DpoArgs(model=str(model), dataset=dataset, columns=columns), model, [pair])
    assert len(found.others) == 1
    (document,) = load(
        PtArgs(model=str(model), dataset=dataset, columns={"content": "text"}), model, [{"content": "Hi"}]
    )
    assert len(document) > 0


def test_names_that_meet():
    assert renamed({"a": 1, "b": 2}, {"a": "b", "b": "a"}) == {"b": 1, "a": 2}
    with pytest.raises(RowError, match=naming("query --columns")):
        renamed({"query": 1, "question": 2}, {"question": "query"})
    assert renamed([1], {"a": "b"}) == [1]


@pytest.mark.parametrize(
    ("columns", "word"),
    [({"a": "query", "b": "query"}, "query"), ({"a": ""}, "empty"), ({"": "a"}, "empty"), ({}, "empty")],
)
def test_names_that_columns_cannot_have(model, columns, word):
    args = SftArgs(model=str(model), output_dir="run", dataset=["x"], columns=columns)
    with pytest.raises(OptionError, match=naming(f"--columns {word}")):
        rules.check(args)


def test_the_flag_takes_texts(capsys):
    from swiftlite.cli.main import main

    assert main(["megatron", "sft", "--columns", '{"a": 1}']) == 2
    assert "--columns" in capsys.readouterr().err


def test_a_missing_field_is_named(model, tmp_path):
    args = SftArgs(model=str(model), dataset=[str(tmp_path / "rows.jsonl")], columns={"question": "query"})
    with pytest.raises(UserError, match=naming("messages")) as error:
        load(args, model, [{"quesiton": "?", "answer": "!"}])
    assert mentions(error.value.hint, "--columns question quesiton answer")
    with pytest.raises(UserError) as error:
        load(args, model, [{"question": 3}])
    assert "--columns" not in error.value.hint
