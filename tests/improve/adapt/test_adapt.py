"""Test what `adapt` reads from the log, what it remembers, and when it takes heads back.

tests/e2e/test_adapt.py runs the command against a real server.
"""

import json
import os
import random
from pathlib import Path

import pytest

from swiftlite.base.errors import UserError
from swiftlite.improve.adapt.command import is_worse
from swiftlite.improve.adapt.request_log import MAX_HELD_OUT, MIN_HELD_OUT, digest_of_end, divide, num_new, read_log
from swiftlite.improve.adapt.state import Served, State
from tests.messages import naming


def line(question: str, answer: str = "Yes.") -> bytes:
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return json.dumps({"messages": messages}).encode() + b"\n"


def write(path: Path, *lines: bytes) -> None:
    path.write_bytes(b"".join(lines))


def test_the_replaced_file_comes_first_and_unfinished_or_other_lines_are_skipped(tmp_path, caplog):
    write(tmp_path / "log.1.jsonl", line("1"), b"not JSON\n", line("2"))
    write(tmp_path / "log.jsonl", line("3"), b'{"messages": []}\n', b"[1]\n", line("4"), line("5")[:-9])
    training, held_out = divide(read_log(tmp_path / "log.jsonl"), max_rows=10)
    assert [row["messages"][0]["content"] for row in (*training, *held_out)] == ["1", "2", "3", "4"]
    assert "3 lines" in caplog.text


def test_new_rows_are_those_after_the_last_one_also_when_the_file_was_replaced(tmp_path):
    log = tmp_path / "log.jsonl"
    write(log, *map(line, "123"))
    last = digest_of_end(read_log(log))
    assert num_new(read_log(log), last) == 0
    assert num_new(read_log(log), "") == 3
    log.rename(tmp_path / "log.1.jsonl")
    write(log, *map(line, "45"))
    assert num_new(read_log(log), last) == 2
    (tmp_path / "log.1.jsonl").unlink()  # so many requests that both files were replaced
    assert num_new(read_log(log), last) == 2


@pytest.mark.parametrize(("number", "held_out"), [(40, MIN_HELD_OUT), (100, 20), (1000, MAX_HELD_OUT)])
def test_the_newest_rows_are_held_out(tmp_path, number, held_out):
    log = tmp_path / "log.jsonl"
    write(log, *(line(str(number)) for number in range(number)))
    training, kept = divide(read_log(log), max_rows=50)
    questions = [int(row["messages"][0]["content"]) for row in kept]
    assert questions == list(range(number - held_out, number))
    trained = [int(row["messages"][0]["content"]) for row in training]
    assert trained == list(range(number - held_out))[-50:]


def test_repeated_conversations_count_as_new(tmp_path):
    log = tmp_path / "log.jsonl"
    write(log, line("1"), *[line("again")] * 3)
    end = digest_of_end(read_log(log))
    write(log, line("1"), *[line("again")] * 3, line("2"), *[line("again")] * 5)
    assert num_new(read_log(log), end) == 6


def test_a_question_that_is_held_out_is_not_trained(tmp_path):
    log = tmp_path / "log.jsonl"
    write(log, *[line("always the same")] * 30, *(line(str(number)) for number in range(20)), line("always the same"))
    training, held_out = divide(read_log(log), max_rows=100)
    assert len(held_out) == MIN_HELD_OUT
    assert "always the same" not in {row["messages"][0]["content"] for row in training}


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads every file")
def test_a_log_of_another_user_is_an_error(tmp_path):
    log = tmp_path / "log.jsonl"
    write(log, line("1"))
    log.chmod(0)
    with pytest.raises(UserError, match=naming(f"--request_log {log}")):
        read_log(log)


def test_the_state_is_read_again_and_its_settings_stay(tmp_path):
    state = State.read(tmp_path, {"lr": 1e-3})
    state.heads, state.before = "round-2", Served(3, 6, 4)
    state.write(tmp_path)
    assert State.read(tmp_path, {"lr": 1e-3}) == state
    with pytest.raises(UserError, match=naming("--lr 0.001 0.1")):
        State.read(tmp_path, {"lr": 0.1})
    (tmp_path / "adapt.json").write_text("{")
    with pytest.raises(UserError, match=naming("adapt.json damaged")):
        State.read(tmp_path, {"lr": 1e-3})
    (tmp_path / "adapt.json").unlink()
    (tmp_path / "other").touch()
    with pytest.raises(UserError, match=naming("--output_dir not empty")):
        State.read(tmp_path, {})


def served(steps: int, share: float, seed: int) -> Served:
    """Return the counts of steps that draft one token, each accepted with probability `share`."""
    chance = random.Random(seed)
    return Served(steps, steps, sum(chance.random() < share for _ in range(steps)))


def test_chance_takes_no_heads_back_and_a_real_loss_does():
    equal = [is_worse(served(300, 0.5, 2 * seed), served(300, 0.5, 2 * seed + 1)) for seed in range(500)]
    assert sum(equal) <= 2
    lower = [is_worse(served(2000, 0.4, 2 * seed), served(2000, 0.5, 2 * seed + 1)) for seed in range(100)]
    assert sum(lower) >= 90
    better = [is_worse(served(300, 0.6, 2 * seed), served(300, 0.5, 2 * seed + 1)) for seed in range(100)]
    assert not any(better)
