"""Compare all layouts that fit the number of GPUs with one process (scripts/parity.py); then run tests/gpu."""

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

from result import Results, Settings

ROOT = Path(__file__).resolve().parents[3]


def run(settings: Settings, results: Results) -> None:
    few: list[str] = []
    if settings.tiny:
        few = ["--families", "qwen3", "--cases", "full uniform 1"]
    directory = settings.work_dir / "parity"
    command = [sys.executable, ROOT / "scripts" / "parity.py", "--device", settings.device, "--output_dir", directory]
    status = subprocess.run([*command, *few], stdout=sys.stderr).returncode
    cells = json.loads((directory / "parity.json").read_text())["cells"]
    computed = sum(not isinstance(cell, str) for row in cells.values() for cell in row.values())
    results.add("layouts against one process, float32", f"{computed} cells in {directory}", not status, "rounding only")
    if settings.device == "cuda" and find_spec("pytest") is None:
        results.add("tests/gpu", "pytest is not installed")
    elif settings.device == "cuda":
        tests = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", ROOT / "tests" / "gpu"]
        results.add(
            "tests/gpu", "pytest", not subprocess.run(tests, cwd=ROOT, stdout=sys.stderr).returncode, "all tests pass"
        )
