"""Test the whole command with the engine transformers and random heads."""

import dataclasses
import io
import json
import logging
import re

import pytest

from swiftlite.acceptance.counts import DraftCounts
from swiftlite.args.commands import InferArgs
from swiftlite.base.errors import UserError
from swiftlite.data.rows.sources import find_rows, read_rows
from swiftlite.engines.engine import Completion
from swiftlite.serve.infer import Answers, run, summary
from tests.messages import answers_equal, has_line, mention_each, mentions, naming
from tests.tiny import make_tiny_hf

ROWS = [
    {"messages": [{"role": "user", "content": "The quick"}, {"role": "assistant", "content": "brown fox"}]},
    {"query": "What does this do?", "channel": "code"},
    {"query": "And then?", "history": [["first", "one"]], "system": "Be brief."},
]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tiny_hf(tmp_path_factory.mktemp("model"), "qwen3", depth=1, with_tokenizer=True)


@pytest.fixture
def dataset(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return path


@pytest.fixture
def said(caplog):
    caplog.set_level(logging.INFO, logger="swiftlite")
    logging.getLogger("swiftlite").propagate = True
    return lambda: "\n".join(record.getMessage() for record in caplog.records)


def args(model, **options):
    return InferArgs(**({"model": str(model), "torch_dtype": "float32", "max_new_tokens": 8} | options))


def test_answers_to_stdout_are_rows_that_can_be_trained_on(model, dataset, tmp_path, capsys):
    run(args(model, val_dataset=[str(dataset)]))
    lines = capsys.readouterr().out.splitlines()
    records = [json.loads(line) for line in lines]
    assert [record["source"] for record in records] == [f"{dataset}:{line}" for line in (1, 2, 3)]
    assert records[0]["messages"][0] == ROWS[0]["messages"][0]
    assert records[0]["messages"][1]["content"] == records[0]["response"] != "brown fox"
    assert records[1]["channel"] == "code"
    assert [message["role"] for message in records[2]["messages"]] == [
        "system",
        "user",
        "assistant",
        "user",
        "assistant",
    ]
    assert all(record["completion_tokens"] == 8 or record["finish_reason"] == "stop" for record in records)

    again = tmp_path / "again.jsonl"
    again.write_text("\n".join(lines))
    assert len(read_rows(find_rows(str(again))).conversations) == 3


def test_comparison_acceptance_and_summary(model, dataset, tmp_path, said, capsys):
    acceptance, result = tmp_path / "acceptance.json", tmp_path / "answers.jsonl"
    acceptance.write_text('{"depths": 1, "after": {}}')
    options = {"val_dataset": [str(dataset)], "speculative": "mtp", "compare": True, "max_new_tokens": 40}
    run(args(model, acceptance_json=str(acceptance), result_path=str(result), **options))

    content = json.loads(acceptance.read_text())
    engine = content["engines"]["transformers"]
    num_tokens = sum(json.loads(line)["completion_tokens"] for line in result.read_text().splitlines())
    assert content["depths"] == 1
    assert engine["prompts"] == 3
    # Each answer's first token comes without a draft, each step brings one token and the accepted ones. A draft that is
    # accepted behind an answer's end counts as well, so at most one per answer (of one drafted token) is over.
    assert 0 <= engine["drafts"] + engine["accepted"] + 3 - num_tokens <= 3
    assert engine["mean_accepted_length"] == 1 + engine["accepted"] / engine["drafts"]
    assert has_line(said(), f"{engine['drafted']} {engine['accepted']}")
    assert answers_equal(said(), 3)
    assert re.search(r"\d\.\d\dx", said())
    assert capsys.readouterr().out == ""
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_summary_counts_answers_that_differ():
    plain = Answers([Completion([1, 2], "length"), Completion([3], "stop")], 2.0, DraftCounts(0, 0, ()))
    result = Answers([Completion([1, 5], "length"), Completion([3], "stop")], 1.0, DraftCounts(4, 8, (3, 1)))
    lines = summary(result, plain)
    assert mention_each(lines, ["2 3 1.0 3.0 tokens/s", "8 4 50.0% 75.0% 25.0% 2.00", "1.5 tokens/s 2.00x", "1 2"])
    assert summary(result, plain, temperature=0.7)[:-1] == lines[:-1]
    assert summary(result, plain, temperature=0.7)[-1] != lines[-1]


def test_a_ratio_that_cannot_be_is_doubted():
    """With one token and half a draft per step, the speed-up is at most 1.5."""
    plain = Answers([Completion([1, 2, 3], "stop")], 2.0, DraftCounts(0, 0, ()))
    result = Answers(plain.completions, 1.0, DraftCounts(2, 2, (1,)))
    line = summary(result, plain)[2]
    assert mentions(line, "2.00x")
    slower = Answers(plain.completions, 1.5, DraftCounts(2, 2, (1,)))
    assert len(summary(slower, plain)[2]) < len(line)


def test_chat_on_a_pipe_keeps_the_conversation(model, tmp_path, monkeypatch, capsys):
    result = tmp_path / "chat.jsonl"
    monkeypatch.setattr("sys.stdin", io.StringIO("hello\n\nand again\n"))
    run(args(model, speculative="mtp", system="Be brief.", result_path=str(result)))
    (record,) = [json.loads(line) for line in result.read_text().splitlines()]
    roles = [message["role"] for message in record["messages"]]
    assert roles == ["system", "user", "assistant", "user", "assistant"]
    assert capsys.readouterr().out == "".join(record["messages"][i]["content"] + "\n" for i in (2, 4))


def test_a_chat_that_ends_at_once_writes_nothing(model, tmp_path, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    run(args(model, result_path=str(tmp_path / "chat.jsonl")))
    assert list(tmp_path.iterdir()) == []


def test_the_system_prompt_of_the_options_is_for_rows_without(model, dataset, capsys):
    run(args(model, val_dataset=[str(dataset)], system="Be kind."))
    first, _, third = (json.loads(line)["messages"][0] for line in capsys.readouterr().out.splitlines())
    assert (first["content"], third["content"]) == ("Be kind.", "Be brief.")


def test_a_prompt_that_is_too_long_names_its_row(model, tmp_path):
    path = tmp_path / "long.jsonl"
    path.write_text(json.dumps({"query": "short"}) + "\n" + json.dumps({"query": "long " * 600}) + "\n")
    with pytest.raises(UserError) as error:
        run(args(model, val_dataset=[str(path)]))
    assert mentions(str(error.value), f"{path}:2 max_position_embeddings 512")


def test_a_lone_surrogate_is_named_before_anything_is_answered(model, tmp_path, monkeypatch):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"query": "hello"}\n{"query": "hello", "channel": "a\\ud800b"}\n')
    monkeypatch.setattr("swiftlite.serve.infer.start_engine", lambda *_: pytest.fail("an engine was started"))
    with pytest.raises(UserError, match=naming("rows.jsonl:2 channel:")):
        run(args(model, val_dataset=[str(path)], result_path=str(tmp_path / "answers.jsonl")))
    assert not (tmp_path / "answers.jsonl").exists()


def test_the_same_command_again_starts_no_engine(model, dataset, tmp_path, said, monkeypatch):
    given = args(model, val_dataset=[str(dataset)], result_path=str(tmp_path / "answers.jsonl"))
    run(given)
    before = (tmp_path / "answers.jsonl").read_bytes()
    monkeypatch.setattr("swiftlite.serve.infer.start_engine", lambda *_: pytest.fail("an engine was started"))
    run(given)
    assert has_line(said(), f"3 {tmp_path / 'answers.jsonl'}")
    assert (tmp_path / "answers.jsonl").read_bytes() == before
    with pytest.raises(UserError, match=naming("--max_new_tokens 8 9")):
        run(dataclasses.replace(given, max_new_tokens=9))


def test_a_chat_is_kept_after_each_turn(model, tmp_path, monkeypatch):
    """A second turn that is too long to answer does not remove the first turn."""
    path = tmp_path / "chat.jsonl"
    monkeypatch.setattr("sys.stdin", io.StringIO("hello\n" + "word " * 2000 + "\n"))
    with pytest.raises(UserError, match=naming("--max_model_len 512")):
        run(args(model, result_path=str(path)))
    (record,) = [json.loads(line) for line in path.read_text().splitlines()]
    assert [message["role"] for message in record["messages"]] == ["user", "assistant"]
    with pytest.raises(UserError, match=naming(f"--result_path {path}")):
        run(args(model, result_path=str(path)))


def test_result_path_is_checked_before_the_engine_starts(model, dataset, tmp_path, monkeypatch):
    monkeypatch.setattr("swiftlite.serve.infer.start_engine", lambda *_: pytest.fail("an engine was started"))
    for files in ([], [str(dataset)]):
        with pytest.raises(UserError, match="--result_path /proc/answers"):
            run(args(model, val_dataset=files, result_path="/proc/answers.jsonl"))
    with pytest.raises(UserError, match=naming(f"--result_path {dataset} --val_dataset")):
        run(args(model, val_dataset=[f"{dataset}#2"], result_path=str(dataset)))
    with pytest.raises(UserError, match=naming(f"--result_path {tmp_path / 'absent'}")):
        run(args(model, val_dataset=[str(dataset)], result_path=str(tmp_path / "absent" / "answers.jsonl")))
    with pytest.raises(UserError, match=naming(f"--result_path {tmp_path} {tmp_path / 'answers.jsonl'}")):
        run(args(model, val_dataset=[str(dataset)], result_path=str(tmp_path)))


@pytest.mark.parametrize("content", ["not JSON", "[]", '{"loss": 1}'])
def test_a_file_that_is_no_acceptance_json_is_left_alone(model, dataset, tmp_path, content):
    path = tmp_path / "acceptance.json"
    path.write_text(content)
    with pytest.raises(UserError, match="--acceptance_json"):
        run(args(model, val_dataset=[str(dataset)], speculative="mtp", acceptance_json=str(path)))
    assert path.read_text() == content


def test_a_tokenizer_without_a_chat_template_is_told(tmp_path, dataset):
    directory = make_tiny_hf(tmp_path / "model", "qwen3", with_tokenizer=True)
    (directory / "chat_template.jinja").unlink()
    with pytest.raises(UserError, match=naming("chat_template.jinja")):
        run(args(directory, val_dataset=[str(dataset)]))


def test_more_tokens_than_heads_says_what_happens(model, dataset, said):
    run(args(model, val_dataset=[str(dataset)], speculative="mtp", num_speculative_tokens=3))
    assert has_line(said(), "3 1")
