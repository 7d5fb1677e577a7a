"""Packing as a command: streaming at several layouts, resumed, and random tokens of given lengths."""

import json

import pytest

from tests.e2e.conftest import read_metrics

pytestmark = pytest.mark.gloo

STREAMED = ["--packing", "--max_length", 64, "--packing_length", 96, "--streaming", "--streaming_buffer_size", 8]


def test_a_streamed_run_is_the_same_at_other_layouts_and_goes_on_bit_for_bit(commands, sft, tmp_path):
    """40 rows, some 3 of them in a packed one, so that 12 steps of 4 pass over the file more than once."""
    options = [*sft, *STREAMED, "--split_dataset_ratio", 0, "--micro_batch_size", 1]
    commands.ok(*options, "--output_dir", tmp_path / "alone")
    for name, layout in (("dp2", []), ("pp2", ["--pipeline_model_parallel_size", 2])):
        commands.ok(*options, *layout, "--output_dir", tmp_path / name, processes=2)
        for one, two in zip(read_metrics(tmp_path / "alone"), read_metrics(tmp_path / name), strict=True):
            # Sums over ranks have another order; twelve steps carry their rounding on.
            assert two == pytest.approx(one, rel=1e-4)
            assert two["loss"] == pytest.approx(one["loss"], rel=1e-5)

    stopped = tmp_path / "stopped"
    commands.ok(*options, "--train_iters", 8, "--lr_decay_style", "constant", "--output_dir", stopped, processes=2)
    state = json.loads((stopped / "checkpoint-8" / "trainer_state.json").read_text())["stream"]
    assert state["num_read"] > 8 * 4
    whole = tmp_path / "whole"
    commands.ok(*options, "--lr_decay_style", "constant", "--output_dir", whole, processes=2)
    # The warm-up is a part of the steps: 12 of them from here on.
    resumed = commands.ok(*options, "--lr_decay_style", "constant", "--output_dir", stopped, "--resume", processes=2)
    assert "going on from" in resumed.stderr
    assert read_metrics(stopped)[8:] == read_metrics(whole)[8:]


def test_mock_data_under_the_scheduler(commands, sft, tmp_path, model):
    mock = {
        "mode": "distribution",
        "type": "lognormal",
        "min_seq_len": 4,
        "max_seq_len": 60,
        "mean_seq_len": 20,
        "lognormal_sigma": 1.0,
    }
    without_dataset = [word for word in sft if word != "--dataset" and not word.endswith("rows.jsonl")]
    options = [*without_dataset, "--train_iters", 2, "--sft_mock_dataset_config_json", json.dumps(mock)]
    packed = ["--packing", "--max_length", 64, "--sequence_packing_scheduler", "dp_balanced", "--global_batch_size", 16]
    done = commands.ok(*options, *packed, "--output_dir", tmp_path / "run", processes=2)
    assert "NaN" not in done.stderr
    report = json.loads((tmp_path / "run" / "run_report.json").read_text())
    assert report["data"]["train_samples"] == 100_000
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2]
    assert all(line["tokens_per_second"] > 0 and line["tflops_per_second"] > 0 for line in lines)
