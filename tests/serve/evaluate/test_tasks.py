"""Test `evaluate --tasks` with the real lm-evaluation-harness, which is in a separate environment.

`bash scripts/test.sh lm_eval` creates this environment. The tasks are those of tests/tasks.
"""

import contextlib
import importlib.util
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from swiftlite.acceptance.counts import DraftCounts
from swiftlite.args.commands import DeployArgs
from swiftlite.engines.server.metrics import Throughput
from swiftlite.engines.server.process import serve
from swiftlite.families.resolved import resolve
from swiftlite.runtime import lm_eval
from swiftlite.serve import deploy
from swiftlite.serve.evaluate.task_page import Compared, task_page, task_table
from swiftlite.serve.evaluate.task_results import Score, TaskRun, read_finished, read_lm_eval, write_finished
from tests.messages import has_line, mentions
from tests.tiny import make_tiny_hf

TASKS = Path(__file__).parents[2] / "tasks"
with_lm_eval = pytest.mark.skipif(
    not lm_eval.LM_EVAL.is_installed,
    reason=f"lm-eval {lm_eval.RELEASE} is not in {lm_eval.LM_EVAL.directory} (requirements/lm_eval.txt)",
)
NAMES = ("capitals", "capitals_choice")
OPTIONS = ("--tasks", *NAMES, "--include_path", TASKS, "--limit", 5, "--torch_dtype", "float32")
ENGINES = [
    "transformers",
    pytest.param(
        "vllm",
        marks=[
            pytest.mark.engine,
            pytest.mark.slow,
            pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
        ],
    ),
]


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    """Return a directory with a model with heads, "hf", and one without, "base"."""
    directory = tmp_path_factory.mktemp("models")
    make_tiny_hf(directory / "hf", "qwen3", depth=1, with_tokenizer=True, max_position_embeddings=512)
    make_tiny_hf(directory / "base", "qwen3", with_tokenizer=True, seed=1, max_position_embeddings=512)
    return directory


def start(directory: Path, *options: object) -> subprocess.Popen:
    """Start `swiftlite evaluate` in a directory, with a default handler of Ctrl-C."""
    run = "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
    run += "from swiftlite.cli.main import main; sys.exit(main())"
    command = [sys.executable, "-W", "ignore", "-c", run, "evaluate", *map(str, options)]
    return subprocess.Popen(command, cwd=directory, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def evaluate(directory: Path, *options: object) -> subprocess.CompletedProcess:
    process = start(directory, *options)
    out, err = process.communicate(timeout=900)
    return subprocess.CompletedProcess([], process.returncode, out, err)


@contextmanager
def deployed(model: Path, engine: str, log: Path) -> Iterator[str]:
    """Yield the address of a server that `deploy` starts, which drafts."""
    options = {"infer_backend": engine, "torch_dtype": "float32", "max_model_len": 512}
    args = DeployArgs(model=str(model), speculative="mtp", **options)
    with serve(deploy.server_command(args, resolve(model)), log) as server:
        yield server.url


def own_run(model: Path, tasks: list[str], url: str, directory: Path) -> dict[str, Any]:
    """Return the results of lm-eval's own command against a server."""
    model_args = f"model=hf,base_url={url}/v1/completions,tokenizer={model},tokenizer_backend=huggingface"
    model_args += ",max_length=512"
    command = ["-m", "lm_eval", "run", "--model", "local-completions", "--model_args", model_args, "--limit", "5"]
    command += ["--tasks", *tasks, "--include_path", str(TASKS), "--output_path", str(directory), "--log_samples"]
    subprocess.run([lm_eval.LM_EVAL.interpreter, *command], cwd=TASKS, check=True, capture_output=True)
    return read_lm_eval(directory)


@with_lm_eval
@pytest.mark.parametrize("engine", ENGINES)
def test_scores_are_those_of_lm_eval(models, tmp_path, engine):
    """They are equal to the last digit; answers with and without drafts are equal; and nothing is repeated."""
    options = [*OPTIONS, "--model", models / "hf", "--baseline", models / "base", "--compare"]
    options += ["--infer_backend", engine, "--output_dir", tmp_path / "E"]
    done = evaluate(tmp_path, *options)
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "E" / "evaluation.json").read_text())
    with deployed(models / "hf", engine, tmp_path / "own.log") as url:
        own = own_run(models / "hf", list(NAMES), url, tmp_path / "own")
        running = ["--server", url, "--num_concurrent", 3, "--output_dir", tmp_path / "S"]
        on_server = evaluate(tmp_path, *OPTIONS[:-2], "--model", models / "hf", *running)
    assert on_server.returncode == 0, on_server.stderr
    of_server = json.loads((tmp_path / "S" / "evaluation.json").read_text())["model"]["tasks"]
    for task in NAMES:
        found = report["model"]["tasks"][task]
        for side in ("with_drafts", "without_drafts"):
            measured = found[side]["lm_eval"]["results"][task]
            assert measured == own["results"][task]
            assert found[side]["questions"] == 5
        (measured,) = (found for side, found in of_server[task].items() if side.endswith("_drafts"))
        assert measured["lm_eval"]["results"][task] == own["results"][task]
        assert found["equal_answers"] == 1.0
        assert {change["metric"] for change in found["change"]} == {"acc"}
        assert set(report["baseline"]["tasks"][task]) == {"without_drafts"}
    generated = report["model"]["tasks"]["capitals"]
    assert len(generated["with_drafts"]["drafts"]["acceptance_per_position"]) == 1
    assert generated["with_drafts"]["generated_tokens"] == generated["without_drafts"]["generated_tokens"] > 0
    assert generated["with_drafts"]["tokens_per_second"] > 0
    assert report["model"]["tasks"]["capitals_choice"]["with_drafts"]["tokens_per_second"] is None
    assert has_line(done.stdout, "capitals model acc")
    assert (tmp_path / "E" / "evaluation.html").stat().st_size > 1000
    before = times(tmp_path / "E" / "tasks")
    again = evaluate(tmp_path, *options)
    assert again.returncode == 0, again.stderr
    assert again.stdout == done.stdout
    assert times(tmp_path / "E" / "tasks") == before
    changed = evaluate(tmp_path, *options, "--limit", 4)
    assert changed.returncode == 1
    assert has_line(changed.stderr, "--output_dir limit")


