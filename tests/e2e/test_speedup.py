"""Test `swiftlite speedup` with real vLLM: after interruptions it ends with heads, figures and a valid command."""

import importlib.util
import json
import random
import shlex
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from swiftlite.args.commands import DeployArgs
from swiftlite.cli.parse import parse
from tests.e2e.conftest import Commands
from tests.messages import has_line
from tests.tiny import make_tiny_hf

pytestmark = [
    pytest.mark.engine,
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]


@pytest.fixture
def speedup(commands: Commands) -> list[str]:
    """Return options with rows, because a model with random weights cannot write prompts."""
    make_tiny_hf(commands.directory / "model", "qwen3", with_tokenizer=True, vocab_size=320)
    numbers = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"]
    rows = [{"query": f"What is {one} times {other}, and why?"} for one in numbers for other in numbers]
    (commands.directory / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options: str = "--budget 5m --dataset rows.jsonl --self_prompts_share 0 --max_new_tokens 16 --torch_dtype float32"
    options += " --concurrency 4"
    return ["speedup", "--model", "model", "--output_dir", "out", *options.split()]


def results(out: Path) -> dict[str, object]:
    """Return the results that do not depend on measured times: everything except seconds, speeds and recommendations.

    The rows allow only one round, so the number of rounds does not depend on times, either.
    """
    first = out / "round-1"
    progress = json.loads((out / "speedup.json").read_text())
    content: dict[str, object] = {name: progress[name] for name in ("rounds", "acceptance")}
    for path in (first / "hf").glob("*.safetensors"):
        content[path.name] = path.read_bytes()
    for path in (out / "held_out.jsonl", first / "rows.jsonl", first / "train.jsonl", first / "answers/dataset.jsonl"):
        sources = path.read_text().replace(f'"{out.name}/', '"')  # rows have the path of their file
        content[path.name] = sources
    return content


def test_killed_at_random_moments(commands: Commands, speedup: list[str]):
    """The results are bitwise identical to those of an uninterrupted command."""
    seed = time.time_ns()
    print(f"random.Random({seed})")  # pytest shows it when the test fails
    moments = random.Random(seed)
    for _ in range(5):
        process = commands.start(*speedup)
        time.sleep(moments.uniform(5, 40))
        if process.poll() is None:
            commands.kill(process)
        time.sleep(10)  # the step in progress receives a signal and stops
    process = commands.start(*speedup)
    printed, errors = process.communicate(timeout=1800)
    assert process.returncode == 0, errors
    out = commands.directory / "out"
    whole = [*speedup]
    whole[whole.index("out")] = "whole"
    commands.ok(*whole)
    assert results(out) == results(commands.directory / "whole")
    progress = json.loads((out / "speedup.json").read_text())
    assert progress["rounds"] == json.loads((commands.directory / "whole/speedup.json").read_text())["rounds"]
    assert len(progress["rounds"]) == 1
    assert {"round-1/answers", "round-1/training", "round-1/export"} <= progress["seconds"].keys()
    best = max(progress["acceptance"], key=lambda name: sum(progress["acceptance"][name]))
    assert json.loads((out / best / "bench" / "bench.json").read_text())["complete"]
    held_out = (out / "held_out.jsonl").read_text().splitlines()
    training = (out / "round-1" / "train.jsonl").read_text().splitlines()
    assert len(held_out) >= 16
    assert not set(held_out) & set(training)
    (line,) = [line for line in printed.splitlines() if line.startswith("    swiftlite deploy")][:1]
    args, _ = parse(DeployArgs, shlex.split(line)[2:])
    assert args.infer_backend == "vllm"
    # Nothing is left to do.
    before = (out / "speedup.json").read_bytes()
    again = commands.ok(*speedup)
    assert again.stdout in printed  # which begins with the tables of the steps
    assert (out / "speedup.json").read_bytes() == before
    # Other settings are refused, and a larger budget is not.
    refused = commands.run(*speedup, "--seed", "7")
    assert refused.returncode != 0
    assert has_line(refused.stderr, "--seed")


@pytest.fixture
def small_disk(commands: Commands) -> Iterator[Path]:
    """Yield an empty disk of 300 MB that is mounted as the output directory."""
    directory = commands.directory / "out"
    directory.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=300m", "none", str(directory)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting a disk requires root")
    yield directory
    subprocess.run(["umount", directory], check=True)


def fill(disk: Path) -> Path:
    """Write a file until the disk is full, and return its path."""
    path = disk / ".filler"
    with path.open("wb", buffering=0) as file:
        while free := shutil.disk_usage(disk).free:
            file.write(bytes(free))
    return path


def test_the_disk_is_full_in_each_step(commands: Commands, speedup: list[str], small_disk: Path):
    """The step ends with a message about the disk, and the same command resumes with this step."""
    steps = {"answers": "regenerate", "training": "megatron sft", "export": "export"}
    steps["bench"] = "bench"
    for number, (name, words) in enumerate(steps.items()):
        process = commands.start_for_real(*speedup)
        assert process.stderr is not None
        errors, filler = "", None
        for line in process.stderr:
            errors += line
            if f"$ swiftlite {words} " in line:
                filler = fill(small_disk)
        assert filler is not None, errors
        assert process.wait() == 1, errors
        assert "No space left on device" in errors
        filler.unlink()
        completed = json.loads((small_disk / "speedup.json").read_text())["seconds"]
        assert list(completed) == [f"round-1/{each}" for each in list(steps)[:number]], name
    commands.ok(*speedup)
