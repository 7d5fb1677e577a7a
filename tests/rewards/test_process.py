"""Test the process of the reward functions: its results, every kind of failure, and that no process remains."""

import datetime
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from swiftlite.base.errors import UserError
from swiftlite.rewards import process as process_module
from swiftlite.rewards.process import RewardProcess, Scored
from swiftlite.rewards.settings import RewardSettings
from tests.messages import mentions, naming
from tests.rewards.test_code import ends

SHORT = 1.0
"""Time limit in tests of functions that never return. The other functions of these tests return immediately."""
PLUGIN = '''
import asyncio, atexit, ctypes, multiprocessing, os, signal, subprocess, sys, time
import numpy as np

def good(completions):
    return [len(text) for text in completions]

def everything(prompts, completions, completion_ids, step, **columns):
    expected = (["p", "q"], ["one", "three"], [[1], [2, 3]], {"answer": [1, None], "other": ["x", "y"]})
    for name in ("prompt_texts", "trainer_state", "log_metric"):
        del columns[name]
    return [float((prompts, completions, completion_ids, columns) == expected), step]

def array(completions):
    return np.array([0.5, 1.5], np.float32)

def scalars(completions):
    return (np.float32(0.5), np.bool_(True))

def generator(completions):
    yield True
    yield None

def imported(completions):
    return ["torch" in sys.modules, os.getpid()]

def raises(completions):
    raise ValueError("this is\\nthe reason")

def leaves(completions):
    sys.exit(3)

def interrupts(completions):
    raise KeyboardInterrupt

def few(completions):
    return [1.0]

def many(completions):
    return [1.0] * 3

def nan(completions):
    return [1.0, float("nan")]

def large(completions):
    return [1, -10**19]

def infinite(completions):
    return [-float("inf"), 1.0]

def text(completions):
    return ["1.0", 1.0]

def one_number(completions):
    return 1.0

def nothing(completions):
    return None

def mapping(completions):
    return {0: 1.0, 1: 2.0}

def huge(completions):
    return [10 ** 400, 1]

def matrix(completions):
    return np.ones((2, 2))

def coroutine(completions):
    async def later():
        return [1.0, 1.0]
    result = later()
    result.close()
    return result

def exits(completions):
    os._exit(4)

def killed(completions):
    os.kill(os.getpid(), signal.SIGKILL)

def crashes(completions):
    ctypes.string_at(0)

def sleeps(completions):
    time.sleep(1000)

def stops(completions):
    os.kill(os.getpid(), signal.SIGSTOP)

def spins_in_c(completions):
    ctypes.PyDLL(None).sleep(1000)  # holds the interpreter's lock

async def awaits(completions):
    await asyncio.sleep(1000)

async def refuses_to_end(completions):
    while True:
        try:
            await asyncio.sleep(1000)
        except asyncio.CancelledError:
            pass

async def blocks(completions):
    time.sleep(1000)

async def exits_later(completions):
    await asyncio.sleep(0)
    os._exit(4)

async def raises_later(completions):
    await asyncio.sleep(0)
    raise ValueError("this is the reason")

calls = 0
turn = None

async def also(completions):
    await asyncio.sleep(0)
    return [2, 2]

async def first(completions):
    """Return only if `second` runs at the same time, in the same event loop as in previous calls."""
    global turn, calls
    turn = turn or asyncio.Event()
    await turn.wait()
    calls += 1
    return [calls, calls]

async def second(completions):
    await asyncio.sleep(0)
    turn.set()
    return [1, 1]

def sometimes(completions, step):
    if step != 2:
        raise ValueError(f"step {step}")
    return [1, 1]

def prints(completions):
    print("a line\\n" * 20000)
    os.write(1, b'{"index": 0, "scores": [9, 9]}\\n')
    subprocess.run(["echo", "of a program"], check=True)
    return [len(sys.stdin.read()), 1]

def leaves_socket_open(completions):
    pid = os.getpid()
    if os.fork() == 0:  # this process has the socket, until a second after its parent has ended
        while os.getppid() == pid:
            time.sleep(0.02)
        time.sleep(1)
        os._exit(0)
    return [pid, pid]

def starts(completions, directory):
    atexit.register(lambda: open(directory[0] + "/atexit", "w").close())
    other = subprocess.Popen(["sleep", "1000"])
    return [os.getpid(), other.pid]

def pool(completions):
    with multiprocessing.get_context("fork").Pool(2) as pool:
        return pool.map(len, completions)

def terminates(completions):
    context = multiprocessing.get_context("fork")
    for _ in range(50):
        process = context.Process(target=time.sleep, args=(60,))
        process.start()
        process.terminate()
        process.join()
    return [process.exitcode for _ in completions]

def surrogates(completions):
    return [completions[0] == "\\ud83d", completions[1] == "\\x00\\n\\u2028"]
'''


@pytest.fixture(scope="module")
def plugin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("plugin") / "rewards.py"
    file.write_text(PLUGIN)
    return file


