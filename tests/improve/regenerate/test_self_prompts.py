"""Test `regenerate --self_prompts` as a whole command with the engine transformers.

Random weights generate no sentences. In these tests, one token in ten ends a turn, so that half of the turns end within
64 tokens; the others are dropped as truncated.
"""

import dataclasses
import json
import shutil
import tomllib
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from swiftlite.args.commands import RegenerateArgs
from swiftlite.base.errors import UserError
from swiftlite.data.dataset import load_train_val
from swiftlite.data.encoder import ConversationEncoder
from swiftlite.data.template import ChatTemplate, load_tokenizer
from swiftlite.improve.regenerate.command import run
from swiftlite.improve.regenerate.steering import read_steering
from tests.messages import has_line, mentions, naming
from tests.tiers import some_of
from tests.tiny import make_tiny_hf

NUMBER = 24
TWO_TURNS: dict[str, Any] = {"self_turns": 2, "temperature": 0.9}
ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """Write a tiny model for which any of 30 tokens ends an answer."""
    directory = make_tiny_hf(tmp_path_factory.mktemp("model"), "qwen3", depth=1, with_tokenizer=True)
    config = json.loads((directory / "config.json").read_text())
    config["eos_token_id"] = [config["eos_token_id"], *range(40, 70)]
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def options(model: Path, output_dir: Path, **changes: Any) -> RegenerateArgs:
    usual = RegenerateArgs(
        model=str(model),
        self_prompts=NUMBER,
        max_prompt_tokens=64,
        max_new_tokens=8,
        torch_dtype="float32",
        output_dir=str(output_dir),
    )
    return dataclasses.replace(usual, **changes)


@pytest.fixture
def args(model, tmp_path) -> RegenerateArgs:
    return options(model, tmp_path / "out")


@pytest.fixture(scope="module")
def written(model, tmp_path_factory) -> Path:
    """Return the output of the usual options, which must not be changed."""
    directory = tmp_path_factory.mktemp("written")
    run(options(model, directory))
    return directory