def times(directory: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in directory.rglob("*")}


@with_lm_eval
@pytest.mark.parametrize("end", ["server", "SIGINT"])
def test_finished_tasks_are_kept(models, tmp_path, end):
    """A server that dies, and Ctrl-C, are named with what to do; the same command then runs only the other task."""
    options = [*OPTIONS, "--model", models / "hf", "--infer_backend", "transformers", "--output_dir", tmp_path / "E"]
    first, second = (tmp_path / "E" / "tasks" / "model" / task for task in NAMES)
    process = start(tmp_path, *options)
    until(lambda: str(second / "lm_eval.json") in "\n".join(children(process)))
    if end == "server":
        for words, child in children(process).items():
            if "transformers.serve" in words and "watchdog" not in words:
                child.kill()
    else:
        process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=300)
    assert process.returncode == {"server": 1, "SIGINT": 130}[end], err
    named = {"server": "capitals_choice server.log", "SIGINT": f"1 2 {tmp_path / 'E' / 'tasks'}"}
    assert mentions(err, named[end])
    assert (first / "finished.json").exists()
    assert not (second / "finished.json").exists()
    before = times(first)
    again = evaluate(tmp_path, *options)
    assert again.returncode == 0, again.stderr
    assert times(first) == before
    assert (second / "finished.json").exists()


def children(process: subprocess.Popen) -> dict[str, psutil.Process]:
    """Return the processes that a process has started, by command line."""
    found = {}
    for child in psutil.Process(process.pid).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            found[" ".join(child.cmdline())] = child
    return found


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 300
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@with_lm_eval
def test_a_task_that_does_not_exist(models, tmp_path):
    """It is found before a server is started, and a directory of this name here is not read."""
    (tmp_path / "no_such_task").mkdir()
    (tmp_path / "no_such_task" / "task.yaml").write_text("task: !function evil.run")
    (tmp_path / "lm_eval.py").write_text("raise SystemExit('imported')")
    done = evaluate(tmp_path, "--tasks", "no_such_task", "--model", models / "hf", "--output_dir", "E")
    assert done.returncode == 1
    assert mentions(done.stderr, "--tasks no_such_task --include_path")
    assert "imported" not in done.stderr
    assert not list((tmp_path / "E").rglob("server.log"))


def task_run(directory: Path, acc: float, answers: list[str], counts: DraftCounts | None = None) -> TaskRun:
    """Return a run of a task with one score, and write its answers as lm-eval does."""
    results = {
        "results": {"t": {"alias": "t", "acc,none": acc, "acc_stderr,none": 0.1, "n": 3}},
        "n-samples": {"t": {"effective": len(answers)}},
        "configs": {"t": {"output_type": "generate_until"}},
    }
    (directory / "model").mkdir(parents=True)
    lines = [{"doc_id": number, "resps": [[text]]} for number, text in enumerate(answers)]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (directory / "model" / "samples_t_2026-11-29T18-00-00.000000.jsonl").write_text(text)
    return TaskRun(results, counts, Throughput(40, 2.0), directory)


def test_results_are_compared(tmp_path):
    counts = DraftCounts(10, 20, (6, 3))
    with_drafts = task_run(tmp_path / "a", 0.5, ["x", "y", "z", "w"], counts)
    without = task_run(tmp_path / "b", 0.5, ["x", "y", "z", "v"])
    before = task_run(tmp_path / "c", 0.9, ["x", "", "", ""])
    compared = Compared("t", "model", with_drafts, without, before)
    (row,) = task_table([compared]).rows
    assert row == ["t", "model", "acc", "0.5000 ± 0.1000", "-0.4000", *row[5:]]
    assert row[5:] == ["75.0%", "60.0%, 30.0%", "1.90", "20.00", "20.00"]
    content = compared.to_json()
    assert content["equal_answers"] == 0.75
    assert content["equal_answers_of_baseline"] == 0.25
    page = task_page([compared, Compared("t", "baseline", None, before)], {"model": "M", "baseline": "B"})
    assert len(page.sections[0].figures) == 2


@pytest.mark.parametrize(("other", "is_small"), [(0.2, False), (0.25, True)])
def test_small_differences_are_marked(other, is_small):
    """The standard error of the difference is 0.1 * sqrt(2), so two of them are 0.283."""
    _, found = Score("t", "acc", 0.5, 0.1).difference(Score("t", "acc", other, 0.1))
    assert found is is_small
    assert Score("t", "acc", 0.5, None).difference(Score("t", "acc", 0.49, 0.1))[1] is False


def test_a_finished_task_is_read_again(tmp_path):
    run = task_run(tmp_path, 0.5, ["x"], DraftCounts(10, 20, (6, 3)))
    (tmp_path / "finished.json").write_bytes(write_finished(run, {"limit": 3}))
    assert read_finished(tmp_path) == (run, {"limit": 3})