@contextmanager
def opened(plugin: Path, *names: str, timeout: float = 60.0) -> Iterator[RewardProcess]:
    with RewardProcess(names, [plugin], RewardSettings(timeout=timeout, max_completion_length=10)) as rewards:
        yield rewards


def score(rewards: RewardProcess, step: int = 0, columns: dict[str, Any] | None = None) -> Scored:
    return rewards.score(["p", "q"], ["one", "three"], [[1], [2, 3]], columns or {}, step)


def test_results(plugin):
    names = ("good", "everything", "array", "scalars", "nan", "generator", "pool", "length")
    with opened(plugin, *names) as rewards:
        scored = score(rewards, step=7, columns={"answer": [1, None], "other": ["x", "y"]})
    assert scored.failures == []
    assert scored.rewards == [[3, 5], [1, 7], [0.5, 1.5], [0.5, 1], [1, None], [1, None], [3, 5], [0, 0]]


def test_a_forked_process_ends_by_a_signal_at_any_time(plugin):
    """The signal arrives before the new process runs Python code, where it would be lost or end all processes."""
    with opened(plugin, "terminates") as rewards:
        scored = score(rewards)
    assert scored.failures == []
    assert scored.rewards == [[-signal.SIGTERM] * 2]


def test_nothing_is_lost_in_json(plugin):
    with opened(plugin, "surrogates") as rewards:
        scored = rewards.score(["p", "q"], ["\ud83d", "\x00\n\u2028"], [[1], [2]], {}, 0)
    assert scored.rewards == [[1, 1]]


def test_the_process_is_kept_and_does_not_import_torch(plugin):
    with opened(plugin, "imported") as rewards:
        first, second = (score(rewards).rewards[0] for _ in range(2))
    assert first == second
    assert first[0] == 0
    assert first[1] != os.getpid()


FAILURES = {  # tokens of the message, by function
    "raises": "ValueError: this is the reason",
    "leaves": "SystemExit: 3",
    "interrupts": "KeyboardInterrupt",
    "few": "1 2",
    "many": "3 2",
    "infinite": "-inf 0",
    "large": "-1e+19 1 1e+18",
    "text": "1.0 0",
    "one_number": "float",
    "nothing": "NoneType",
    "mapping": "dict",
    "huge": "OverflowError",
    "matrix": "0",
    "coroutine": "coroutine",
    "raises_later": "ValueError: this is the reason",
}
ENDS = {  # the same, of functions that end their process
    "exits": "exit code 4",
    "killed": "SIGKILL",
    "crashes": "SIGSEGV",
    "exits_later": "exit code 4",
}


HANGS = {  # tokens of the traceback
    "sleeps": "rewards.py sleeps",
    "spins_in_c": "rewards.py spins_in_c",
    "awaits": "rewards.py awaits",
    "refuses_to_end": "Timeout",
    "blocks": "rewards.py blocks",
}


def failed_once(rewards: RewardProcess, name: str, tokens: str) -> None:
    """Check that of the functions good, `name`, array and also, only `name` fails."""
    scored = score(rewards)
    assert scored.rewards == [[3, 5], [None, None], [0.5, 1.5], [2, 2]]
    (failure,) = scored.failures
    assert mentions(failure, f"{name} {tokens}")


def test_failures(plugin):
    with opened(plugin, "good", *FAILURES, "array", "also") as rewards:
        scored = score(rewards)
    assert scored.rewards == [[3, 5], *[[None, None]] * len(FAILURES), [0.5, 1.5], [2, 2]]
    for failure, (name, tokens) in zip(scored.failures, FAILURES.items(), strict=True):
        assert mentions(failure, f"{name} {tokens}")


@pytest.mark.parametrize("name", ENDS)
def test_an_end_of_the_process(plugin, name):
    with opened(plugin, "good", name, "array", "also") as rewards:
        failed_once(rewards, name, ENDS[name])


@pytest.mark.parametrize("name", ["raises_later", "leaves", "crashes", "few"])
def test_the_third_failure_in_a_row_ends_the_run(plugin, name):
    with opened(plugin, "good", name, "array", "also") as rewards:
        tokens = (FAILURES | ENDS)[name]
        failed_once(rewards, name, tokens)
        failed_once(rewards, name, tokens)
        with pytest.raises(UserError, match=naming(f"--reward_funcs {name} {tokens} {plugin}")) as caught:
            score(rewards)
    assert mentions(str(caught.value), "File line") == (name != "few"), "the traceback of the function"
    if name in ("raises_later", "leaves"):
        assert "child.py" not in str(caught.value), "the traceback starts in the user's file"


@pytest.mark.parametrize("name", HANGS)
def test_a_function_that_does_not_return(plugin, name):
    with opened(plugin, "good", name, "array", "also", timeout=SHORT) as rewards:
        failed_once(rewards, name, f"{SHORT:g} --reward_timeout")
        assert mentions(rewards._last_failures[1][-1].traceback, HANGS[name])