@pytest.fixture(scope="module")
def of_two_turns(model, tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("turns")
    run(options(model, directory, **TWO_TURNS))
    return directory


def read(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def files(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def test_prompts_are_written_selected_and_answered(written, model):
    out = written
    prompts = read(out / "prompts.jsonl")
    assert [line["source"] for line in prompts] == [f"prompt {number} message 1" for number in range(1, NUMBER + 1)]
    report = json.loads((out / "report.json").read_text())
    kept = report["self_prompts"]["kept"]
    assert 0 < kept < NUMBER
    assert kept + sum(report["self_prompts"]["dropped"].values()) == report["self_prompts"]["total"] == NUMBER
    rows = read(out / "dataset.jsonl")
    assert 0 < len(rows) <= kept
    texts = {line["source"].removesuffix(" message 1"): line["text"] for line in prompts}
    tokenizer = AutoTokenizer.from_pretrained(model)
    for row in rows:
        question, answer = row["messages"]
        assert question == {"role": "user", "content": texts[row["source"]].strip()}
        assert not any(token in question["content"] for token in tokenizer.all_special_tokens)
        assert answer["role"] == "assistant"
        assert row["channel"] == "self_prompts"
    encoder = ConversationEncoder(ChatTemplate(load_tokenizer(model)), 512, "delete")
    assert len(load_train_val(encoder, [str(out / "dataset.jsonl")]).train) == len(rows)


def test_another_seed_writes_other_prompts(args, written, tmp_path):
    run(dataclasses.replace(args, seed=100))
    one, other = (read(directory / "prompts.jsonl") for directory in (written, tmp_path / "out"))
    assert sum(a["text"] == b["text"] for a, b in zip(one, other, strict=True)) < NUMBER / 4


@pytest.mark.parametrize("kept_lines", some_of([0, 5, NUMBER + 12], NUMBER + 12))
def test_it_resumes_in_any_turn(args, of_two_turns, tmp_path, kept_lines, caplog):
    shutil.copytree(of_two_turns, tmp_path / "out")
    before = files(tmp_path / "out")
    lines = before["prompts.jsonl"].splitlines(keepends=True)
    assert len(lines) > NUMBER
    for name in ("answers.jsonl", "answers.jsonl.args.json", "dataset.jsonl", "report.json"):
        (tmp_path / "out" / name).unlink()
    beginning = b"".join(lines[:kept_lines]) + b"".join(lines[kept_lines : kept_lines + 1])[:20]
    (tmp_path / "out/prompts.jsonl").write_bytes(beginning)
    caplog.set_level("INFO", logger="swiftlite")
    caplog.clear()
    run(dataclasses.replace(args, **TWO_TURNS))
    assert has_line(caplog.text, f"{kept_lines} prompts.jsonl") == (kept_lines > 0)
    assert files(tmp_path / "out") == before
    roles = [[message["role"] for message in row["messages"]] for row in read(tmp_path / "out/dataset.jsonl")]
    assert ["user", "assistant", "user", "assistant"] in roles


@pytest.mark.parametrize("change", [{"self_prompts": NUMBER + 6}, {"max_prompt_tokens": 65}, {"self_turns": 2}])
def test_other_prompts_require_another_directory(args, written, tmp_path, change):
    """Stored answers are answers to the stored prompts. The directory is not changed."""
    shutil.copytree(written, tmp_path / "out")
    before = files(tmp_path / "out")
    with pytest.raises(UserError, match=naming(f"--output_dir --{next(iter(change))}")):
        run(dataclasses.replace(args, **change))
    assert files(tmp_path / "out") == before


def test_they_are_mixed_with_a_dataset(args, tmp_path):
    dataset = tmp_path / "rows.jsonl"
    dataset.write_text(json.dumps({"query": "The quick", "response": "brown fox", "channel": "code"}) + "\n")
    run(dataclasses.replace(args, dataset=[str(dataset)], gold_fraction=0.2))
    rows = read(tmp_path / "out/dataset.jsonl")
    assert [row["kind"] for row in rows[:2]] == ["gold", "regenerated"]
    assert {row["source"] for row in rows[:2]} == {f"{dataset}:1"}
    assert {row.get("channel") for row in rows} == {"code", "self_prompts"}


def test_topics_are_in_no_row(args, tmp_path):
    topics = tmp_path / "topics.txt"
    topics.write_text("harbors\n\n glaciers \n")
    run(dataclasses.replace(args, topics=str(topics), system="Be brief."))
    rows = read(tmp_path / "out/dataset.jsonl")
    assert {row["messages"][0]["content"] for row in rows} == {"Be brief."}
    assert not any("harbors" in json.dumps(row) for row in rows)
    topics.write_text("harbors\nvalleys\n")
    with pytest.raises(UserError, match=naming("--output_dir")):
        run(dataclasses.replace(args, topics=str(topics), system="Be brief."))


def test_conversations_start_with_openings(args, written, tmp_path):
    openings = tmp_path / "openings.txt"
    openings.write_text("Translate into French:\n\n  写一篇 \n")
    run(dataclasses.replace(args, openings=str(openings), openings_share=0.5))
    texts = [line["text"] for line in read(tmp_path / "out/prompts.jsonl")]
    assert [text.startswith("Translate into French:") for text in texts] == [False, True, False, False] * (NUMBER // 4)
    assert [text.startswith("写一篇") for text in texts] == [False, False, False, True] * (NUMBER // 4)
    rows = read(tmp_path / "out/dataset.jsonl")
    assert any(row["messages"][0]["content"].startswith("Translate into French:") for row in rows)
    # The model continues the opening: at temperature 1 with the same seed, the texts after it differ from those
    # without it.
    free = [line["text"] for line in read(written / "prompts.jsonl")]
    assert texts[::2] == free[::2]
    assert all(a.removeprefix("Translate into French:") != b for a, b in zip(texts[1::4], free[1::4], strict=True))
    with pytest.raises(UserError, match=naming("--output_dir --openings_share")):
        run(dataclasses.replace(args, openings=str(openings), openings_share=0.25))
    openings.write_text("Translate into German:\n")
    with pytest.raises(UserError, match=naming("--output_dir")):
        run(dataclasses.replace(args, openings=str(openings), openings_share=0.5))


def test_builtin_openings_are_distinct_and_packaged(args):
    openings = read_steering(dataclasses.replace(args, openings="builtin")).openings
    assert len(openings) == len(set(openings)) == 80  # as the help says
    assert all(opening == opening.strip() and opening for opening in openings)
    (built,) = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"].values()
    assert "improve/regenerate/openings.txt" in built


@pytest.mark.parametrize("option", ["topics", "openings"])
@pytest.mark.parametrize("content", [None, "", "\n \n", b"\xff\xfe\x00"])
def test_files_that_cannot_be_read(args, tmp_path, option, content):
    path = tmp_path / "lines.txt"
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content is not None:
        path.write_text(content)
    with pytest.raises(UserError, match=naming(f"--{option} {path}")):
        run(dataclasses.replace(args, **{option: str(path)}))
    assert not (tmp_path / "out").exists()


def test_no_usable_prompt_is_an_error(args, tmp_path):
    with pytest.raises(UserError) as raised:
        run(dataclasses.replace(args, max_prompt_tokens=1))
    assert mentions(raised.value.hint, "--max_prompt_tokens")
    assert not (tmp_path / "out/dataset.jsonl").exists()


@pytest.mark.parametrize(("field", "value"), [("text", 3), ("finish_reason", "end")])
def test_a_damaged_line_is_named(args, written, tmp_path, field, value):
    shutil.copytree(written, tmp_path / "out")
    path = tmp_path / "out/prompts.jsonl"
    lines = read(path)
    lines[1][field] = value
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(UserError, match=naming(f"{path}: 2 {field}")):
        run(args)


@pytest.mark.parametrize("option", ["system", "topics"])
def test_a_template_without_system_prompts_names_the_option(args, model, tmp_path, option):
    directory = shutil.copytree(model, tmp_path / "model")
    template = "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    template += "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>' }}{% endfor %}"
    template += "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    (directory / "chat_template.jinja").write_text(template)
    (tmp_path / "topics").write_text("\ufeffharbors\n")
    value = {"system": "Be brief.", "topics": str(tmp_path / "topics")}[option]
    with pytest.raises(UserError, match=naming(f"--{option}")):
        run(dataclasses.replace(args, model=str(directory), **{option: value}))
