"""Test the whole command with the engine transformers."""

import dataclasses
import json
import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from swiftlite.args.commands import RegenerateArgs
from swiftlite.base.errors import UserError
from swiftlite.data.dataset import load_train_val
from swiftlite.data.encoder import ConversationEncoder
from swiftlite.data.template import ChatTemplate, load_tokenizer
from swiftlite.improve.regenerate.command import run
from tests.messages import has_line, mentions, naming
from tests.tiers import some_of
from tests.tiny import make_tiny_hf

ROWS = [
    {"query": "The quick", "response": "brown fox"},
    {
        "system": "Be brief.",
        "history": [["first", "one"], ["second", "two"]],
        "query": "And then?",
        "response": "three",
        "channel": "code",
    },
    {"query": "What does this do?"},
    {"query": "The quick", "response": "red fox"},
]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tiny_hf(tmp_path_factory.mktemp("model"), "qwen3", depth=1, with_tokenizer=True)


@pytest.fixture
def dataset(tmp_path) -> Path:
    return write_rows(tmp_path / "rows.jsonl", ROWS)


@pytest.fixture
def said(caplog):
    caplog.set_level(logging.INFO, logger="swiftlite")
    logging.getLogger("swiftlite").propagate = True
    return lambda: "\n".join(record.getMessage() for record in caplog.records)


