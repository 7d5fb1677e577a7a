"""Fixtures that run a tiny model in this process, phase by phase."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from swiftlite.args.commands import SftArgs
from swiftlite.train import phases
from tests.tiny import make_tiny_hf


@pytest.fixture
def hf_dir(tmp_path) -> Path:
    return make_tiny_hf(tmp_path / "hf", "qwen3", depth=1, with_tokenizer=True)


def options_in(directory: Path, hf_dir: Path) -> Callable[..., SftArgs]:
    """Return a function that returns the options of a run of 4 steps, some of them replaced."""
    rows = [{"query": f"What is {n} plus {n}?", "response": f"It is {2 * n}."} for n in range(20)]
    dataset = directory / "rows.jsonl"
    dataset.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def make(**changed) -> SftArgs:
        usual = {
            "model": str(hf_dir),
            "dataset": [str(dataset)],
            "split_dataset_ratio": 0.2,
            "output_dir": str(directory / "run"),
            "torch_dtype": "float32",
            "micro_batch_size": 2,
            "global_batch_size": 4,
            "train_iters": 4,
            "lr": 1e-3,
            "acceptance_samples": 0,
            "report_to": [],
        }
        return SftArgs(**usual | changed)

    return make


@pytest.fixture
def options(hf_dir, tmp_path) -> Callable[..., SftArgs]:
    return options_in(tmp_path, hf_dir)


@pytest.fixture
def pages() -> None:
    """Let the runs of this test write run_report.html."""


@pytest.fixture(autouse=True)
def without_pages(request, monkeypatch) -> None:
    """Leave out the pages of runs, whose figures take longer than the steps, in tests without the fixture `pages`."""
    if "pages" not in request.fixturenames:
        monkeypatch.setattr(phases, "write_page", lambda run: None)
