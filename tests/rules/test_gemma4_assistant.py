"""Test what a run with an assistant of Gemma 4 refuses."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from swiftlite import rules
from swiftlite.families import gemma4_assistant
from tests.messages import mention_each, mentions
from tests.rules.good import SFT, problems_of

KINDS = ["sliding_attention"] * 3 + ["full_attention"]
TRUNK: dict[str, Any] = {
    "model_type": "gemma4_text",
    "hidden_size": 64,
    "intermediate_size": 96,
    "vocab_size": 128,
    "num_hidden_layers": len(KINDS),
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "global_head_dim": 64,
    "num_global_key_value_heads": 2,
    "attention_k_eq_v": True,
    "hidden_size_per_layer_input": 0,
    "sliding_window": 8,
    "layer_types": KINDS,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "hidden_activation": "gelu_pytorch_tanh",
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        "full_attention": {"rope_type": "default", "rope_theta": 1e6},
    },
}
ASSISTANT: dict[str, Any] = gemma4_assistant.declaration(TRUNK)["config"]
GRAFT = {"model": "trunk", "mtp_mode": "heads_only", "mtp_init": "graft", "mtp_graft_from": "assistant"}
NEW = {"model": "trunk", "mtp_mode": "heads_only", "drafter": "gemma4_assistant"}


def write(name: str, config: dict[str, Any]) -> None:
    Path(name).mkdir(exist_ok=True)
    Path(name, "config.json").write_text(json.dumps(config))
    Path(name, "model.safetensors").write_bytes(b"weights")


@pytest.fixture
def gemma(here):
    write("trunk", TRUNK)
    write("assistant", ASSISTANT)


@pytest.mark.parametrize("options", [GRAFT, NEW, GRAFT | {"mtp_unroll": 3, "packing": True}])
def test_what_is_accepted(gemma, options):
    rules.check(dataclasses.replace(SFT, **options), 1)


E_MODEL = TRUNK | {"hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": 128, "attention_k_eq_v": False}
E_MODEL |= {"num_hidden_layers": 6, "layer_types": KINDS[2:] * 3, "num_kv_shared_layers": 2}


def test_a_trunk_like_e2b_can_have_a_new_assistant(gemma):
    """It reads layers 2 and 3, the last ones with keys, which must be on the last stage."""
    write("trunk", E_MODEL)
    rules.check(dataclasses.replace(SFT, **NEW), 1)
    problems = problems_of(dataclasses.replace(SFT, **NEW, pipeline_model_parallel_size=2), 2)
    assert mention_each([text for text, _ in problems], ["--pipeline_model_parallel_size 2 2 3"])
    options = {"model": "trunk", "mtp_mode": "heads_only", "mtp_num_layers": 1, "mtp_init": "copy_last_layer"}
    options |= {"cache_trunk_states": "cache", "stream_trunk": True, "packing": True}
    (problem,) = [text for text, _ in problems_of(dataclasses.replace(SFT, **options)) if "--stream_trunk" in text]
    assert mentions(problem, "--stream_trunk layers")


def test_an_assistant_of_the_12b_is_the_class_of_the_12b(gemma):
    """Both model types of assistants are read, whatever the trunk."""
    config = gemma4_assistant.declaration(TRUNK | {"model_type": "gemma4_unified"})["config"]
    assert config["model_type"] == "gemma4_unified_assistant"
    assert config["text_config"]["model_type"] == "gemma4_unified_text"
    write("trunk", {"model_type": "gemma4_unified", "text_config": TRUNK})
    write("assistant", config)
    rules.check(dataclasses.replace(SFT, **GRAFT), 1)


@pytest.mark.parametrize("options", [GRAFT, NEW])
@pytest.mark.parametrize(
    ("change", "problem", "hint"),
    [
        ({"cache_trunk_states": "cache", "stream_trunk": True}, "--stream_trunk", "--stream_trunk"),
        ({"draft_vocab": 50}, "--draft_vocab", "--draft_vocab 0"),
        ({"tuner_type": "lora", "mtp_tuner": "lora"}, "--tuner_type lora", "--tuner_type"),
        ({"mtp_mode": "joint"}, "", "--mtp_mode heads_only"),
    ],
)
def test_what_is_refused(gemma, options, change, problem, hint):
    problems = problems_of(dataclasses.replace(SFT, **(options | change)))
    found = [of_hint for text, of_hint in problems if mentions(text, problem)]
    assert len(found) == 1
    assert mentions(found[0], hint)


@pytest.mark.parametrize("change", [{"drafter": "eagle3"}, {"drafter": "dspark"}, {"mtp_features": [1]}])
def test_another_drafter_than_the_grafted_one(gemma, change):
    problems = problems_of(dataclasses.replace(SFT, **GRAFT, **change))
    assert any(mentions(text, "--mtp_graft_from assistant") for text, _ in problems)


@pytest.mark.parametrize(("last", "is_refused"), [(1, True), (2, False)])
def test_it_is_on_the_stage_of_the_layers_that_it_reads(gemma, last, is_refused):
    layout = {"pipeline_model_parallel_size": 2, "decoder_last_pipeline_num_layers": last}
    args = dataclasses.replace(SFT, **GRAFT, **layout)
    if is_refused:
        problems = problems_of(args, world_size=2)
        assert mention_each([text for text, _ in problems], ["--pipeline_model_parallel_size 2 3"])
    else:
        rules.check(args, 2)


@pytest.mark.parametrize(
    ("change", "of_text", "problem"),
    [
        ({"use_ordered_embeddings": True, "num_centroids": 24}, {}, "num_centroids 24 128"),
        ({"use_ordered_embeddings": True}, {}, "num_centroids 2048"),
        ({"use_ordered_embeddings": True, "num_centroids": 16}, {}, "centroid_intermediate_top_k 32"),
        ({"backbone_hidden_size": 128}, {}, "backbone_hidden_size 128 64"),
        ({"tie_word_embeddings": False}, {}, "tie_word_embeddings"),
        ({}, {"vocab_size": 100}, "vocab_size 100 128"),
        ({}, {"enable_moe_block": True}, "enable_moe_block"),
        ({}, {"num_key_value_heads": 1}, "num_key_value_heads"),
        ({}, {"global_head_dim": 32}, "global_head_dim"),
        ({}, {"rope_parameters": {}}, "rope_parameters"),
        ({}, {"num_attention_heads": 3}, "num_attention_heads"),
        ({}, {"layer_types": KINDS[1:]}, "layer_types"),
        ({}, {"layer_types": None}, "layer_types"),
        ({}, {"layer_types": ["linear_attention", *KINDS[1:]]}, "layer_types"),
    ],
)
def test_an_assistant_of_another_trunk(gemma, change, of_text, problem):
    write("assistant", {**ASSISTANT, **change, "text_config": ASSISTANT["text_config"] | of_text})
    problems = problems_of(dataclasses.replace(SFT, **GRAFT))
    assert mention_each([text for text, _ in problems], [f"--mtp_graft_from assistant {problem}"])


def test_clusters_of_tokens(gemma):
    """Those of E2B and E4B; they have no random start."""
    clusters = {"use_ordered_embeddings": True, "num_centroids": 16, "centroid_intermediate_top_k": 3}
    write("assistant", ASSISTANT | clusters)
    rules.check(dataclasses.replace(SFT, **GRAFT), 1)
    drafter = {"kind": "gemma4_assistant", "layers": 1, "feature_layers": [2, 3], "config": ASSISTANT | clusters}
    write("trunk", TRUNK | {"drafter": drafter})
    usual = {"model": "trunk", "mtp_mode": "heads_only"}
    rules.check(dataclasses.replace(SFT, **usual), 1)
    problems = problems_of(dataclasses.replace(SFT, **usual, mtp_init="random"))
    assert mention_each([text for text, _ in problems], ["--mtp_init random use_ordered_embeddings"])


def test_another_trunk(gemma):
    problems = problems_of(dataclasses.replace(SFT, **(NEW | {"model": "plain"})))
    assert mention_each([text for text, _ in problems], ["--drafter gemma4_assistant plain"])
