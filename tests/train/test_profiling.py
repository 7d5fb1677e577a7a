"""Test profiles of steps: their files, their table, and that they change nothing else."""

import gzip
import json
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from swiftlite.base.errors import UserError
from swiftlite.base.log import logger
from swiftlite.train import phases, profiling
from swiftlite.train import run as training
from swiftlite.train.profiling import NUM_OPERATORS
from tests.messages import has_line, naming
from tests.train.prepared import prepare
from tests.train.test_sft import metrics, train


def files(run: Path) -> set[str]:
    return {path.name for path in (run / "profile").iterdir()}


def both(name: str) -> set[str]:
    return {f"{name}.trace.json.gz", f"{name}.operators.json"}


def test_steps_are_profiled_and_the_losses_are_those_without_it(options, mesh, tmp_path, pages):
    plain = train(options(output_dir=str(tmp_path / "plain"), train_iters=3), mesh)
    assert not (plain / "profile").exists()
    run = train(options(profile_steps=[2, 3], train_iters=3), mesh)
    assert metrics(run) == metrics(plain)
    assert files(run) == both("steps-2-3-rank-0")

    with gzip.open(run / "profile/steps-2-3-rank-0.trace.json.gz") as file:
        events = json.load(file)["traceEvents"]  # Chrome's trace format
    names = [event["name"] for event in events if event.get("ph") == "X"]
    assert names.count("Optimizer.step#AdamW.step") == 2  # once in each step

    (profile,) = json.loads((run / "run_report.json").read_text())["profiles"]
    assert (profile["steps"], profile["rank"], profile["device"]) == ([2, 3], 0, "cpu")
    operators = profile["operators"]
    assert len(operators) == NUM_OPERATORS
    times = [each["milliseconds"] for each in operators]
    assert times == sorted(times, reverse=True)
    assert 0 < sum(each["share"] for each in operators) <= 1
    # Torch counts an operator that calls itself, for example with other dtypes, once.
    assert all(0 < each["calls"] <= names.count(each["name"]) for each in operators)
    assert operators[0]["name"] in (run / "run_report.html").read_text()


@pytest.mark.slow
def test_a_run_that_is_stopped_within_the_steps_keeps_its_profile_and_resumes(options, mesh, pages):
    def stop(step: int) -> None:
        if step == 2:
            signal.raise_signal(signal.SIGTERM)

    args = options(profile_steps=[1, 3], train_iters=3)
    run = prepare(args, mesh)
    trainer = replace(training.make_trainer(run, phases.restore(run)), after_step=stop)
    outcome = phases.fit(run, trainer, 0, training.make_held_out(run))
    assert outcome.stopped_by == signal.SIGTERM
    assert files(run.output_dir) == both("steps-1-2-rank-0")
    phases.finish(run, outcome)
    assert "steps 1 to 2" in (run.output_dir / "run_report.html").read_text()

    train(replace(args, resume=True), mesh)
    assert files(run.output_dir) == both("steps-1-2-rank-0") | both("steps-3-3-rank-0")
    report = json.loads((run.output_dir / "run_report.json").read_text())
    assert [profile["steps"] for profile in report["profiles"]] == [[1, 2], [3, 3]]


def test_an_error_within_the_steps_loses_no_profile(options, mesh):
    def fail(step: int) -> None:
        raise ZeroDivisionError

    run = prepare(options(profile_steps=[1, 4]), mesh)
    trainer = replace(training.make_trainer(run, phases.restore(run)), after_step=fail)
    with pytest.raises(ZeroDivisionError):
        trainer.fit(0)
    assert files(run.output_dir) == both("steps-1-1-rank-0")


@pytest.mark.slow
def test_a_profile_that_cannot_be_written_fails_no_run(options, mesh, tmp_path, caplog):
    logger.propagate = True
    (tmp_path / "run").mkdir()
    (tmp_path / "run/profile").write_text("in the way")
    run = train(options(profile_steps=[1, 2]), mesh)
    assert (run / "run_report.json").is_file()
    assert has_line(caplog.text, "--profile_steps run/profile")


@pytest.mark.slow
def test_a_trace_that_is_cut_off_leaves_no_file(options, mesh, monkeypatch):
    def cut_off(self, path: str) -> None:
        Path(path).write_bytes(b"half of a tra")
        raise OSError("no space")

    monkeypatch.setattr(profiling.profile, "export_chrome_trace", cut_off)
    run = train(options(profile_steps=[1, 1]), mesh)
    assert files(run) == set()


def test_other_ranks_are_not_profiled(options, tmp_path):
    args = options(profile_steps=[1, 2], profile_ranks=[1, 3])
    ranks = [profiling.make_profiler(args, tmp_path, rank, is_cuda=False) for rank in range(4)]
    assert [profiler.recorder is not None for profiler in ranks] == [False, True, False, True]


def test_steps_that_the_rows_do_not_give_are_rejected_before_the_model_is_read(options, mesh, hf_dir):
    for weights in hf_dir.glob("*.safetensors"):
        weights.unlink()
    with pytest.raises(UserError, match=naming("--profile_steps 3 9 4")):
        prepare(options(train_iters=None, profile_steps=[3, 9]), mesh)