def test_a_stopped_process_is_replaced(plugin, monkeypatch):
    """Its own time limit does not end a stopped process."""
    monkeypatch.setattr(process_module, "PATIENCE", SHORT)
    with opened(plugin, "good", "stops", "array", "also", timeout=SHORT) as rewards:
        failed_once(rewards, "stops", f"{SHORT:g} --reward_timeout")


def test_only_failures_in_a_row_end_the_run(plugin):
    with opened(plugin, "sometimes") as rewards:
        counts = [len(score(rewards, step).failures) for step in range(5)]
        assert counts == [1, 1, 0, 1, 1]
        with pytest.raises(UserError, match=naming("--reward_funcs sometimes step 5")):
            score(rewards, 5)


def test_coroutines_run_together_in_one_event_loop(plugin):
    with opened(plugin, "first", "good", "second") as rewards:
        assert score(rewards).rewards == [[1, 1], [3, 5], [1, 1]]
        assert score(rewards).rewards == [[2, 2], [3, 5], [1, 1]]


def test_output_goes_to_stderr(plugin, capfd):
    with opened(plugin, "prints", "good") as rewards:
        scored = score(rewards)
    assert scored.failures == []
    assert scored.rewards == [[0, 1], [3, 5]]
    captured = capfd.readouterr()
    assert captured.out == ""
    assert captured.err.count("a line\n") == 20000
    assert "of a program\n" in captured.err


@pytest.mark.parametrize("name", ["imported", "leaves_socket_open"])
def test_a_process_killed_between_calls(plugin, name):
    with opened(plugin, name) as rewards:
        pid = score(rewards).rewards[0][1]
        assert pid is not None
        os.kill(int(pid), signal.SIGKILL)
        assert ends(int(pid))
        scored = score(rewards)
        assert scored.rewards[0][1] not in (None, pid)
        assert mentions("\n".join(scored.failures), "SIGKILL")
        assert score(rewards).failures == []


def test_no_process_remains(plugin, tmp_path):
    with opened(plugin, "starts") as rewards:
        pids = score(rewards, columns={"directory": [str(tmp_path)] * 2}).rewards[0]
    assert all(ends(int(pid or 0)) for pid in pids)
    assert (tmp_path / "atexit").exists()


def test_no_process_remains_after_kill_9(plugin, tmp_path):
    program = f"""
import time
from swiftlite.rewards.process import RewardProcess
with RewardProcess(["starts"], [{str(plugin)!r}]) as rewards:
    scored = rewards.score(["p"] * 2, ["a"] * 2, [[1]] * 2, {{"directory": [{str(tmp_path)!r}] * 2}}, 0)
    print(*map(int, scored.rewards[0]), flush=True)
    time.sleep(1000)
"""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(pids) == 2
        parent.kill()
    assert all(ends(pid) for pid in pids)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_signals_of_a_batch_system_are_left_to_the_parent(plugin, number):
    """SLURM sends a signal to all processes of a job; the parent decides when scoring ends."""
    with opened(plugin, "imported") as rewards:
        pid = score(rewards).rewards[0][1]
        os.kill(int(pid or 0), number)
        scored = score(rewards)
        assert scored.failures == []
        assert scored.rewards[0][1] == pid


def test_columns_are_checked(plugin):
    columns = {"answer": [1, 2], "solution": [1, 2]}
    with opened(plugin, "starts", "good") as rewards:
        with pytest.raises(UserError, match=naming("--reward_funcs starts directory answer solution")):
            rewards.check_columns(columns)
        with pytest.raises(UserError, match=naming("--reward_funcs starts directory")):
            score(rewards, columns=columns)
        with pytest.raises(UserError, match=naming("--reward_funcs starts --dataset completions")):
            rewards.check_columns(["completions", "directory"])
        rewards.check_columns(["step", "directory"])
        assert score(rewards, columns={"step": [8, 8], "directory": ["/nowhere"] * 2}).rewards[1] == [3, 5]


def test_columns_that_json_does_not_have(plugin):
    dates = {"other": [datetime.date(2026, 1, 1)] * 2, "answer": [1, None]}
    with opened(plugin, "good") as rewards:
        assert score(rewards, columns=dates).failures == []  # no function accepts the column
    with opened(plugin, "everything") as rewards, pytest.raises(UserError, match=naming("--dataset other date")):
        score(rewards, columns=dates)


def test_a_function_that_cannot_be_loaded(tmp_path, plugin):
    with pytest.raises(UserError, match=naming("--reward_funcs god good")), opened(plugin, "god"):
        pass
    broken = tmp_path / "broken.py"
    broken.write_text("import no_such_module")
    with pytest.raises(UserError, match=naming("--external_plugins broken.py no_such_module")), opened(broken, "good"):
        pass
    broken.write_text("import os\nos._exit(5)")
    with pytest.raises(UserError, match=naming("--external_plugins broken.py exit code 5")), opened(broken, "good"):
        pass
    with pytest.raises(UserError, match=naming("--reward_funcs code --allow_code_rewards")), opened(plugin, "code"):
        pass
