"""Test `swiftlite bench` with real vLLM servers: files, counts, output, and that no process remains.

No checked number depends on speed. test_adapters.py tests the client with a server that also answers other requests.
"""

import contextlib
import importlib.util
import json
import shlex
import signal
import time
from pathlib import Path

import psutil
import pytest

from swiftlite.args.commands import DeployArgs
from swiftlite.cli.parse import parse
from tests.e2e.conftest import Commands
from tests.stand_ins import forking_vllm_environment
from tests.tiny import make_tiny_hf

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]
NUM_PROMPTS, NEW_TOKENS, ROUNDS = 4, 16, 2


@pytest.fixture
def bench(commands: Commands, monkeypatch) -> list[str]:
    for name, value in forking_vllm_environment().items():
        monkeypatch.setenv(name, value)
    make_tiny_hf(commands.directory / "model", "mimo", depth=1, with_tokenizer=True)
    rows = [json.dumps({"query": f"What is {n} plus {n}?" * 12}) for n in range(NUM_PROMPTS + 1)]
    (commands.directory / "rows.jsonl").write_text("\n".join(rows))
    return (
        "bench --model model --val_dataset rows.jsonl --output_dir out --torch_dtype float32 --max_model_len 256 "
        f"--num_speculative_tokens 0,1 --concurrency 1,2 --rounds {ROUNDS} --max_prompts {NUM_PROMPTS} "
        f"--max_new_tokens {NEW_TOKENS}"
    ).split()


def left_of(directory: Path) -> list[psutil.Process]:
    """Return the processes that were started in a directory: the servers and their subprocesses."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):  # ended meanwhile, or somebody else's
            if process.cwd() == str(directory) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def wait_until_nothing_is_left(directory: Path) -> None:
    """Wait until no process remains. A killed process exists until the kernel has freed its memory."""
    deadline = time.monotonic() + 30
    while left_of(directory):
        assert time.monotonic() < deadline, left_of(directory)
        time.sleep(0.2)


@pytest.mark.slow
def test_bench(commands: Commands, bench: list[str]):
    done = commands.ok(*bench, "--repeat_prompts", "true")
    report = json.loads((commands.directory / "out" / "bench.json").read_text())
    assert report["complete"] is True
    assert report["prompts"] == NUM_PROMPTS
    assert report["versions"].keys() >= {"swiftlite", "python", "torch", "transformers"}
    assert [server["num_speculative_tokens"] for server in report["servers"]] == [0, 1, 0]
    for server in report["servers"]:
        assert ("--speculative-config" in server["command"]) is (server["num_speculative_tokens"] == 1)
        assert [measured["concurrency"] for measured in server["measured"]] == [1, 2]
        for measured in server["measured"]:
            assert len(measured["tokens_per_second_of_rounds"]) == ROUNDS
            assert measured["answers_equal"] == NUM_PROMPTS
            # Each prompt has one whole block of vLLM's cache, 128 tokens; with drafts the last whole block is computed.
            assert (measured["cached_share_of_prompts"] > 0.5) is (server["num_speculative_tokens"] == 0)
            num_tokens = measured["tokens_per_round"]
            assert NUM_PROMPTS < num_tokens <= NUM_PROMPTS * NEW_TOKENS
            if server["num_speculative_tokens"] == 0:
                assert measured["drafts"] is None
                continue
            # Every token comes from the prompt, from a step, or from a draft that is kept. What a last draft adds
            # behind the end of an answer is counted by vLLM, and thrown away: one token of an answer at most.
            drafts = measured["drafts"]
            made = ROUNDS * NUM_PROMPTS + drafts["drafts"] + drafts["accepted"]
            assert 0 <= made - ROUNDS * num_tokens <= ROUNDS * NUM_PROMPTS
            assert drafts["drafted"] == drafts["drafts"]
            assert measured["mean_accepted_length"] == drafts["mean_accepted_length"]
    assert (commands.directory / "out" / "bench.svg").read_text().startswith("<?xml")
    assert [choice["concurrency"] for choice in report["recommendations"]] == [1, 2]
    for choice in report["recommendations"]:
        assert choice["command"] in done.stdout
        args, _ = parse(DeployArgs, shlex.split(choice["command"])[2:])
        assert args.model == "model"
        assert args.speculative == ("mtp" if choice["num_speculative_tokens"] else "none")
    wait_until_nothing_is_left(commands.directory)


@pytest.mark.slow
def test_ctrl_c_leaves_what_was_measured_and_no_process(commands: Commands, bench: list[str]):
    process = commands.start(*bench)
    out = commands.directory / "out"
    while not (out / "bench.json").exists():  # after the measurement with one request at a time
        assert process.poll() is None
        time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    _, told = process.communicate(timeout=120)
    assert process.returncode == 130, told
    assert told.splitlines()[-1].startswith("swiftlite: ")
    report = json.loads((out / "bench.json").read_text())
    assert report["complete"] is False
    for server in report["servers"]:
        assert [measured["concurrency"] for measured in server["measured"]] == [1]
    wait_until_nothing_is_left(commands.directory)
