"""Test acceptance by channel: against predictions one sample at a time, by engines, and as a table."""

import json
import re
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from swiftlite import families
from swiftlite.acceptance.counts import DraftCounts, replay
from swiftlite.acceptance.teacher_forced import teacher_forced
from swiftlite.args.commands import EvaluateArgs, ExportArgs
from swiftlite.base.errors import UserError
from swiftlite.base.heads import Heads
from swiftlite.bridge.hf_config import read_config
from swiftlite.bridge.transfer import load_hf
from swiftlite.data.dataset import load_prompts
from swiftlite.data.sample import IGNORED
from swiftlite.data.template import ChatTemplate
from swiftlite.engines.engine import EngineConfig
from swiftlite.engines.prompts import PromptEncoder
from swiftlite.engines.served_model import resolve_served
from swiftlite.export.gate import options_of_rows
from swiftlite.families.resolved import resolve
from swiftlite.model.build import build_model
from swiftlite.model.inputs import ModelInputs
from swiftlite.serve.evaluate.by_engine import by_engine
from swiftlite.serve.evaluate.confidence import confidence_table, fastest_line
from swiftlite.serve.evaluate.evaluation_rows import have_answers, load_rows
from swiftlite.serve.evaluate.page import evaluation_chart, evaluation_page
from swiftlite.serve.evaluate.position_tables import position_tables
from swiftlite.serve.evaluate.rates import compare_with_engine, table
from tests.messages import has_line, mention_each, mentions, naming
from tests.tiny import make_tiny_hf

CHANNELS = ("sum", "sum", "tale", None)


