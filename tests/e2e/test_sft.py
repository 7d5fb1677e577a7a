"""Test `megatron sft` as a process: resuming, signals, kill -9, several processes."""

import json
import os
import random
import re
import shutil
import signal
import time
from pathlib import Path

import psutil
import pytest

from swiftlite.report.run_files import read_run
from swiftlite.report.run_page import run_page
from tests.e2e.conftest import Commands, read_metrics, sft_options, write_rows
from tests.forked import SignalAtCall
from tests.messages import has_line, mentions
from tests.tiers import some_of
from tests.tiny import make_tiny_hf

pytestmark = pytest.mark.gloo


def wait_for(condition, process, seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < end, "timed out"
        time.sleep(0.02)


def steps_written(run: Path) -> int:
    path = run / "metrics.jsonl"
    return path.read_text().count("\n") if path.exists() else 0


# tests/faults/test_kill_points.py kills runs at operations on files, test_launched.py kills a rank of two.
@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_kill_9_and_resume_equals_the_unbroken_run(commands, sft, tmp_path, dtype):
    unbroken, killed = tmp_path / "unbroken", tmp_path / "killed"
    commands.ok(*sft, "--torch_dtype", dtype, "--output_dir", unbroken)
    process = commands.start(*sft, "--torch_dtype", dtype, "--output_dir", killed)
    at = random.randint(5, 10)
    wait_for(lambda: steps_written(killed) >= at, process)
    commands.kill(process)
    commands.ok(*sft, "--torch_dtype", dtype, "--output_dir", killed, "--resume")
    assert read_metrics(killed) == read_metrics(unbroken)
    first, second = (json.loads((run / "acceptance.json").read_text()) for run in (unbroken, killed))
    assert first == second


def test_killed_while_saving_leaves_the_checkpoint_before(commands, sft, tmp_path):
    run = tmp_path / "run"
    process = commands.start(*sft, "--output_dir", run, signal_at=SignalAtCall("Checkpointer._publish", 2))
    process.communicate()
    assert (run / ".checkpoint-8.writing").exists()
    assert [path.name for path in run.glob("checkpoint-*")] == ["checkpoint-4"]
    result = commands.ok(*sft, "--output_dir", run, "--resume")
    assert has_line(result.stderr, "checkpoint-4")
    assert {path.name for path in run.glob("*checkpoint-*")} == {"checkpoint-4", "checkpoint-8", "checkpoint-12"}


@pytest.mark.parametrize("number", some_of([signal.SIGTERM, signal.SIGINT, signal.SIGHUP], signal.SIGTERM))
def test_a_stop_signal_saves_and_ends_cleanly(commands, sft, tmp_path, number):
    run = tmp_path / "run"
    words = [*sft, "--save_steps", "1000", "--train_iters", "500", "--output_dir", run]
    process = commands.start(*words, pages=True)
    wait_for(lambda: steps_written(run) >= 3, process)
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 128 + number
    assert "--resume" in errors
    assert "Traceback" not in errors
    (checkpoint,) = run.glob("checkpoint-*")
    step = read_metrics(run)[-1]["step"]
    assert int(checkpoint.name.removeprefix("checkpoint-")) == step
    assert mentions(run_page(read_run(run)).lead, str(step))
    assert (run / "run_report.html").is_file()


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    """Return a directory with `model`, `rows.jsonl`, and a `run` of 12 steps, which must not be changed."""
    directory = tmp_path_factory.mktemp("finished")
    model = make_tiny_hf(directory / "model", "qwen3", depth=1, with_tokenizer=True)
    options = sft_options(model, write_rows(directory / "rows.jsonl"))
    Commands(directory).ok(*options, "--save_total_limit", "2", "--output_dir", directory / "run")
    return directory


@pytest.mark.slow
def test_args_json_runs_again(commands, finished, tmp_path):
    arguments = finished / "run" / "args.json"
    commands.ok("megatron", "sft", arguments, "--output_dir", tmp_path / "second")
    assert read_metrics(finished / "run") == read_metrics(tmp_path / "second")
    plan = commands.ok("megatron", "sft", arguments, "--output_dir", "planned", "--dry_run").stdout
    for path in (finished / "run").iterdir():
        assert mentions(plan, "planned/" + re.sub(r"checkpoint-\d+", "checkpoint-N", path.name)), path


def test_the_export_of_a_moved_run_needs_nothing_else(commands, finished, tmp_path):
    shutil.copytree(finished / "run", tmp_path / "moved")
    hidden = finished.rename(tmp_path / "gone")
    try:
        commands.ok("export", "--to_hf", "--model", tmp_path / "moved", "--output_dir", tmp_path / "hf")
    finally:
        hidden.rename(finished)
    written = {path.name for path in (tmp_path / "hf").iterdir()}
    assert written >= {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}


def resumed(finished: Path, directory: Path) -> list:
    """Copy the run of `finished` to `directory/run`; return words that resume it for two steps."""
    shutil.copytree(finished / "run", directory / "run")
    options = sft_options(finished / "model", finished / "rows.jsonl")
    return [*options, "--train_iters", "14", "--output_dir", directory / "run", "--resume"]


def test_a_checkpoint_that_does_not_fit_is_named(commands, finished, tmp_path):
    resume = resumed(finished, tmp_path)
    shutil.rmtree(tmp_path / "run" / "checkpoint-8")
    checkpoint = tmp_path / "run" / "checkpoint-12"
    state = json.loads((checkpoint / "trainer_state.json").read_text())
    del state["version"]
    (checkpoint / "trainer_state.json").write_text(json.dumps(state | {"mtp_num_layers": 2}))
    (checkpoint / "SHA256SUMS").unlink()
    result = commands.run("export", "--to_hf", "--model", tmp_path / "run", "--output_dir", tmp_path / "hf")
    assert result.returncode == 1
    assert mentions(result.stderr, "checkpoint-12 --resume")
    assert "Traceback" not in result.stderr
    assert not (tmp_path / "hf").exists()
    damaged = next(checkpoint.glob("*.distcp"))
    damaged.write_bytes(damaged.read_bytes()[:100])
    again = commands.run(*resume)
    assert again.returncode == 1
    assert has_line(again.stderr, "checkpoint-12.damaged")


def children_of(pid: int) -> set[int]:
    return {child.pid for child in psutil.Process(pid).children(recursive=True)}


def wait_for_a_save(process, run: Path) -> None:
    """Wait until a save is running. Returns later only if the save took less than a millisecond."""
    end = time.monotonic() + 120
    while not list(run.glob(".checkpoint-*.writing")):
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < end, "timed out"
        time.sleep(0.0005)


@pytest.mark.slow
def test_nothing_lives_on_after_a_kill_in_an_asynchronous_save(commands, sft, tmp_path):
    run = tmp_path / "run"
    frequent = ("--save_steps", "1", "--train_iters", "500", "--async_save", "true", "--acceptance_samples", "0")
    process = commands.start(*sft, *frequent, "--output_dir", run)
    started: set[int] = set()
    end = time.monotonic() + 120
    while not started:
        assert time.monotonic() < end, "no writer was seen"
        if process.poll() is None:
            started = children_of(process.pid)
    os.kill(process.pid, signal.SIGKILL)  # not its group: what it has started must end by itself
    process.communicate()
    _, alive = psutil.wait_procs([psutil.Process(pid) for pid in started if psutil.pid_exists(pid)], timeout=10)
    assert alive == []


def test_a_run_that_has_lost_its_source_gets_it_back(commands, finished, tmp_path):
    run, resume = tmp_path / "run", resumed(finished, tmp_path)
    before = {path.name: path.read_bytes() for path in (run / "source").iterdir()}
    shutil.rmtree(run / "source")
    result = commands.ok(*resume)
    assert has_line(result.stderr, f"{run / 'source'} --model")
    assert {path.name: path.read_bytes() for path in (run / "source").iterdir()} == before
