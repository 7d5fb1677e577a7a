"""Test that `evaluate` counts what vLLM counts, with trained heads."""

import importlib.util
import json
from pathlib import Path

import pytest

from tests.e2e.conftest import Commands, sft_options, write_rows
from tests.tiny import make_tiny_hf

pytestmark = pytest.mark.gloo


@pytest.fixture(scope="module")
def learned(tmp_path_factory) -> Path:
    """Return a directory with a model, its rows, and an export of a run whose heads have learned the rows."""
    directory = tmp_path_factory.mktemp("learned")
    commands = Commands(directory)
    model = make_tiny_hf(directory / "model", "qwen3", depth=1, with_tokenizer=True)
    options = [*sft_options(model, write_rows(directory / "rows.jsonl")), "--train_iters", 60, "--save_steps", 60]
    options += ["--lr", 3e-3, "--mtp_loss_scaling_factor", 1, "--acceptance_samples", 0]
    commands.ok(*options, "--output_dir", "run")
    commands.ok("export", "--to_hf", "--model", "run", "--output_dir", "hf")
    return directory


@pytest.mark.engine
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
def test_one_pass_over_its_own_answers_says_what_vllm_counts(learned, vllm_host, tmp_path):
    """The answers to held-out prompts are the model's own, because an engine drafts while it generates these."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"query": f"What is {i} plus {i}?"}) + "\n" for i in range(40, 100)))
    common = ["--model", learned / "hf", "--torch_dtype", "float32", "--infer_backend", "vllm", "--max_new_tokens", 48]
    with_vllm = Commands(tmp_path, vllm_host)
    with_vllm.ok("infer", *common, "--val_dataset", prompts, "--result_path", "own.jsonl")
    with_vllm.ok("evaluate", *common, "--dataset", "own.jsonl", "--max_prompts", 60, "--output_dir", "out")
    measured = json.loads((tmp_path / "out" / "evaluation.json").read_text())["model"]
    replayed, counted, of_its_answers = (measured[how]["all"] for how in ("replayed", "vllm", "vllm_replayed"))
    assert counted["drafts"] > 200
    assert 0.2 < counted["acceptance_rate"] < 0.95
    # The mean over all predictions is another figure: 0.86 where an engine counts 0.79.
    same = ("drafts", "drafted", "accepted", "acceptance_per_position")
    assert [replayed[name] for name in same] == [counted[name] for name in same]
    assert [of_its_answers[name] for name in same] == [counted[name] for name in same]
