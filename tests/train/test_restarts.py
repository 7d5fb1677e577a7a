"""Test what restarts record and measure, without processes. tests/e2e/test_restarts.py kills real ones."""

import json
import time

import pytest

from swiftlite.args.commands import SftArgs
from swiftlite.base.errors import UserError
from swiftlite.report.metrics import LOST_SECONDS, NUM_RESTARTS, REPEATED_STEPS, decisions_in, read_metrics
from swiftlite.runtime.decisions import record_decision
from swiftlite.runtime.progress import FILE, Progress, read_progress
from swiftlite.train.metrics.loggers import MetricsFile
from swiftlite.train.restarts import RestartClock
from swiftlite.train.run import run
from tests.messages import mentions


def steps_of(clock: RestartClock, first: int, last: int) -> dict[int, dict[str, float]]:
    """Take steps as the trainer does, and return the metrics before each step that has some."""
    found = {}
    clock.start(first)
    for step in range(first + 1, last + 1):
        if metrics := clock.before(step):
            found[step] = dict(metrics)
        clock.after(step)
    return found


def test_lost_time_is_measured_over_several_failures(tmp_path):
    path = tmp_path / "progress"
    assert steps_of(RestartClock(path), 0, 7) == {}
    failed = time.time()
    time.sleep(0.1)
    # From the checkpoint after step 4, and killed again before step 7 is reached.
    assert steps_of(RestartClock(path, restarts=1), 4, 6) == {}
    progress = read_progress(path)
    assert progress is not None
    assert (progress.restarts, progress.last, progress.furthest, progress.repeated) == (1, 6, 7, 2)
    found = steps_of(RestartClock(path, restarts=2), 4, 9)
    assert found.keys() == {8}
    metrics = found[8]
    assert (metrics[REPEATED_STEPS], metrics[NUM_RESTARTS]) == (5, 2)
    assert 0.1 <= metrics[LOST_SECONDS] <= time.time() - failed + 0.1
    after = steps_of(RestartClock(path, restarts=3), 8, 10)
    assert {step: metrics[REPEATED_STEPS] for step, metrics in after.items()} == {10: 1}


def test_another_command_does_not_count_earlier_failures(tmp_path):
    path = tmp_path / "progress"
    Progress(restarts=2, last=5, furthest=9, finished=0.0).write(path)
    assert steps_of(RestartClock(path), 4, 12) == {}


def test_a_damaged_record_is_none(tmp_path):
    path = tmp_path / "progress"
    assert read_progress(path) is None
    for content in ("", "{}", '{"restarts": 1}', "[1]"):
        path.write_text(content)
        assert read_progress(path) is None


def test_without_restarts_nothing_is_written(tmp_path):
    assert steps_of(RestartClock(), 0, 3) == {}
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("first", [0, 2])
def test_lines_about_failures_stay_in_the_metrics(tmp_path, first):
    path = tmp_path / "metrics.jsonl"
    lines = [{"step": 0, "eval_loss": 3.0}, {"step": 2, "loss": 2.0}, {"step": 3, LOST_SECONDS: 1.0}, {"step": 4}]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    MetricsFile(path, first, last=9, resumes=True).close()
    kept = [json.loads(line) for line in path.read_text().splitlines()]
    assert kept == [*(lines[:2] if first else []), lines[2]]


@pytest.mark.parametrize("first", [0, 2])
def test_decisions_stay_in_the_metrics_unless_they_are_taken_again(tmp_path, first):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "loss": 2.0}\n')
    record_decision(tmp_path, 0, "store_down", "continued without it", lost_seconds=3.5)
    record_decision(tmp_path, 2, "damaged_checkpoint", "checkpoint-4 was renamed")
    record_decision(tmp_path, 3, "bad_step", "skipped")
    MetricsFile(path, first, last=9, resumes=True).close()
    kept = [line["fault"] for line in decisions_in(read_metrics(tmp_path))]
    assert kept == ["store_down", "damaged_checkpoint"][: 2 if first else 1]


def test_a_program_of_the_user_s_cannot_have_restarts(monkeypatch):
    monkeypatch.delenv(FILE, raising=False)
    with pytest.raises(UserError) as raised:
        run(SftArgs(max_restarts=2))
    assert mentions(raised.value.problem, "--max_restarts 2")
