"""Run the conversations of a generation in a separate process, as requested by an `EpisodeProcess`.

    python -m swiftlite.rollouts.episodes SOCKET TRACES PARENT

An episode is a call of the user's rollout function, or of `use_tools`, for one prompt. All episodes of a generation run
at the same time as coroutines. The arguments are those of `rewards/child.py`. Messages are lines of JSON:

    parent  {"rollout_func", "tools", "paths", "sources", "timeout"}            once
    child   {"info", "schemas"}, or {"error": [problem, hint]}                  once
    parent  {"episodes": [{"messages", a column, ...}, ...]}
    child   {"episode", "messages", "max_tokens"}                               the episode waits for an answer
    child   {"episode", "done": messages}, or {"episode", "failure", "traceback"}
    child   {}                                                                  regularly, while an episode computes
    parent  {"answers": [[episode, message], ...], "ended": [episodes that get no answer]}
    parent  {"finish": true}                                                    when all episodes have ended
    child   {"calls", "failures"}                                               of tools

If the event loop is blocked for longer than the time limit, faulthandler writes the traceback and ends this process.
"""

import asyncio
import faulthandler
import json
import socket
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from swiftlite.base.errors import UserError
from swiftlite.rewards.child import ASYNC_PATIENCE, LOAD_SECONDS, Server, failure_of, late, main
from swiftlite.rewards.load import LoadedReward, describe, import_plugin

OWN = ("messages", "generate")
"""Arguments of a rollout function that are not columns."""
MAX_REQUEST = 1 << 28
"""Bytes of the longest message of the parent."""
BLOCKED = 1.25
"""Time limit of a blocked event loop, as a multiple of the time limit of a step."""