@pytest.fixture
def rows(tmp_path) -> str:
    path = tmp_path / "rows.jsonl"
    lines = [
        {"query": f"What is {n}?", "response": "It is " + "so " * n + "much.", "channel": CHANNELS[n % 4]}
        for n in range(12)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


@pytest.mark.parametrize("family", ["mimo", "glm4_moe"])
def test_teacher_forced_is_what_single_samples_say(tmp_path, mesh, rows, family):
    hf_dir = make_tiny_hf(tmp_path / "model", family, depth=2, with_tokenizer=True)
    _, data = load_rows(resolve(hf_dir), [rows])
    found = teacher_forced(resolve(hf_dir), data.val, torch_dtype="float32", mesh=mesh, row_length=100)
    assert list(found) == ["all", "sum", "tale"]
    assert [channel["samples"] for channel in found.values()] == [12, 6, 3]

    hf_config = read_config(hf_dir)
    kind = families.get(hf_config)
    chunks = build_model(
        kind.architecture(hf_config),
        hf_config,
        mesh=mesh,
        dtype=torch.float32,
        heads=Heads(2),
        drafting=kind.mtp.drafting,
    )
    load_hf(chunks, hf_dir, kind, hf_config)
    hits, targets = {"all": [0, 0], "sum": [0, 0]}, {"all": [0, 0], "sum": [0, 0]}
    by_context: Counter = Counter()
    by_position: Counter = Counter()
    for sample in data.val:
        answer = next(place for place, label in enumerate(sample.labels) if label != IGNORED)
        ids, length = torch.from_numpy(sample.input_ids).long()[None], len(sample)
        with torch.no_grad():
            logits = chunks[0].eval()(ModelInputs(ids, torch.arange(length)[None]))
        trunk = logits.main[0].argmax(-1)
        for depth, head in enumerate(logits.mtp):
            for position in range(length - 2 - depth):
                # This head predicts the token two (or more) later; the trunk does one step before it.
                if sample.labels[position + 2 + depth] == IGNORED:
                    continue
                agrees = int(head[0, position].argmax() == trunk[position + 1 + depth])
                drafted = position + 2 + depth
                for counted, before in ((by_context, drafted), (by_position, drafted - answer)):
                    first = max((size for size in (16, 32, 64, 128) if size <= before), default=0)
                    counted[depth, first, "all"] += 1
                    counted[depth, first, "right"] += agrees
                for channel in {"all", sample.channel} & {"all", "sum"}:
                    hits[channel][depth] += agrees
                    targets[channel][depth] += 1
    for channel in hits:
        heads = found[channel]["heads"]
        assert isinstance(heads, list)
        assert [head["targets"] for head in heads] == targets[channel]
        assert [round(head["acceptance"] * head["targets"]) for head in heads] == hits[channel]
    assert in_buckets(found["all"], "by_context") == by_context
    assert in_buckets(found["all"], "by_position") == by_position


def in_buckets(figures: dict, place: str) -> Counter:
    """Return (correct drafts, all drafts) by depth and first count of a bucket."""
    counted: Counter = Counter()
    for bucket in figures[place]:
        assert bucket["to"] == max(2 * bucket["from"], 16) - 1
        for depth, head in enumerate(bucket["heads"]):
            counted[depth, bucket["from"], "all"] += head["targets"]
            counted[depth, bucket["from"], "right"] += round(head["acceptance"] * head["targets"])
    return +counted


def test_a_walk_drafts_as_many_tokens_as_the_engine(tmp_path, mesh, rows):
    hf_dir = make_tiny_hf(tmp_path / "model", "mimo", depth=2, with_tokenizer=True)
    encoder, data = load_rows(resolve(hf_dir), [rows])
    for num_drafts in (1, 2):
        config = EngineConfig(resolve_served(hf_dir), "float32", num_speculative_tokens=num_drafts)
        served = by_engine("transformers", config, data.val_conversations, encoder, max_new_tokens=8, max_prompts=4)
        assert served.num_speculative_tokens == num_drafts
        walks = teacher_forced(resolve(hf_dir), served.answers, torch_dtype="float32", mesh=mesh, num_drafts=num_drafts)
        walk = walks["all"]["replayed"]
        assert len(walk["acceptance_per_position"]) == num_drafts
        assert {name: served.by_channel["all"][name] for name in walk} == walk


def test_an_engine_counts_by_channel(tmp_path, mesh, rows):
    hf_dir = make_tiny_hf(tmp_path / "model", "mimo", depth=1, with_tokenizer=True)
    encoder, data = load_rows(resolve(hf_dir), [rows])
    config = EngineConfig(resolve_served(hf_dir), "float32", num_speculative_tokens=None)
    served = by_engine("transformers", config, data.val_conversations, encoder, max_new_tokens=8, max_prompts=2)
    found = served.by_channel
    assert {channel: each["prompts"] for channel, each in found.items()} == {"all": 6, "sum": 2, "tale": 2}
    named = [found["sum"]["drafts"], found["tale"]["drafts"]]
    assert all(isinstance(number, int) and number > 0 for number in named)
    again = by_engine(
        "transformers",
        config,
        [chat for chat in data.val_conversations if chat.channel == "tale"],
        encoder,
        max_new_tokens=8,
        max_prompts=2,
    ).by_channel
    assert again["tale"] == again["all"] == found["tale"]
    walks = teacher_forced(resolve(hf_dir), served.answers, torch_dtype="float32", mesh=mesh)
    for channel in found:
        walk = walks[channel]["replayed"]
        assert {name: found[channel][name] for name in walk} == walk


def test_an_engine_counts_drawn_answers_apart(tmp_path, mesh, rows):
    hf_dir = make_tiny_hf(tmp_path / "model", "mimo", depth=1, with_tokenizer=True)
    encoder, data = load_rows(resolve(hf_dir), [rows])
    config = EngineConfig(resolve_served(hf_dir), "float32", num_speculative_tokens=None)
    options: dict[str, Any] = {"max_new_tokens": 8, "max_prompts": 2}
    greedy = by_engine("transformers", config, data.val_conversations, encoder, **options)
    both = by_engine("transformers", config, data.val_conversations, encoder, **options, temperature=1.5)
    assert greedy.drawn_by_channel == {}
    assert (both.by_channel, len(both.answers)) == (greedy.by_channel, len(greedy.answers))
    assert {channel: each["prompts"] for channel, each in both.drawn_by_channel.items()} == {
        "all": 6,
        "sum": 2,
        "tale": 2,
    }
    assert both.drawn_by_channel != both.by_channel


def test_values_of_draft_confidence_are_compared(tmp_path, rows, capsys):
    hf_dir = make_tiny_hf(tmp_path / "model", "mimo", depth=1, with_tokenizer=True)
    encoder, data = load_rows(resolve(hf_dir), [rows])
    served = by_engine(
        "transformers",
        EngineConfig(resolve_served(hf_dir), "float32", num_speculative_tokens=3),
        data.val_conversations,
        encoder,
        max_new_tokens=8,
        max_prompts=2,
        confidences=[0, 1],
    )
    always, never_sure = served.by_confidence
    assert (always["drafted_per_step"], never_sure["drafted_per_step"]) == (3, 1)
    assert always["mean_accepted_length"] == served.by_channel["all"]["mean_accepted_length"]
    figures = [
        {**always, "tokens_per_second": 10.0},
        {**never_sure, "mean_accepted_length": 1.5, "tokens_per_second": 12.5},
    ]
    assert confidence_table(figures).rows[1] == ["1", "1.00", "1.50", "12.5", "1.25"]
    assert mentions(fastest_line(figures), "--draft_confidence 1")
    page = evaluation_page({"model": {}}, {"model": "m"}, confidences=figures)
    assert page.sections[-1].tables[0] == confidence_table(figures)


def test_the_page_and_the_chart_name_the_temperature():
    counted = {"prompts": 4, "acceptance_per_position": [0.5]}
    methods = {"vllm": {"all": counted}, "vllm_at_temperature_0.7": {"all": counted}}
    page = evaluation_page({"model": methods}, {"model": "hf"})
    assert mention_each([tile.name for tile in page.tiles], ["vllm 1", "vllm 0.7 1"])
    assert mention_each([section.text for section in page.sections], ["vllm", "vllm 0.7"])
    assert b"0.7" in evaluation_chart({"model": methods})


def test_a_prompt_that_leaves_no_room_is_named(tmp_path, mesh):
    hf_dir = make_tiny_hf(tmp_path / "model", "mimo", depth=1, with_tokenizer=True, max_position_embeddings=64)
    path = tmp_path / "long.jsonl"
    path.write_text(json.dumps({"query": "very " * 200, "response": "Yes."}))
    encoder = PromptEncoder(ChatTemplate(AutoTokenizer.from_pretrained(hf_dir)))
    conversations = load_prompts([str(path)])
    config = EngineConfig(resolve_served(hf_dir), "float32", num_speculative_tokens=None)
    with pytest.raises(UserError, match=naming("long.jsonl:1 max_position_embeddings 64")):
        by_engine("transformers", config, conversations, encoder, max_new_tokens=8, max_prompts=2)


def figures(*rates: float) -> dict:
    return {"samples": 3, "loss": 1.0, "heads": [{"targets": 10, "loss": 1.0, "acceptance": rate} for rate in rates]}


@pytest.mark.parametrize(
    ("offered", "bad", "cut"),
    [
        (set(vars(EvaluateArgs())), ["--max_bad_rows"], ["--dataset", "--max_length", "--max_length"]),
        (options_of_rows(ExportArgs()), [], ["--val_dataset"]),
    ],
    ids=["evaluate", "export"],
)
def test_an_error_names_only_options_that_the_command_has(tmp_path, offered, bad, cut):
    hf_dir = make_tiny_hf(tmp_path / "model", "mimo", depth=1, with_tokenizer=True)
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(json.dumps({"query": "Yes?", "response": text}) for text in ("Yes.", "")))
    with pytest.raises(UserError) as raised:
        load_rows(resolve(hf_dir), [str(path)], offered=offered)
    assert re.findall(r"--\w+", str(raised.value)) == bad
    path.write_text(json.dumps({"query": "very " * 200, "response": "Yes."}))
    with pytest.raises(UserError) as raised:
        load_rows(resolve(hf_dir), [str(path)], offered=offered, max_length=8)
    assert re.findall(r"--\w+", str(raised.value)) == cut
    assert mentions(raised.value.problem, "8")


