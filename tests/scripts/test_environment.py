"""Test scripts/environment.sh without its installations."""

import os
import subprocess
from pathlib import Path

import pytest

from tests.messages import has_line

ROOT = Path(__file__).parents[2]
SHELL_SCRIPTS = [*ROOT.glob("scripts/*.sh"), *ROOT.glob("examples/*.sh"), ROOT / ".ci" / "run"]


def bash(script: str, **environment: str) -> subprocess.CompletedProcess[str]:
    script = f"set -euo pipefail\n. {ROOT}/scripts/environment.sh\n{script}"
    return subprocess.run(["bash", "-c", script], capture_output=True, text=True, env=os.environ | environment)


def test_a_layer_is_installed_once_per_fingerprint(tmp_path):
    script = """
        install_thing() { echo "installed"; }
        install_once thing 1 install_thing
        install_once thing 1 install_thing
        install_once thing 2 install_thing
    """
    done = bash(script, SWIFTLITE_VENV=str(tmp_path))
    assert done.stdout.splitlines().count("installed") == 2


def test_a_failed_installation_stops_and_is_tried_again(tmp_path):
    script = "install_once thing 1 false"
    for _ in range(2):
        done = bash(script, SWIFTLITE_VENV=str(tmp_path))
        assert done.returncode == 1
        assert has_line(done.stderr, "thing")


def test_no_fitting_python_says_how_to_name_one(tmp_path):
    (tmp_path / "python3").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "python3").chmod(0o755)
    done = bash("use_environment", PYTHON=str(tmp_path / "python3"), SWIFTLITE_VENV=str(tmp_path / "venv"))
    assert done.returncode == 1
    assert has_line(done.stderr, "3.11 3.12")
    assert "PYTHON=/path/to/python3.12" in done.stderr
    assert not (tmp_path / "venv").exists()


def test_an_unknown_tier_names_the_known_ones():
    done = subprocess.run(["bash", ROOT / "scripts" / "test.sh", "gpus"], capture_output=True, text=True)
    assert done.returncode == 1
    assert has_line(done.stderr, "'gpus'")
    assert "unit gloo engine cuda_emulated slow te flash llmcompressor lm_eval gpu" in done.stderr


@pytest.mark.parametrize(
    "path", [*ROOT.glob("scripts/*.sh"), *ROOT.glob("examples/*.sh"), ROOT / ".ci" / "run"], ids=str
)
def test_shell_scripts_parse_and_can_be_run(path):
    assert subprocess.run(["bash", "-n", path]).returncode == 0
    assert path.name == "environment.sh" or os.access(path, os.X_OK)