class _Episodes(Server):
    """The user's functions, and the episodes of the current generation."""

    def __init__(self, channel: socket.socket, traces: int):
        super().__init__(channel, traces)
        self.seconds = 0.0
        self.episodes: list[_Episode] = []
        self.rollout: LoadedReward | None = None
        self.tools: Any = None  # `Tools`, whose import takes a second
        self._writer: asyncio.StreamWriter
        self._reporter: asyncio.Task
        self._tasks: list[asyncio.Task] = []

    def serve(self) -> None:
        """Answer requests until the parent closes the socket."""
        with suppress(ConnectionError), asyncio.Runner() as runner:
            runner.run(self._serve())

    def send(self, message: Mapping[str, Any]) -> None:
        """Send a message to the parent, without waiting until it is read."""
        self._writer.write(json.dumps(message).encode() + b"\n")

    async def _serve(self) -> None:
        # asyncio's limit of 64 KiB per line is too small for the conversations of a generation.
        reader, self._writer = await asyncio.open_connection(sock=self.channel, limit=MAX_REQUEST)
        # The import of a user's file can hang.
        self.limit_time(LOAD_SECONDS)
        try:
            self.send(self._load(json.loads(await reader.readline())))
        except UserError as error:
            self.send({"error": [error.problem, error.hint]})
            await self._writer.drain()
            return
        faulthandler.cancel_dump_traceback_later()
        while line := await reader.readline():
            request = json.loads(line)
            if "episodes" in request:
                self.episodes = [_Episode(self, *each) for each in enumerate(request["episodes"])]
                self._reporter = asyncio.create_task(self._report())
                # Kept in a list, because asyncio holds only weak references to tasks.
                self._tasks = [asyncio.create_task(episode.run()) for episode in self.episodes]
            elif "answers" in request:
                for number, message in request["answers"]:
                    self.episodes[number].answer(message)
                for number in request["ended"]:
                    self.episodes[number].end()
                    self._tasks[number].cancel()
            else:
                await self._finish()
        self.is_closed = True

    def _load(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Import the user's files, and return their description.

        Raises:
            UserError: a function cannot be used.
        """
        self.seconds = request["timeout"]
        paths = [Path(path) for path in request["paths"]]
        modules = [
            # The bytes of the file, sent as JSON: latin-1 has one character for each byte.
            import_plugin(path, source.encode("latin-1"))
            for path, source in zip(paths, request["sources"], strict=True)
        ]
        if request["tools"]:
            from swiftlite.rollouts.tools import Tools, schema_of, tools_of

            functions = tools_of(modules[0], paths[0])
            self.tools = Tools(functions, self.seconds)
            return {"schemas": [schema_of(name, tool, paths[0]) for name, tool in functions.items()]}
        name = request["rollout_func"]
        found = [path for path, module in zip(paths, modules, strict=True) if callable(vars(module).get(name))]
        if len(found) != 1:
            problem = f"--rollout_func {name}: {len(found)} files of --external_plugins define this function"
            raise UserError(problem, f"define it in one file: async def {name}(messages, generate)", exit_code=2)
        function = getattr(modules[paths.index(found[0])], name)
        self.rollout = describe(name, function, str(found[0]), option="--rollout_func", own=OWN)
        info = self.rollout.info
        if not info.is_async or not (info.takes_all or set(OWN) <= set(info.named)):
            problem = f"--rollout_func {name}: {found[0]} does not define it as async def {name}(messages, generate)"
            raise UserError(problem, "use `async def`, with both arguments", exit_code=2)
        return {"info": asdict(info), "schemas": []}

    async def _report(self) -> None:
        """Say regularly that the event loop is not blocked."""
        while True:
            # Set again in each round; a blocked loop does not get here, and the process ends with a traceback.
            self.limit_time(BLOCKED * self.seconds)
            if any(episode.computes for episode in self.episodes):
                self.send({})
            await asyncio.sleep((BLOCKED - 1) * self.seconds)

    async def _finish(self) -> None:
        self._reporter.cancel()
        await asyncio.wait(self._tasks, timeout=ASYNC_PATIENCE)  # a coroutine can refuse to end
        faulthandler.cancel_dump_traceback_later()
        counts = {"calls": 0, "failures": 0}
        if self.tools is not None:
            counts = {"calls": self.tools.num_calls, "failures": self.tools.num_failures}
            self.tools.num_calls = self.tools.num_failures = 0
        self.send(counts)


class _Episode:
    """A conversation.

    Args:
        row: the prompt's messages and the columns of its row.

    Attributes:
        computes: whether the user's function is running, instead of waiting for an answer.
    """

    def __init__(self, server: _Episodes, number: int, row: Mapping[str, Any]):
        self.computes = True
        self._server = server
        self._number = number
        self._row = row
        self._waits: asyncio.Future | None = None
        self._is_ended = False
        # Calls of tools have time limits of their own.
        self._clock = asyncio.timeout(None if server.tools else server.seconds)

    def answer(self, message: Mapping[str, Any]) -> None:
        """Give the answer that the episode waits for."""
        if self._waits is not None and not self._waits.done():
            self.computes = True
            self._waits.set_result(message)

    def end(self) -> None:
        """Give no further answers, because the conversation has reached a limit."""
        self._is_ended, self.computes = True, False

    async def run(self) -> None:
        """Run the user's function, and report its result."""
        server = self._server
        result: Mapping[str, Any]
        try:
            async with self._clock:
                if server.rollout is None:
                    done = await use_tools(self._row["messages"], self._generate, server.tools.answer)
                else:
                    arguments = server.rollout.arguments({**self._row, "generate": self._generate})
                    done = await server.rollout.function(**arguments)
            result = {"done": done}
            # Here, where an error counts as one of the episode; in `send` it would end the process.
            json.dumps(result)
        except BaseException as error:  # also sys.exit()
            result = failure_of(error)
            if self._clock.expired():
                result["failure"] = late(server.seconds) + " (--tool_timeout)"
        self.computes = False
        # The parent has removed an ended episode, and does not expect a message of it.
        if not self._is_ended:
            server.send({"episode": self._number, **result})

    async def _generate(self, messages: Sequence[Mapping[str, Any]], *, max_tokens: int | None = None) -> Any:
        """Return the message that the model answers. This is the argument `generate` of rollout functions."""
        if self._is_ended:  # the function has caught the CancelledError; another one could make it loop forever
            await asyncio.get_running_loop().create_future()
        if self._waits is not None:
            raise RuntimeError("generate was called before its last call returned")
        self._waits = asyncio.get_running_loop().create_future()
        self._server.send({"episode": self._number, "messages": messages, "max_tokens": max_tokens})
        self.computes = False
        self._limit(None)
        try:
            return await self._waits
        finally:
            self._waits = None
            self._limit(self._server.seconds)

    def _limit(self, seconds: float | None) -> None:
        """Set the time limit of the user's function; None while it waits for an answer."""
        if self._server.tools or self._clock.expired():
            return
        self._clock.reschedule(None if seconds is None else asyncio.get_running_loop().time() + seconds)


async def use_tools(
    messages: Sequence[Any],
    generate: Callable[[Sequence[Any]], Awaitable[Mapping[str, Any]]],
    answer: Callable[[Sequence[Any]], Awaitable[Sequence[Any]]],
) -> Sequence[Any]:
    """Generate answers, and answer their tool calls, until an answer has none.

    Args:
        answer: executes calls, and returns their messages.
    """
    while True:
        message = await generate(messages)
        messages = [*messages, message]
        if not message.get("tool_calls"):
            return messages
        messages = [*messages, *await answer(message["tool_calls"])]


if __name__ == "__main__":
    main(_Episodes, *map(int, sys.argv[1:]))
