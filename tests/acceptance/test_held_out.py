"""Test the measurement on held-out prompts before and after training against an independent simulation of an engine."""

import re
from dataclasses import replace

import pytest
import torch
from transformers import AutoTokenizer

from swiftlite.acceptance import greedy, held_out
from swiftlite.acceptance.held_out import HeldOut, Prompt
from swiftlite.acceptance.report import read_acceptance, read_answers
from swiftlite.families.resolved import resolve
from swiftlite.model.open import open_model
from tests.engines.reference import Reference, write_trained
from tests.messages import mentions
from tests.tiny import make_tiny_hf

NEW_TOKENS = 12


def make_held_out(mesh, path, prompts, **changed) -> HeldOut:
    usual = {
        "path": path,
        "mesh": mesh,
        "num_drafts": 2,
        "prompts": [Prompt(prompt) for prompt in prompts],
        "eos_token_ids": (),
        "max_new_tokens": NEW_TOKENS,
        "max_length": 64,
    }
    return HeldOut(**usual | changed)


@pytest.fixture
def model(trained, mesh):
    hf_dir, _ = trained("qwen3", 2)
    (model,), _ = open_model(resolve(hf_dir), mesh, dtype=torch.float32)
    return model.eval()


@pytest.fixture
def prompts(trained) -> list[list[int]]:
    _, prompts = trained("qwen3", 2)
    return [prompts[1], prompts[9], prompts[2]]  # two that it knows by heart, and one that is new to it


def test_the_file_has_what_an_engine_would_count(trained, model, prompts, mesh, tmp_path):
    hf_dir, _ = trained("qwen3", 2)
    held_out = make_held_out(mesh, tmp_path / "acceptance.json", prompts)
    held_out.measure("before", [model], {"eval_mtp_1_acceptance": 0.5, "eval_mtp_2_acceptance": 0.25})
    content = read_acceptance(tmp_path / "acceptance.json")
    assert content["depths"] == 2
    assert content["before"]["teacher_forced"] == {"acceptance_per_depth": [0.5, 0.25]}

    _, counts = Reference.load(hf_dir, "qwen3", depth=2).simulate(prompts, NEW_TOKENS, 2)
    generated = content["before"]["generated"]
    assert 0 < counts.acceptance_rate < 1
    assert generated["prompts"] == 3
    assert (generated["drafts"], generated["drafted"]) == (counts.drafts, counts.drafted)
    accepted = [rate * counts.drafts for rate in generated["acceptance_per_position"]]
    assert accepted == pytest.approx(counts.accepted_per_position)


def test_layers_with_one_half_and_a_state_are_continued(mesh, tmp_path):
    """Nemotron-H has layers without attention, which store nothing, and layers of Mamba-2, which store a state."""
    prompts = write_trained(tmp_path / "model", "nemotron_h", depth=1)[:3]
    (model,), _ = open_model(resolve(tmp_path / "model"), mesh, dtype=torch.float32)
    held_out = make_held_out(mesh, tmp_path / "acceptance.json", prompts, num_drafts=1)
    held_out.measure("before", [model.eval()], {"eval_mtp_1_acceptance": 0.5})
    _, counts = Reference.load(tmp_path / "model", "nemotron_h", depth=1).simulate(prompts, NEW_TOKENS, 1)
    generated = read_acceptance(tmp_path / "acceptance.json")["before"]["generated"]
    assert (generated["drafts"], generated["drafted"]) == (counts.drafts, counts.drafted)
    assert 0 < generated["acceptance_rate"] == counts.acceptance_rate


def test_channels_and_answers_are_those_of_their_prompts(trained, model, prompts, mesh, tmp_path, monkeypatch):
    """The prompts are continued in the order of their lengths, and two answers are stored."""
    monkeypatch.setattr(held_out, "NUM_ANSWERS", 2)
    hf_dir, _ = trained("qwen3", 2)
    reference = Reference.load(hf_dir, "qwen3", depth=2)
    tokenizer = AutoTokenizer.from_pretrained(make_tiny_hf(tmp_path / "words", "qwen3", with_tokenizer=True))
    named = [Prompt(ids, f"prompt {n}", ["known", "new", ""][n]) for n, ids in enumerate(prompts)]
    unnamed = make_held_out(mesh, tmp_path / "acceptance.json", prompts)
    replace(unnamed, prompts=named, tokenizer=tokenizer).measure(
        "before", [model], {"eval_mtp_1_acceptance": 0.5, "eval_mtp_2_acceptance": 0.25}
    )

    channels = read_acceptance(tmp_path / "acceptance.json")["before"]["generated_by_channel"]
    assert list(channels) == ["known", "new"]
    for channel, prompt in zip(("known", "new"), prompts[:2], strict=True):
        _, counts = reference.simulate([prompt], NEW_TOKENS, 2)
        assert (channels[channel]["prompts"], channels[channel]["drafts"]) == (1, counts.drafts)
        assert channels[channel]["accepted"] == sum(counts.accepted_per_position)
    answers = read_answers(tmp_path)["before"]
    assert [answer["prompt"] for answer in answers] == ["prompt 0", "prompt 1"]
    for answer, prompt, channel in zip(answers, prompts[:2], ("known", "new"), strict=True):
        text = "".join(token["text"] for token in answer["tokens"])
        assert text == tokenizer.decode(reference.greedy(prompt, NEW_TOKENS))
        assert sum(token["depth"] > 0 for token in answer["tokens"]) == channels[channel]["accepted"]


