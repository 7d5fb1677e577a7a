"""Test that `swiftlite regenerate`, killed several times, ends with the same result as without interruption."""

import json
import random
import shutil
import time
from pathlib import Path

import pytest

from tests.e2e.conftest import Commands
from tests.e2e.test_infer import num_lines, run_until
from tests.messages import has_line

NUM_ROWS = 10


@pytest.fixture
def regenerate(model, tmp_path) -> list[str]:
    """Return options without --output_dir. Conversations have one or two turns."""
    rows = []
    for number in range(NUM_ROWS):
        history = [[f"What is {number}?", "A number."]] * (number % 2)
        rows.append({"query": f"What is {number} plus {number}?", "response": "It is more.", "history": history})
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return (
        f"regenerate --model {model} --dataset rows.jsonl --torch_dtype float32 --max_new_tokens 32 "
        "--max_model_len 512 --gold_fraction 0.25"
    ).split()


def files(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


@pytest.mark.slow  # in CI, tests/faults/test_kill_points.py kills `regenerate`
@pytest.mark.gloo
def test_killed_at_random_moments(commands: Commands, regenerate: list[str], tmp_path):
    regenerate += "--temperature 0.9 --top_p 0.95 --num_answers 3".split()
    commands.ok(*regenerate, "--output_dir", "unbroken")
    unbroken = files(tmp_path / "unbroken")
    out = tmp_path / "out"
    seed = time.time_ns()
    print(f"random.Random({seed})")  # pytest shows it when the test fails
    moments = random.Random(seed)
    kills = 0
    while kills < 10:
        before = num_lines(out / "answers.jsonl")
        wanted = before + moments.randint(0, 4)
        process = commands.start(*regenerate, "--output_dir", "out")
        while num_lines(out / "answers.jsonl") < wanted and process.poll() is None:
            time.sleep(0.001)
        time.sleep(moments.uniform(0, 0.05 if wanted > before else 2))  # or anywhere while it starts
        if process.poll() is None:
            commands.kill(process)
            kills += 1
        else:  # it was faster
            assert files(out) == unbroken
            shutil.rmtree(out)
    commands.ok(*regenerate, "--output_dir", "out")
    assert files(out) == unbroken


@pytest.mark.slow  # the same code stops `infer`
@pytest.mark.engine
def test_vllm_stopped_and_gone_on_with(vllm_host, regenerate: list[str], tmp_path):
    """Heads draft, and vLLM processes several prompts at a time. Its answers equal those of transformers."""
    commands = Commands(tmp_path, vllm_host)
    commands.ok(*regenerate, "--output_dir", "transformers")
    regenerate += "--infer_backend vllm --max_batch_size 4 --speculative mtp".split()
    commands.ok(*regenerate, "--output_dir", "unbroken")
    unbroken = files(tmp_path / "unbroken")
    assert unbroken["dataset.jsonl"] == (tmp_path / "transformers/dataset.jsonl").read_bytes()
    argv = [*regenerate, "--output_dir", "out"]
    out, err, answers = tmp_path / "stdout", tmp_path / "stderr", tmp_path / "out/answers.jsonl"
    assert vllm_host.call(run_until, argv, tmp_path, out, err, answers, 12) == 143  # in the second turns
    done = num_lines(answers)
    assert 12 <= done < 15
    assert has_line(err.read_text(), f"swiftlite: {done} 15 out/answers.jsonl")
    again = commands.ok(*argv).stderr
    assert has_line(again, f"{15 - done}")
    assert files(tmp_path / "out") == unbroken
