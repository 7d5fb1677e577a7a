"""Held-out prompts before and after training, against an engine's walk that shares no code with ours."""

import pytest
import torch

from swiftlite.acceptance.held_out import HeldOut
from swiftlite.acceptance.report import read_acceptance
from swiftlite.model.open import open_model, read_hf_model
from tests.engines.reference import Reference

NEW_TOKENS = 12


def make_held_out(mesh, path, prompts, **changed) -> HeldOut:
    usual = {
        "path": path,
        "mesh": mesh,
        "num_drafts": 2,
        "prompts": prompts,
        "eos_token_ids": (),
        "max_new_tokens": NEW_TOKENS,
        "max_length": 64,
    }
    return HeldOut(**usual | changed)


def test_the_file_has_what_an_engine_would_count(trained, mesh, tmp_path):
    hf_dir, prompts = trained("qwen3", 2)
    prompts = [prompts[1], prompts[9], prompts[2]]  # two that it knows by heart, and one that is new to it
    (model,), _ = open_model(read_hf_model(hf_dir), mesh, dtype=torch.float32)
    held_out = make_held_out(mesh, tmp_path / "acceptance.json", prompts)
    held_out.measure("before", [model.eval()], {"eval_mtp_1_acceptance": 0.5, "eval_mtp_2_acceptance": 0.25})
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


@pytest.mark.parametrize(("changed", "prompts"), [({"num_drafts": 0}, [[1]]), ({}, [])], ids=["no heads", "no prompts"])
def test_nothing_to_measure_writes_nothing(mesh, tmp_path, changed, prompts):
    make_held_out(mesh, tmp_path / "acceptance.json", prompts, **changed).measure("before", [], {})
    assert not (tmp_path / "acceptance.json").exists()
