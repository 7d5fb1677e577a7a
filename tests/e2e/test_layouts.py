"""Test whole commands on several processes: train with one layout, resume with another, export with a third."""

from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import read_metrics
from tests.tiny import make_tiny_hf

pytestmark = pytest.mark.gloo


@pytest.fixture
def model(tmp_path) -> Path:
    sizes: dict[str, Any] = {"num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2}
    return make_tiny_hf(tmp_path / "model", "glm4_moe", depth=1, with_tokenizer=True, **sizes)


@pytest.mark.slow
def test_a_run_goes_from_layout_to_layout_as_if_it_were_one_process(commands, sft, tmp_path):
    alone, run, exported = tmp_path / "alone", tmp_path / "run", tmp_path / "exported"
    options = [*sft, "--save_steps", 2, "--lr_decay_style", "constant", "--lr_warmup_fraction", 0]
    commands.ok(*options, "--train_iters", 4, "--output_dir", alone)

    pipeline = ["--pipeline_model_parallel_size", 2, "--pipeline_model_parallel_layout", "Ettt|mL"]
    commands.ok(*options, "--train_iters", 2, "--output_dir", run, *pipeline, "--async_save", "true", processes=2)
    experts = ["--tensor_model_parallel_size", 2, "--sequence_parallel", "true", "--expert_model_parallel_size", 2]
    commands.ok(*options, "--train_iters", 4, "--output_dir", run, *experts, "--resume", processes=2)

    ours, theirs = ([line for line in read_metrics(path) if "loss" in line] for path in (run, alone))
    assert [line["step"] for line in ours] == [line["step"] for line in theirs] == [1, 2, 3, 4]
    for mine, its in zip(ours, theirs, strict=True):
        for name in ("loss", "mtp_1_loss", "grad_norm"):
            assert mine[name] == pytest.approx(its[name], rel=1e-5)  # float32 sums in another order, over 4 steps

    commands.ok(
        "export", "--to_hf", "--model", run, "--output_dir", exported, "--expert_model_parallel_size", 2, processes=2
    )
    commands.ok("doctor", "--model", exported)
