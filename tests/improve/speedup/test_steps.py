"""Test steps with commands of swiftlite that take a second."""

import json
import subprocess
import time

import pytest

from swiftlite.base.errors import UserError
from swiftlite.improve import steps
from swiftlite.improve.speedup.state import Progress
from swiftlite.improve.steps import CommandStep, run_step
from tests.messages import naming


@pytest.fixture
def progress(tmp_path) -> Progress:
    return Progress.read(tmp_path, {})


def stored(directory) -> dict:
    return json.loads((directory / Progress.FILE).read_text())


def test_a_complete_step_is_recorded_and_not_run_again(progress, tmp_path, capfd):
    (tmp_path / "result").touch()
    step = CommandStep("round-1/x", ("--version",), tmp_path / "result")
    run_step(step, progress, tmp_path)
    assert stored(tmp_path)["seconds"][step.name] > 0
    assert capfd.readouterr().out.startswith("swiftlite")
    run_step(step, progress, tmp_path)
    assert capfd.readouterr().out == ""


def test_a_step_whose_result_is_gone_runs_again(progress, tmp_path, capfd):
    (tmp_path / "result").touch()
    progress.seconds["round-1/x"] = 1.0
    with pytest.raises(UserError, match=naming("round-1/x 0 swiftlite --version")):
        run_step(CommandStep("round-1/x", ("--version",), tmp_path / "gone"), progress, tmp_path)
    assert capfd.readouterr().out.startswith("swiftlite")


def test_a_failed_command_ends_with_its_exit_code(progress, tmp_path):
    with pytest.raises(UserError, match=naming("round-1/x 2")) as raised:
        run_step(CommandStep("round-1/x", ("evalaute",), tmp_path / "result"), progress, tmp_path)
    assert raised.value.exit_code == 2
    assert "round-1/x" not in progress.seconds


def test_a_killed_command_is_named_with_its_signal(progress, tmp_path, monkeypatch):
    def killed(words, keep_time):
        return subprocess.run(["sh", "-c", "kill -9 $$"], check=False).returncode

    monkeypatch.setattr(steps, "_run", killed)
    with pytest.raises(UserError, match=naming("round-1/x SIGKILL")):
        run_step(CommandStep("round-1/x", ("--version",), tmp_path / "result"), progress, tmp_path)
    assert "round-1/x" not in progress.seconds


def test_an_atomic_result_is_enough(progress, tmp_path, capfd):
    """The command was killed after it had written its result, but before speedup.json was written."""
    (tmp_path / "result").touch()
    progress.unfinished["round-1/export"] = 7.0
    run_step(CommandStep("round-1/export", ("--version",), tmp_path / "result", is_atomic=True), progress, tmp_path)
    assert capfd.readouterr().out == ""
    assert stored(tmp_path)["seconds"] == {"round-1/export": 7.0}
    assert stored(tmp_path)["unfinished"] == {}


def test_interrupted_attempts_count(progress, tmp_path, monkeypatch):
    monkeypatch.setattr(steps, "SECONDS_BETWEEN_WRITES", 0.01)
    (tmp_path / "result").touch()
    progress.unfinished["round-1/x"] = 100.0
    kept = []
    monkeypatch.setattr(Progress, "write", lambda self, directory: kept.append(dict(self.unfinished)))
    start = time.monotonic()
    run_step(CommandStep("round-1/x", ("--version",), tmp_path / "result"), progress, tmp_path)
    assert any(100 < times.get("round-1/x", 0) < 101 for times in kept)  # during the attempt
    assert 100 < progress.seconds["round-1/x"] <= 100 + time.monotonic() - start + 0.1
    assert progress.unfinished == {}
    assert progress.spent == progress.seconds["round-1/x"]
