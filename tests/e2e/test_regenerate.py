"""Test that `swiftlite regenerate` with vLLM, stopped once, ends with the same result as without interruption.

tests/faults/hunt.py kills the command with the engine transformers.
"""

import json
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
