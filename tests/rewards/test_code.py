"""Test the reward function `code`, which runs Python that a model wrote."""

import tempfile
import time
from pathlib import Path

import pytest

from swiftlite.rewards.code_tests import code, code_block
from swiftlite.rewards.settings import RewardSettings

SETTINGS = RewardSettings(timeout=300.0, allow_code=True, code_timeout=60.0)  # also on a busy machine
ADD = "def add(a, b):\n    return a + b\n"


def score(completion: str, tests: object, settings: RewardSettings = SETTINGS) -> float | None:
    return code(settings, completions=[completion], tests=[tests])[0]


@pytest.mark.parametrize(
    ("text", "block"),
    [
        ("x = 1", "x = 1"),
        ("Here:\n```python\nx = 1\n```\nDone.", "x = 1\n"),
        ("```\nx = 1\n```\nBetter:\n```py\nx = 2\n```", "x = 2\n"),
        ("```python\nx = 1", "```python\nx = 1"),
    ],
)
def test_the_last_block_is_used(text, block):
    assert code_block(text) == block


@pytest.mark.parametrize(
    ("tests", "expected"),
    [
        (["assert add(1, 2) == 3", "assert add(1, 1) == 3", "assert add(0, 0) == 0", "add("], 0.5),
        ("assert add(1, 2) == 3\nassert add(1, 1) == 2", 1.0),
        ("assert add(1, 2) == 3\nassert add(1, 1) == 3", 0.0),
        ([], None),
        (None, None),
    ],
)
def test_the_fraction_of_tests_that_pass(tests, expected):
    assert score(f"<think>```python\nx\n```</think>Here:\n```python\n{ADD}```", tests) == expected
    assert score(ADD, tests) == expected


@pytest.mark.parametrize(
    "program",
    [
        "not Python",
        "import os; os.kill(os.getpid(), 9)",
        "print('+' * 1000)",
        "x = bytearray(4 * 1024**3); add = lambda a, b: 3",
        "import os\nfor _ in range(3000): os.mkdir('a'); os.chdir('a')",
        "import os; os.mkdir('a'); os.chmod('a', 0); os.chmod('.', 0)",
    ],
)
def test_a_program_that_fails_passes_no_test(program, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert score(program, ["assert add(1, 2) == 3"]) == 0.0
    assert not list(tmp_path.iterdir())


def test_a_program_does_not_end_the_loops_of_a_test():
    program = "def f(x): raise StopIteration\ndef g():\n    yield 1\n    yield 2"
    assert score(program, ["assert all(a == 1 for a in map(f, [1, 2]))", "assert list(g()) == [1, 2]"]) == 0.5


def test_a_test_that_does_not_return_keeps_the_tests_before():
    settings = RewardSettings(allow_code=True, code_timeout=5.0)
    assert score(ADD, ["assert add(1, 2) == 3", "import time; time.sleep(1000)"], settings) == 0.5


def test_output_and_processes_do_not_disturb():
    assert score("import os, sys\nprint('+')\nos.write(1, b'+')\nsys.stdin.read()", ["assert True"]) == 1.0


def test_secrets_are_not_passed_on(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "secret")
    assert score("import os", ["assert 'secret' not in os.environ.values()"]) == 1.0


@pytest.mark.parametrize("seconds", [0, 1000])
def test_processes_of_a_program_end_with_it(tmp_path, seconds):
    """Also one in a session of its own whose parent has ended, and after the time limit."""
    file = tmp_path / "pid"
    program = """
import os, time
reader, writer = os.pipe()
if not os.fork():
    os.setsid()
    if not os.fork():
        os.write(writer, str(os.getpid()).encode())
        os.closerange(3, 100)
        time.sleep(1000)
    os._exit(0)
pid = int(os.read(reader, 20))
"""
    tests = [f"open({str(file)!r}, 'w').write(str(pid))", f"import time; time.sleep({seconds})"]
    settings = RewardSettings(allow_code=True, code_timeout=5.0)
    assert score(program, tests, settings) == (0.5 if seconds else 1.0)
    assert ends(int(file.read_text()))


def test_the_number_of_processes_is_limited():
    program = """
import os, time
def f():
    for number in range(1000):
        try:
            if not os.fork(): time.sleep(1000)
        except OSError: return number
    return number
"""
    assert score(program, ["assert 8 < f() < 100"]) == 1.0


def ends(pid: int) -> bool:
    """Wait until a process has ended; it may remain as a zombie of a process that does not wait for it."""
    for _ in range(500):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return True
        if state == "Z":
            return True
        time.sleep(0.02)
    return False
