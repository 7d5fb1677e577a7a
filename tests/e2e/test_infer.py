"""Test that an interrupted `swiftlite infer` keeps its answers, and that the same command generates
the missing ones. tests/faults/hunt.py kills the command with the engine transformers.
"""

import json
import os
import signal
import threading
import time
from pathlib import Path

import pytest

from tests.e2e.conftest import Commands
from tests.forked import run_swiftlite
from tests.messages import has_line, mentions

NUM_PROMPTS = 24


@pytest.fixture
def infer(model, tmp_path) -> list[str]:
    """Return options without --result_path."""
    rows = [json.dumps({"query": f"What is {n} plus {n}?"}) for n in range(NUM_PROMPTS)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(rows))
    return f"infer --model {model} --val_dataset prompts.jsonl --torch_dtype float32 --max_new_tokens 48".split()


def num_lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def wait_for_lines(path: Path, number: int) -> None:
    while num_lines(path) < number:
        time.sleep(0.01)


def run_until(argv: list[str], directory: Path, out: Path, err: Path, answers: Path, number: int) -> None:
    """Run the command in a process that sends itself SIGTERM when `number` answers exist."""

    def stop() -> None:
        wait_for_lines(answers, number)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=stop, daemon=True).start()
    run_swiftlite(argv, directory, out, err)


@pytest.mark.engine
@pytest.mark.slow
def test_vllm_stopped_and_gone_on_with(vllm_host, infer: list[str], tmp_path):
    """Heads draft, and two prompts run at a time while others wait."""
    commands = Commands(tmp_path, vllm_host)
    infer += "--infer_backend vllm --max_batch_size 2 --speculative mtp".split()
    unbroken, answers = tmp_path / "unbroken.jsonl", tmp_path / "answers.jsonl"
    commands.ok(*infer, "--result_path", "unbroken.jsonl")
    argv = [*infer, "--result_path", "answers.jsonl"]
    out, err = tmp_path / "out", tmp_path / "err"
    assert vllm_host.call(run_until, argv, tmp_path, out, err, answers, 5) == 143
    done = num_lines(answers)
    assert 5 <= done < NUM_PROMPTS
    last = err.read_text().splitlines()[-2:]
    assert mentions(last[0], f"swiftlite: {done} {NUM_PROMPTS} answers.jsonl")
    again = commands.ok(*argv).stderr
    assert has_line(again, f"{done} {NUM_PROMPTS} answers.jsonl")
    assert answers.read_bytes() == unbroken.read_bytes()
