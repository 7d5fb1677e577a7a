"""Call the user's tools (`--tools`), each call in a forked process with a time limit. Does not import torch.

Completions choose the calls and their arguments, so a call can run forever, end its process or return a huge text. The
fork has the modules and global variables of the user's file as they are after its import; what a call changes is not
seen by other calls.
"""

import asyncio
import inspect
import json
import os
import signal
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from transformers.utils import chat_template_utils

from swiftlite.base.errors import UserError, clip
from swiftlite.rewards.workers import limit_memory
from swiftlite.runtime.parent import exit_with_parent

MAX_OUTPUT = 100_000
"""Characters of a result that are passed on."""
MAX_PROCESSES = 32
"""Calls that run at the same time. Tools often wait for other machines."""


def tools_of(module: ModuleType, path: Path) -> dict[str, Callable[..., Any]]:
    """Return the functions that a file defines, except those with a leading underscore.

    Raises:
        UserError: there are none.
    """
    found = {name: value for name, value in vars(module).items() if inspect.isfunction(value) and name[0] != "_"}
    tools = {name: value for name, value in found.items() if value.__module__ == module.__name__}
    if not tools:
        hint = "define a function with type hints and a docstring with a section Args"
        raise UserError(f"--tools {path} defines no functions", hint, exit_code=2)
    return tools


def schema_of(name: str, tool: Callable[..., Any], path: Path) -> dict[str, Any]:
    """Return the JSON schema of a tool, which follows from its type hints and its docstring in Google's format.

    Raises:
        UserError: a type hint or a part of the docstring is missing.
    """
    try:
        return chat_template_utils.get_json_schema(tool)
    except Exception as error:  # transformers raises several kinds
        hint = "give each argument a type hint and a line in the section Args of the docstring"
        problem = f"--tools {path}: {name} cannot be described: {' '.join(str(error).split())}"
        raise UserError(problem, hint, exit_code=2) from None


@dataclass
class Tools:
    """The tools of a run, with counts of their calls.

    Attributes:
        functions: the tools by name.
        seconds: time limit of a call.
    """

    functions: Mapping[str, Callable[..., Any]]
    seconds: float
    num_calls: int = 0
    num_failures: int = 0
    _free: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(MAX_PROCESSES))

    async def answer(self, calls: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
        """Return one message with the role "tool" for each call, as TRL does: its result, or its error.

        Calls are executed one after another, and not at all after one that exceeded the time limit, because a
        completion could contain any number of such calls.
        """
        messages, is_late = [], False
        for call in calls:
            name = str(call["function"]["name"])
            outcome: Mapping[str, Any] = {"error": "not called, because an earlier call exceeded the time limit"}
            if not is_late:
                outcome = await self._call(name, call)
            is_late = is_late or "late" in outcome
            self.num_calls += 1
            self.num_failures += "error" in outcome
            # The model reads the error and can correct its call, as in TRL.
            content = outcome.get("result", str({"error": outcome.get("error")}))
            messages.append({"role": "tool", "name": clip(name, 100), "content": content})
        return messages

    async def _call(self, name: str, call: Mapping[str, Any]) -> Mapping[str, Any]:
        arguments = call["function"]["arguments"]
        if "error" in call:
            return {"error": call["error"]}
        if name not in self.functions:
            return {"error": f"Tool {clip(name, 100)} not found."}
        if not isinstance(arguments, dict):
            return {"error": "the arguments are not a JSON object"}
        async with self._free:
            return await call_in_time(self.functions[name], arguments, self.seconds)


async def call_in_time(function: Callable[..., Any], arguments: Mapping[str, Any], seconds: float) -> dict[str, Any]:
    """Call a function in a forked process.

    Returns:
        {"result": text} or {"error": text}, with a key "late" if the function exceeded the time limit.
    """
    ours, theirs = socket.socketpair()
    parent, pid = os.getpid(), os.fork()
    if not pid:
        _execute(function, arguments, theirs, parent)
    # With the child's copy as the only one, the reader sees the end of the stream when the child dies.
    theirs.close()
    with suppress(OSError):  # the process does the same, and one of the two is first
        os.setpgid(pid, pid)
    # A character takes up to 12 bytes in JSON.
    reader, writer = await asyncio.open_connection(sock=ours, limit=20 * MAX_OUTPUT)
    try:
        async with asyncio.timeout(seconds):
            answer: dict[str, Any] = json.loads(await reader.readline())
    except TimeoutError:
        answer = {"error": f"no result within {seconds:g} seconds", "late": True}
    except (OSError, ValueError):
        answer = {"error": "the process of the call ended without a result"}
    finally:
        writer.close()
        with suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)  # also processes that the function started
        # Killed processes stay in the table until they are waited for.
        os.waitpid(pid, 0)
    return answer


def _execute(
    function: Callable[..., Any], arguments: Mapping[str, Any], channel: socket.socket, parent: int
) -> NoReturn:
    """Send the result of a function. This is the work of the forked process."""
    try:
        os.setpgid(0, 0)
        # With the id from before the fork, because the parent can have ended in between.
        exit_with_parent(parent)
        limit_memory()
        try:
            result = function(**arguments)
            if inspect.iscoroutine(result):
                result = asyncio.run(result)
            answer = {"result": _cut(str(result))}
        except BaseException as error:  # also sys.exit()
            answer = {"error": _cut(str(error)) or type(error).__name__}
        channel.sendall(json.dumps(answer).encode() + b"\n")
    finally:
        # Without Python's exit handlers and buffers, which are copies of the parent's.
        os._exit(0)


def _cut(text: str) -> str:
    """Return a text of limited length that the tokenizer accepts, without halves of surrogate pairs."""
    if len(text) > MAX_OUTPUT:
        text = text[:MAX_OUTPUT] + "..."
    return text.encode(errors="replace").decode()
