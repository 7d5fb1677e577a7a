"""Test `scripts/gpu.sh` on a CPU: every stage runs, appends its results, and reports how it ended."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.messages import mentions

ROOT = Path(__file__).parents[2]


def gpu_sh(output_dir: Path, *options: str) -> tuple[int, list[dict], str]:
    """Return the exit status, the results, and the first line of the page."""
    command = ["bash", ROOT / "scripts" / "gpu.sh", "--device", "cpu", "--tiny", "--output_dir", output_dir, *options]
    environment = os.environ | {"SWIFTLITE_PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}
    # Commands that other tests ran in this process have set it. Scripts import modules next to them.
    environment.pop("PYTHONSAFEPATH", None)
    status = subprocess.run(command, cwd=output_dir.parent, env=environment, stdout=subprocess.DEVNULL).returncode
    lines = (output_dir / "gpu_results.jsonl").read_text().splitlines()
    title = (output_dir / "gpu_report.md").read_text().partition("\n")[0]
    return status, [json.loads(line) for line in lines], title


@pytest.mark.gloo
@pytest.mark.parametrize(
    "stages",
    [
        pytest.param(["machine", "plan"], marks=pytest.mark.slow),
        pytest.param(["kernels", "training", "speed"], marks=pytest.mark.slow),
        # Which other tests compute as well.
        pytest.param(["logits", "layouts", "faults", "engines", "quantized", "live"], marks=pytest.mark.slow),
    ],
    ids=" ".join,
)
def test_stages_run_on_a_cpu(tmp_path, stages):
    status, results, title = gpu_sh(tmp_path / "out", "--stages", *stages)
    assert [result for result in results if result["passed"] is False] == []
    ended = [result["stage"] for result in results if result["name"] == "ended"]
    assert ended == stages
    # Each has found something beside how it ended.
    assert len(results) > 2 * len(ended)
    assert status == 0
    assert mentions(title, f"0 {len(results)}")


def test_a_stage_that_takes_too_long_is_cut_off(tmp_path):
    status, results, title = gpu_sh(tmp_path / "out", "--stages", "machine", "--minutes", "0.001")
    assert mentions(results[-1]["value"], "0.001")
    assert status == 1
    assert mentions(title, f"1 {len(results)}")


def test_no_stage_begins_when_the_time_is_over(tmp_path):
    """The page contains the results so far, because it is written after each stage."""
    status, results, title = gpu_sh(tmp_path / "out", "--stages", "machine", "plan", "--total_minutes", "0.001")
    assert [result["stage"] for result in results if result["name"] == "ended"] == ["machine", "plan"]
    assert "--total_minutes" in results[-1]["value"]
    assert status == 1
    assert mentions(title, f"2 {len(results)}")


def test_models_and_runs_lie_apart_from_results(tmp_path):
    status, results, title = gpu_sh(tmp_path / "out", "--stages", "machine", "--work_dir", str(tmp_path / "scratch"))
    assert {file.name for file in (tmp_path / "out").iterdir()} == {
        "gpu_results.jsonl",
        "gpu_report.md",
        "machine.log",
    }
    assert (tmp_path / "scratch").is_dir()
    assert status == 0
    assert [result for result in results if result["passed"] is False] == []
    assert mentions(title, f"0 {len(results)}")


def test_a_call_needs_a_number(tmp_path):
    command = ["bash", ROOT / "scripts" / "gpu_offline.sh", "call", "4", tmp_path, tmp_path / "out"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    assert "gpu_offline.sh collect" in done.stderr


def test_a_difference_that_is_not_a_number_fails(tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(ROOT / "scripts" / "gpu")
    from result import Results, page, read  # pyright: ignore[reportMissingImports]

    results = Results(tmp_path, "kernels")
    results.at_most("norm", 0.001, 0.01)
    results.at_most("loss", float("nan"), 0.01)
    text = page(read(tmp_path))
    assert text.index("| kernels | loss | nan |") < text.index("| kernels | norm |")
    assert "FAILED" in capsys.readouterr().out
