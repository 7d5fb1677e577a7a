"""README.md of a pushed model, as the hub's own client reads it."""

import json

import pytest
from huggingface_hub import ModelCard

from swiftlite.errors import UserError
from swiftlite.export.card import model_card
from swiftlite.export.origin import Origin, origin_of
from swiftlite.heads import Heads
from swiftlite.hub.name import HubName

MODEL = HubName("model", "org/base", "v1")
DATA = HubName("dataset", "org/rows", subset="small")
COMMIT = "a" * 40
ORIGIN = Origin(MODEL, (DATA, "/home/someone/private/rows.jsonl#50"), {MODEL.key: COMMIT}, steps=70, heads_only=True)


def test_the_card_says_what_it_was_made_from(tmp_path):
    text = model_card("me/new", tmp_path, ORIGIN, Heads(layers=1, unroll=3))
    data = ModelCard(text).data.to_dict()
    assert (data["base_model"], data["datasets"], data["library_name"]) == ("org/base", ["org/rows"], "transformers")
    assert f"- Base model: [org/base@v1](https://huggingface.co/org/base) at commit `{COMMIT}`" in text
    assert "- Data: [org/rows:small](https://huggingface.co/datasets/org/rows), `rows.jsonl`" in text
    assert "someone" not in text
    assert "- Steps: 70, of the heads alone: the trunk is unchanged" in text
    assert "depth 1, which draft 3 tokens a step" in text
    assert "Acceptance" not in text


def test_the_card_has_the_acceptance_of_the_run_and_of_engines(tmp_path):
    before = {"prompts": 8, "drafts": 100, "drafted": 100, "accepted": 3, "acceptance_rate": 0.03}
    after = before | {"accepted": 61, "acceptance_rate": 0.61, "mean_accepted_length": 1.61}
    content = {
        "depths": 1,
        "before": {"generated": before | {"mean_accepted_length": 1.03}},
        "after": {"generated": after},
        "engines": {"vllm": after | {"accepted": 60, "acceptance_rate": 0.6, "mean_accepted_length": 1.6}},
    }
    (tmp_path / "acceptance.json").write_text(json.dumps(content))
    lines = model_card("me/new", tmp_path, ORIGIN, Heads(layers=1)).splitlines()
    assert "| before training | 8 | 3 of 100 (3.0%) | 1.03 |" in lines
    assert "| after training | 8 | 61 of 100 (61.0%) | 1.61 |" in lines
    assert "| after training, by vllm | 8 | 60 of 100 (60.0%) | 1.60 |" in lines


def test_a_model_without_heads_promises_no_drafts(tmp_path):
    text = model_card("me/new", tmp_path, Origin("base", (), {}, steps=1, heads_only=False), Heads())
    assert "speculative" not in text
    assert "- Data: random tokens" in text
    assert ModelCard(text).data.to_dict()["tags"] == ["swiftlite"]


@pytest.mark.parametrize("text", ["{", "[]", '{"model": "m"}', '{"model": "m", "dataset": 1}', None])
def test_a_run_that_cannot_say(tmp_path, text):
    if text is not None:
        (tmp_path / "args.json").write_text(text)
    with pytest.raises(UserError, match="which says what the model was made from, is not there or damaged"):
        origin_of(tmp_path / "checkpoint-5")