def write_rows(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def args(model: Path, dataset: Path, **options) -> RegenerateArgs:
    given = {"torch_dtype": "float32", "max_new_tokens": 8, "max_model_len": 512} | options
    return RegenerateArgs(model=str(model), dataset=[str(dataset)], output_dir=str(dataset.parent / "out"), **given)


def read(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def files(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def continue_with_transformers(model: Path, messages: list[dict], max_new_tokens: int) -> str:
    """Return transformers' greedy answer."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    trunk: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt")["input_ids"]
    ids = trunk.generate(prompt, max_new_tokens=max_new_tokens, do_sample=False)[0, prompt.shape[1] :]
    return tokenizer.decode(ids, skip_special_tokens=True)


def test_every_turn_is_answered_on_top_of_those_before_it(model, dataset, tmp_path):
    run(args(model, dataset))
    messages = [{"role": "system", "content": "Be brief."}]
    for question in ("first", "second", "And then?"):
        messages.append({"role": "user", "content": question})
        messages.append({"role": "assistant", "content": continue_with_transformers(model, messages, 8)})
    rows = read(tmp_path / "out/dataset.jsonl")
    assert [row["source"] for row in rows] == [
        f"{dataset}:{line}" for line in (1, 2, 3)
    ]  # the fourth asks as the first
    assert rows[1]["messages"] == messages
    assert rows[1]["channel"] == "code"
    for row, question in ((rows[0], "The quick"), (rows[2], "What does this do?")):
        asked = {"role": "user", "content": question}
        answer = {"role": "assistant", "content": continue_with_transformers(model, [asked], 8)}
        assert row["messages"] == [asked, answer]


def test_the_result_is_a_dataset_for_sft(model, dataset, tmp_path):
    run(args(model, dataset, temperature=0.9, num_answers=2, gold_fraction=0.5))
    result = tmp_path / "out/dataset.jsonl"
    encoder = ConversationEncoder(ChatTemplate(load_tokenizer(model)), 512, "delete")
    data = load_train_val(encoder, [str(result)])
    rows = read(result)
    assert len(data.train) == len(rows) == 9
    assert [row["kind"] for row in rows].count("gold") == 3  # as many as have an answer
    assert {sample.channel for sample in data.train} == {"code", None}


def test_the_same_command_again_starts_no_engine(model, dataset, tmp_path, said, monkeypatch):
    given = args(model, dataset, temperature=0.9)
    run(given)
    before = files(tmp_path / "out")
    assert sorted(before) == ["answers.jsonl", "answers.jsonl.args.json", "dataset.jsonl", "report.json"]
    monkeypatch.setattr(
        "swiftlite.improve.regenerate.generate.start_engine", lambda *_: pytest.fail("an engine was started")
    )
    run(given)
    assert files(tmp_path / "out") == before
    # What is made of the answers may change.
    run(dataclasses.replace(given, gold_fraction=0.5))
    assert files(tmp_path / "out")["answers.jsonl"] == before["answers.jsonl"]
    assert json.loads(files(tmp_path / "out")["report.json"])["rows"]["gold_fraction"] == 0.5


def test_progress(model, dataset, said, capsys):
    """Three of five answers exist and two are generated; one progress bar shows all five."""
    run(args(model, dataset))
    shown = re.findall(r"(\d+)%\|[^|]*\| (\d)/(\d) \[[^]]*<[^]]*/s, (\d+) tokens/s\]", capsys.readouterr().err)
    assert shown
    assert shown[-1][:3] == ("100", "5", "5")
    assert {total for _, _, total, _ in shown} == {"5"}
    assert all(int(rate) > 0 for *_, rate in shown)
    assert has_line(said(), "5 40")


@pytest.mark.parametrize("kept_lines", some_of([0, 1, 4, 7, 9], 1, 7))
def test_it_goes_on_with_what_is_there(model, dataset, tmp_path, kept_lines):
    """The interruption can be in the middle of the second turns, or after half a line."""
    given = args(model, dataset, temperature=0.9, num_answers=2, gold_fraction=0.3)
    run(given)
    before = files(tmp_path / "out")
    lines = before["answers.jsonl"].splitlines(keepends=True)
    assert len(lines) == 10
    (tmp_path / "out/dataset.jsonl").unlink()
    (tmp_path / "out/report.json").unlink()
    (tmp_path / "out/answers.jsonl").write_bytes(b"".join(lines[:kept_lines]) + lines[kept_lines][:20])
    run(given)
    assert files(tmp_path / "out") == before


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"temperature": 0.8}, "--temperature 0.9 0.8"),
        ({"num_answers": 2}, "--num_answers 1 2"),
        ({"max_new_tokens": 9}, "--max_new_tokens 8 9"),
        ({"system": "Be kind."}, "--system Be kind."),
    ],
)
def test_other_options_are_refused(model, dataset, tmp_path, change, told):
    given = args(model, dataset, temperature=0.9)
    run(given)
    before = files(tmp_path / "out")
    with pytest.raises(UserError) as error:
        run(dataclasses.replace(given, **change))
    assert mentions(error.value.problem, told)
    assert "--output_dir" in error.value.hint
    assert files(tmp_path / "out") == before


def test_a_training_run_is_not_written_to(model, dataset, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "args.json").write_text("{}")
    with pytest.raises(UserError, match=naming("--output_dir")):
        run(args(model, dataset))
    assert list(files(tmp_path / "out")) == ["args.json"]


def test_other_prompts_are_refused(model, dataset, tmp_path):
    given = args(model, dataset)
    run(given)
    before = files(tmp_path / "out")
    write_rows(dataset, [*ROWS[:2], {"query": "What does that do?"}])
    with pytest.raises(UserError, match=naming("--output_dir")):
        run(given)
    assert files(tmp_path / "out") == before


def test_a_seed_of_its_own_for_every_answer(model, tmp_path):
    """Equal questions with different system prompts get different answers, and another --seed changes them."""
    dataset = write_rows(tmp_path / "rows.jsonl", [{"query": "The quick", "system": system} for system in ("a", "b")])
    given = args(model, dataset, temperature=2.0, num_answers=3)
    run(given)
    first = [row["messages"][-1]["content"] for row in read(tmp_path / "out/dataset.jsonl")]
    assert len(set(first)) == 6
    run(dataclasses.replace(given, seed=7, output_dir=str(tmp_path / "other")))
    second = [row["messages"][-1]["content"] for row in read(tmp_path / "other/dataset.jsonl")]
    assert set(first).isdisjoint(second)


def test_heads_may_draft(model, dataset, tmp_path, said):
    run(args(model, dataset))
    plain = files(tmp_path / "out")["dataset.jsonl"]
    run(dataclasses.replace(args(model, dataset, speculative="mtp"), output_dir=str(tmp_path / "drafted")))
    assert files(tmp_path / "drafted")["dataset.jsonl"] == plain
    assert "%" in said()  # of drafts accepted


def test_answers_that_are_cut_can_be_left_out(model, dataset, tmp_path, said):
    """Random weights generate no end token, so every answer is truncated after three tokens."""
    with pytest.raises(UserError):
        run(args(model, dataset, drop_truncated=True))
    assert has_line(said(), "--max_new_tokens 8 3")
    assert not (tmp_path / "out/dataset.jsonl").exists()
    run(args(model, dataset))
    assert has_line(said(), "--max_new_tokens 8 5 --drop_truncated")
    assert len(read(tmp_path / "out/dataset.jsonl")) == 3


def test_a_prompt_without_room_ends_its_conversation(model, tmp_path):
    rows = [{"query": "short"}, {"query": "long " * 300}, {"query": "long " * 100, "history": [["a", "b"]]}]
    dataset = write_rows(tmp_path / "rows.jsonl", rows)
    run(args(model, dataset, max_model_len=80))
    report = json.loads((tmp_path / "out/report.json").read_text())
    assert report["conversations"] == {"last_turn": 1, "truncated": 0, "empty": 0, "no_room": 2}
    turns = [len(row["messages"]) for row in read(tmp_path / "out/dataset.jsonl")]
    assert turns == [2, 2]


def test_bad_rows_may_be_left_out(model, tmp_path, said):
    dataset = write_rows(tmp_path / "rows.jsonl", [{"query": "good"}, {"nothing": "here"}])
    with pytest.raises(UserError, match=naming("rows.jsonl:2 row:")) as error:
        run(args(model, dataset))
    assert "--max_bad_rows 1" in error.value.hint
    run(args(model, dataset, max_bad_rows=1))
    assert has_line(said(), f"{dataset}:2")
    assert len(read(tmp_path / "out/dataset.jsonl")) == 1


CALL = {"role": "assistant", "content": "", "tool_calls": [{"name": "f"}]}
CALLS = {"messages": [{"role": "user", "content": "q"}, CALL]}


@pytest.mark.parametrize(
    ("rows", "options", "problem"),
    [
        ([CALLS], {}, "--dataset"),
        ([{"query": "q"}], {"gold_fraction": 0.5}, "--gold_fraction 0.5 --dataset"),
    ],
)
def test_rows_that_cannot_be_used(model, tmp_path, rows, options, problem):
    dataset = write_rows(tmp_path / "rows.jsonl", rows)
    with pytest.raises(UserError, match=naming(problem)):
        run(args(model, dataset, **options))
    assert not (tmp_path / "out").exists()


def test_results_of_something_else_are_left_alone(model, dataset, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out/dataset.jsonl").write_text("mine\n")
    with pytest.raises(UserError, match=naming("dataset.jsonl answers.jsonl")):
        run(args(model, dataset))
    assert files(tmp_path / "out") == {"dataset.jsonl": b"mine\n"}


@pytest.mark.parametrize(("field", "value"), [("response", 3), ("finish_reason", "end"), ("completion_tokens", None)])
def test_a_line_that_is_no_answer_is_named(model, dataset, tmp_path, field, value):
    given = args(model, dataset)
    run(given)
    path = tmp_path / "out/answers.jsonl"
    lines = read(path)
    lines[1][field] = value
    write_rows(path, lines)
    with pytest.raises(UserError, match=naming(f"{path}: {dataset}:2 1 {field}")):
        run(given)
