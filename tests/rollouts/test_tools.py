"""Test that calls of tools, whatever they do, return a message, and leave no process behind."""

import asyncio
import os
import time
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from swiftlite.base.errors import UserError
from swiftlite.rewards.load import import_plugin
from swiftlite.rollouts.tools import MAX_OUTPUT, Tools, schema_of, tools_of
from swiftlite.rollouts.turns import call_of
from tests.messages import naming
from tests.rewards.test_code import ends

SECONDS = 1.0
FILE = '''
import ctypes, os, subprocess, sys, time
from json import dumps

COUNT = []

def add(a: int, b: int) -> int:
    """
    Add two numbers.

    Args:
        a: First.
        b: Second.
    """
    COUNT.append(a)
    return a + b + len(COUNT) - 1

async def later(text):
    return text

def loops(text):
    while True: pass

def spins_in_c(text): ctypes.PyDLL(None).sleep(1000)
def exits(text): os._exit(3)
def leaves(text): sys.exit(3)
def raises(text): raise ValueError(text)
def huge(text): return "x" * 10**8
def fills_the_memory(text): return "x" * 10**11
def half(text): return "\\ud800"
def closes(text): os.closerange(3, 256)
def starts(text):
    process = subprocess.Popen(["sleep", "1000"])
    open(text, "w").write(str(process.pid))
    time.sleep(1000)

def _hidden(text): return text
'''


@pytest.fixture(scope="module")
def module(tmp_path_factory) -> ModuleType:
    return import_plugin(tmp_path_factory.mktemp("tools") / "tools.py", FILE.encode())


def answers(module: ModuleType, *calls: dict[str, Any]) -> tuple[list[str], Tools]:
    async def answer() -> tuple[list[str], Tools]:
        tools = Tools(tools_of(module, Path("tools.py")), SECONDS)
        return [message["content"] for message in await tools.answer(calls)], tools

    return asyncio.run(answer())


def test_calls_return_their_results(module):
    """A call does not see what other calls change."""
    add = call_of("add", {"a": 1, "b": 2})
    found, tools = answers(module, add, add, call_of("later", {"text": "é"}), call_of("half", {"text": ""}))
    assert found == ["3", "3", "é", "?"]
    assert (tools.num_calls, tools.num_failures) == (4, 0)


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (call_of("add", {"a": 1}), "'b'"),
        (call_of("add", {"a": 1, "b": "x"}), "unsupported"),
        (call_of("add", [1, 2]), "JSON"),
        (call_of("", {}, "the call is not JSON"), "not JSON"),
        (call_of("dumps", {"obj": 1}), "dumps not found"),
        (call_of("_hidden", {"text": 1}), "_hidden not found"),
        (call_of("exits", {"text": ""}), "ended"),
        (call_of("leaves", {"text": ""}), "3"),
        (call_of("raises", {"text": "my reason"}), "my reason"),
        (call_of("raises", {"text": ""}), "ValueError"),
        (call_of("closes", {"text": ""}), "ended"),
        (call_of("fills_the_memory", {"text": ""}), "MemoryError"),
        (call_of("loops", {"text": ""}), "1 seconds"),
        (call_of("spins_in_c", {"text": ""}), "1 seconds"),
    ],
)
def test_a_failed_call_is_answered_with_its_error(module, call, reason):
    found, tools = answers(module, call)
    assert reason in found[0]
    assert found[0].startswith("{'error': ")
    assert (tools.num_calls, tools.num_failures) == (1, 1)


def test_a_huge_result_is_cut(module):
    found, _ = answers(module, call_of("huge", {"text": ""}))
    assert found == ["x" * MAX_OUTPUT + "..."]


def test_calls_after_a_late_one_are_not_executed(module):
    """A completion could otherwise contain any number of calls that take the whole time."""
    start = time.monotonic()
    found, tools = answers(module, *[call_of("loops", {"text": ""})] * 50)
    assert time.monotonic() - start < 10 * SECONDS
    assert len(found) == tools.num_failures == 50


def children() -> set[str]:
    """Return the child processes of this one, also those that have ended and were not waited for."""
    found = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            if stat.read_text().rpartition(")")[2].split()[1] == str(os.getpid()):
                found.add(stat.parent.name)
    return found


def test_processes_of_a_call_end_with_it(module, tmp_path):
    path, before = tmp_path / "pid", children()
    answers(module, call_of("starts", {"text": str(path)}))
    assert ends(int(path.read_text()))
    assert children() == before  # none is left to be waited for


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("from json import dumps\n_a = 1", "functions"),
        ("def f(a):\n    '''F.\n\n    Args:\n        a: A.\n    '''", "f cannot a"),
        ("def f(a: int):\n    '''F.'''", "f cannot a"),
    ],
)
def test_a_file_that_does_not_describe_tools_is_refused(tmp_path, source, words):
    path = tmp_path / "tools.py"
    module = import_plugin(path, source.encode())

    def describe() -> None:
        for name, tool in tools_of(module, path).items():
            schema_of(name, tool, path)

    with pytest.raises(UserError, match=naming(f"--tools {words}")):
        describe()