@pytest.mark.parametrize(
    ("accepted", "torch_dtype", "says"),
    [
        (5, "float32", "vllm 5 9"),
        (4, "float32", "vllm 5 4 9 float32 swiftlite doctor --engine"),
        (4, "bfloat16", "vllm 5 4 9 bfloat16 --torch_dtype float32"),
    ],
)
def test_an_engine_beside_the_model(accepted, torch_dtype, says):
    its, own = (DraftCounts(9, 9, (hits,)).to_json() for hits in (5, accepted))
    assert mentions(compare_with_engine("vllm", its, own, torch_dtype), says)


def test_table_and_picture():
    results = {
        "model": {"teacher_forced": {"all": figures(0.5, 0.25), "code": figures(0.75, 0.5)}},
        "baseline": {"teacher_forced": {"all": figures(0.4)}},
    }
    assert mention_each(
        table(results).splitlines(),
        ["1 2", "teacher_forced all 3 50.0% +10.0 25.0%", "teacher_forced code 3 75.0% 50.0%"],
    )
    places = {"from": 16, "to": 31, "heads": [{"targets": 8, "acceptance": 0.5}, {"targets": 6, "acceptance": 0.25}]}
    results["model"]["teacher_forced"]["all"]["by_context"] = [places]
    assert mention_each(position_tables(results).splitlines(), ["1 2", "16 31 8 50.0% 25.0%"])
    results["baseline"]["teacher_forced"]["all"]["by_context"] = [places | {"heads": places["heads"][:1]}]
    assert has_line(position_tables(results), "50.0% +0.0")
    picture = evaluation_chart(results)
    assert picture.startswith(b"<?xml")
    assert evaluation_chart(results | {"baseline": {}}) != picture