def generated(mesh, path, model, prompts, **changed) -> dict:
    """Return the file's results for greedy continuations."""
    held_out = make_held_out(mesh, path, prompts, **changed)
    held_out.measure("before", [model], {"eval_mtp_1_acceptance": 0.5, "eval_mtp_2_acceptance": 0.25})
    return read_acceptance(path)["before"]["generated"]


@pytest.mark.parametrize(
    "limits",
    [{greedy: {"MAX_PASS_TOKENS": 3}}, {held_out: {"MAX_CACHED_TOKENS": 30}}, {held_out: {"MAX_CACHED_TOKENS": 1}}],
    ids=["prompts in parts", "two rows at once", "one row at once"],
)
def test_limits_of_memory_change_no_count(mesh, tmp_path, model, prompts, monkeypatch, limits):
    expected = generated(mesh, tmp_path / "expected", model, prompts)
    for module, values in limits.items():
        for name, value in values.items():
            monkeypatch.setattr(module, name, value)
    assert generated(mesh, tmp_path / "found", model, prompts) == expected


def test_a_text_ends_at_its_end_and_at_the_longest_row(trained, mesh, model, prompts):
    hf_dir, _ = trained("qwen3", 2)
    reference = Reference.load(hf_dir, "qwen3", depth=2)
    texts = [reference.greedy(prompt, NEW_TOKENS) for prompt in prompts]
    end = texts[0][4]
    rows = [greedy.GreedyRow.of(prompt, NEW_TOKENS, len(prompts[0]) + 7) for prompt in prompts]
    batch = greedy.GreedyRows([model], mesh, rows, (end,))
    with torch.no_grad():
        while batch.num_unfinished:
            batch.step()
    for row, prompt, text in zip(rows, prompts, texts, strict=True):
        length = len(prompts[0]) + 7 - len(prompt)
        cut = text[: text.index(end) + 1] if end in text else text
        assert row.tokens == prompt + cut[:length]


def test_a_prompt_as_long_as_the_longest_row_is_not_continued(mesh, tmp_path, model, prompts):
    longest = len(prompts[0])
    alone = generated(mesh, tmp_path / "alone", model, prompts[:1], max_length=longest)
    assert (alone["prompts"], alone["drafts"]) == (1, 0)


def test_nothing_is_computed_twice_and_logits_are_made_where_they_are_read(mesh, tmp_path, model, prompts):
    """The trunk processes each token once, and logits are computed only for predictions."""
    tokens, logits = [], []
    model.decoder.layers[0].register_forward_hook(
        lambda _, args, kwargs, out: tokens.append(len(out[0])), with_kwargs=True
    )
    model.output_layer.register_forward_hook(lambda _, args, out: logits.append(len(out[0])))
    generated(mesh, tmp_path / "acceptance.json", model, prompts)
    last = len(prompts)  # the last token of a text is not read
    assert sum(tokens) == sum(map(len, prompts)) + NEW_TOKENS * len(prompts) - last
    trunk = NEW_TOKENS * len(prompts)
    assert sum(logits) == trunk + 2 * NEW_TOKENS * len(prompts)
    assert len(tokens) == NEW_TOKENS


def test_continuations_of_a_frozen_trunk_are_not_computed_twice(mesh, tmp_path, model, prompts):
    passes = []
    model.decoder.layers[0].register_forward_hook(lambda *_: passes.append(1))
    measured = make_held_out(mesh, tmp_path / "acceptance.json", prompts, trunk_is_frozen=True)
    measured.measure("before", [model], {})
    with torch.no_grad():
        model.mtp.layers[0].eh_proj.weight.zero_()
    passes.clear()
    measured.measure("after", [model], {})
    assert len(passes) == 1
    trained = make_held_out(mesh, tmp_path / "trained.json", prompts)
    trained.measure("after", [model], {})
    assert len(passes) == 1 + NEW_TOKENS
    before, after = (read_acceptance(tmp_path / "acceptance.json")[when]["generated"] for when in ("before", "after"))
    assert after == read_acceptance(tmp_path / "trained.json")["after"]["generated"] != before


def test_progress_is_told(mesh, tmp_path, model, prompts, monkeypatch, caplog):
    caplog.set_level("INFO", logger="swiftlite")
    generated(mesh, tmp_path / "quick", model, prompts)
    assert mentions(caplog.messages[0], "3")
    assert len(caplog.messages) == 2  # that, and the result
    caplog.clear()
    monkeypatch.setattr(held_out, "PROGRESS_SECONDS", 0)
    generated(mesh, tmp_path / "slow", model, prompts)
    assert re.search(r"\b3\b.*\b3\b.* [1-9]\d* tokens/s", caplog.messages[-2])


@pytest.mark.parametrize(("changed", "prompts"), [({"num_drafts": 0}, [[1]]), ({}, [])], ids=["no heads", "no prompts"])
def test_nothing_to_measure_writes_nothing(mesh, tmp_path, changed, prompts):
    make_held_out(mesh, tmp_path / "acceptance.json", prompts, **changed).measure("before", [], {})
    assert not (tmp_path / "acceptance.json").exists()