def test_rows_without_a_channel_are_in_all_alone(tmp_path, mesh, rows):
    hf_dir = make_tiny_hf(tmp_path / "model", "mimo", depth=1, with_tokenizer=True)
    _, data = load_rows(resolve(hf_dir), [rows])
    plain = [replace(sample, channel=None) for sample in data.val]
    found = teacher_forced(resolve(hf_dir), plain, torch_dtype="float32", mesh=mesh)
    named = teacher_forced(resolve(hf_dir), data.val, torch_dtype="float32", mesh=mesh)
    assert list(found) == ["all"]
    (one,), (other,) = found["all"]["heads"], named["all"]["heads"]  # type: ignore[misc]
    assert one == pytest.approx(other)  # sums in another order


def test_a_walk_skips_what_it_accepts_and_begins_behind_the_first_token_of_each_answer():
    agrees = torch.tensor([[1, 0, 1, 1, 1, 0, 0, 1, 1], [1, 1, 0, 1, 1, 1, 0, 1, 1]], dtype=torch.bool)
    counted = torch.tensor([[1, 1, 1, 1, 1, 1, 0, 1, 1], [1, 1, 1, 1, 1, 0, 0, 1, 0]], dtype=torch.bool)
    # Drafts at 1 (wrong), 2 (one right), 4 (two right, so over); and at 8, whose second token is not of the answer.
    assert replay(agrees, counted) == DraftCounts(4, 8, (3, 1))


@pytest.mark.parametrize(("rows", "expected"), [("q", False), ("qa", True), ("aq", True), ("x", True), ("xq", False)])
def test_rows_have_answers_if_one_has(tmp_path, rows, expected):
    kinds = {"q": {"query": "word1"}, "a": {"query": "word1", "response": "word2"}, "x": {"none": 1}}
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(kinds[kind]) + "\n" for kind in rows))
    assert have_answers([str(file)]) == expected
