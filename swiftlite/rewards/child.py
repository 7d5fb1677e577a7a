"""Run reward functions in a separate process, as requested by a `RewardProcess`.

    python -m swiftlite.rewards.child SOCKET TRACES PARENT

The arguments are a file descriptor of a socket, one of a file for tracebacks, and the parent's process id. Messages are
lines of JSON:

    parent  {"names", "plugins", "sources", "settings"}                         once
    child   {"rewards": [...]}, or {"error": [problem, hint]}                   once
    parent  {"batch": {"prompts", "prompt_texts", "completions", "completion_ids", "step", a column, ...}}
    child   {"received": true}
    parent  {"call": [indices of functions]}                                    for the last batch
    child   {"index", "scores", "metrics": [[name, value], ...]}, or {"index", "failure", "traceback"}
                                                                                for each function, when it has returned

If a function exceeds the time limit, faulthandler writes the traceback and ends this process, even if the function is
in a C library.
"""

import asyncio
import atexit
import faulthandler
import json
import marshal
import math
import numbers
import os
import signal
import socket
import sys
from collections.abc import Iterable, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from swiftlite.base.errors import UserError, clip
from swiftlite.rewards.load import Completion, LoadedReward, load_rewards, traceback_of
from swiftlite.rewards.settings import RewardSettings
from swiftlite.runtime.parent import exit_with_parent

LOAD_SECONDS = 600.0
"""Time limit for importing the user's files, which may load a reward model."""
ASYNC_PATIENCE = 1.0
"""Seconds that coroutines have after their time limit to handle the cancellation."""

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""Signals that batch systems and terminals send to all processes of a run, and that the trainer handles."""
MAX_SCORE = 1e18
"""Largest absolute value of a score. Advantages of such scores are finite in float32, also without scaling."""
MAX_TRACEBACK = 20_000
"""Characters of a traceback that are passed on."""


class _InvalidScores(Exception):
    """A function returned something other than one number or None per completion."""


class Server:
    """A child process of user code, with the socket to its parent.

    Args:
        channel: the socket.
        traces: file descriptor to which faulthandler writes.

    Attributes:
        is_closed: whether the parent has closed the socket.
    """

    def __init__(self, channel: socket.socket, traces: int):
        self.channel = channel
        self.traces = traces
        self.is_closed = False

    def serve(self) -> None:
        """Answer requests until the parent closes the socket."""
        raise NotImplementedError

    def end_group(self) -> None:
        """End all processes of this process group, including this one, if the parent has closed the socket."""
        if self.is_closed:
            os.killpg(0, signal.SIGKILL)

    def limit_time(self, seconds: float) -> None:
        """Write the traceback and end this process unless the next call follows in time."""
        faulthandler.dump_traceback_later(seconds, exit=True, file=self.traces)

    def send(self, message: Mapping[str, Any]) -> None:
        """Send a message to the parent."""
        self.channel.sendall(json.dumps(message).encode() + b"\n")


class _RewardServer(Server):
    """The loaded reward functions."""

    def __init__(self, channel: socket.socket, traces: int):
        super().__init__(channel, traces)
        self.rewards: list[LoadedReward] = []
        self.settings = RewardSettings()
        self.batch: dict[str, bytes] = {}
        self.num_completions = 0

    def serve(self) -> None:
        """Answer requests until the parent closes the socket."""
        requests = self.channel.makefile("r", encoding="utf-8")
        if not self._load(json.loads(requests.readline())):
            return
        # One event loop for all calls, because clients are bound to a loop. ConnectionError: the parent has closed the
        # socket without waiting for the answer.
        with suppress(ConnectionError), asyncio.Runner() as runner:
            for line in requests:
                request = json.loads(line)
                if "batch" in request:
                    # As bytes, because a function may change its arguments.
                    self.batch = {name: marshal.dumps(value) for name, value in request["batch"].items()}
                    self.num_completions = len(request["batch"]["completions"])
                    self.send({"received": True})
                    continue
                selected = [(index, self.rewards[index]) for index in request["call"]]
                coroutines = [(index, reward) for index, reward in selected if reward.info.is_async]
                if coroutines:
                    self.limit_time(self.settings.timeout + ASYNC_PATIENCE)
                    runner.run(self._gather(coroutines))
                for index, reward in selected:
                    if not reward.info.is_async:
                        self.limit_time(reward.info.time_limit(self.settings.timeout, self.num_completions))
                        self._call(index, reward)
                faulthandler.cancel_dump_traceback_later()
        self.is_closed = True

    def _load(self, request: Mapping[str, Any]) -> bool:
        self.settings = RewardSettings(**request["settings"])
        self.limit_time(LOAD_SECONDS)
        try:
            plugins = [Path(path) for path in request["plugins"]]
            sources = [source.encode("latin-1") for source in request["sources"]]
            self.rewards = load_rewards(request["names"], plugins, self.settings, sources)
        except UserError as error:
            self.send({"error": [error.problem, error.hint]})
            return False
        faulthandler.cancel_dump_traceback_later()
        self.send({"rewards": [asdict(reward.info) for reward in self.rewards]})
        return True

    def _arguments(self, reward: LoadedReward, metrics: list[tuple[str, float]]) -> dict[str, Any]:
        """Return the arguments of a call.

        Args:
            metrics: the list to which `log_metric` appends.
        """
        arguments = {name: marshal.loads(value) for name, value in reward.arguments(self.batch).items()}
        if "completions" in arguments:
            form = _message if reward.info.takes_messages else Completion
            arguments["completions"] = list(map(form, arguments["completions"]))
        state = SimpleNamespace(global_step=marshal.loads(self.batch["step"]) - 1)
        return arguments | reward.arguments({"trainer_state": state, "log_metric": partial(_log_metric, metrics)})

    def _call(self, index: int, reward: LoadedReward) -> None:
        metrics: list[tuple[str, float]] = []
        try:
            values = reward.function(**self._arguments(reward, metrics))
            scores = _scores(values, self.num_completions)
        except BaseException as error:  # also sys.exit()
            self.send(_failure(index, error))
        else:
            self.send({"index": index, "scores": scores, "metrics": metrics})

    async def _gather(self, coroutines: Sequence[tuple[int, LoadedReward]]) -> None:
        await asyncio.gather(*(self._await(index, reward) for index, reward in coroutines))

    async def _await(self, index: int, reward: LoadedReward) -> None:
        clock = asyncio.timeout(self.settings.timeout)
        metrics: list[tuple[str, float]] = []
        try:
            async with clock:
                values = await reward.function(**self._arguments(reward, metrics))
            scores = _scores(values, self.num_completions)
        except BaseException as error:
            failure = _failure(index, error)
            if clock.expired():
                failure["failure"] = late(self.settings.timeout) + " (--reward_timeout)"
            self.send(failure)
        else:
            self.send({"index": index, "scores": scores, "metrics": metrics})


def _message(text: str) -> list[dict[str, str]]:
    return [{"role": "assistant", "content": text}]


def _log_metric(metrics: list[tuple[str, float]], name: str, value: float) -> None:
    """Append a value of a metric, which can be a tensor or a number of numpy.

    Raises:
        _InvalidScores: it has no name, or is not a finite number.
    """
    if not isinstance(name, str) or not math.isfinite(number := float(value)):
        given = f"log_metric({clip(repr(name), 80)}, {clip(repr(value), 80)})"
        raise _InvalidScores(f"called {given}, which is not a name with a finite number")
    metrics.append((name, number))


def late(seconds: float) -> str:
    """Return the description of a call that exceeded the time limit."""
    return f"did not return within {seconds:g} seconds"


def _scores(values: Any, num_completions: int) -> list[float | None]:
    """Convert the result of a function, which can be a tensor or an array, to a list of numbers and None.

    NaN becomes None, as in TRL.

    Raises:
        _InvalidScores: it is not a sequence of one number or None per completion, or a number is too large.
    """
    if not isinstance(values, Iterable) or isinstance(values, (str, bytes, Mapping, Set)):
        raise _InvalidScores(f"returned an object of type {type(values).__name__} instead of a list")
    scores = [_score(value, position) for position, value in enumerate(values)]
    if len(scores) != num_completions:
        raise _InvalidScores(f"returned {len(scores)} values for {num_completions} completions")
    return scores


def _score(value: Any, position: int) -> float | None:
    if value is None:
        return None
    if not isinstance(value, numbers.Real) and getattr(value, "ndim", None) == 0:
        value = value.item()  # of torch, or a bool of numpy
    if not isinstance(value, numbers.Real):
        shown = clip(repr(value), 80)
        raise _InvalidScores(f"returned {shown}, which is not a number, for completion {position}")
    if math.isnan(value):
        return None
    if math.isinf(value):
        raise _InvalidScores(f"returned {float(value)} for completion {position}; use None for no score")
    if abs(float(value)) > MAX_SCORE:
        raise _InvalidScores(f"returned {float(value):g} for completion {position}; the limit is {MAX_SCORE:g}")
    return float(value)


def _failure(index: int, error: BaseException) -> dict[str, Any]:
    if isinstance(error, _InvalidScores):
        return {"index": index, "failure": str(error), "traceback": ""}
    return {"index": index, **failure_of(error)}


def failure_of(error: BaseException) -> dict[str, str]:
    """Return the reason and the traceback of an exception in the user's code, for a message."""
    text = " ".join(str(error).split())
    reason = f"raised {type(error).__name__}: {clip(text, 200)}" if text else f"raised {type(error).__name__}"
    return {"failure": reason, "traceback": traceback_of(error)[-MAX_TRACEBACK:]}


def _block_signals() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)


def _unblock_signals() -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)


def _restore_signals() -> None:
    """Let a forked process, such as one of a `multiprocessing.Pool`, end by these signals.

    They are blocked during the fork: a signal that reached the new process before this call would be handled by `_stop`
    or be lost, and `Pool.terminate` would wait for the process forever.
    """
    for number in SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    _unblock_signals()


def _stop(parent: int, number: int, frame: object) -> None:
    """End this process group if the parent has ended. Otherwise, the parent decides when this process ends."""
    if os.getppid() != parent:
        os.killpg(0, signal.SIGKILL)


def main(server_class: type[Server], channel: int, traces: int, parent: int) -> None:
    """Serve until the socket is closed, then end all processes of this process group.

    Args:
        server_class: the server of this process.
        channel: file descriptor of the socket.
        traces: file descriptor of the file for tracebacks.
        parent: id of the parent process, which started this process as the leader of a session.
    """
    for number in SIGNALS:
        signal.signal(number, partial(_stop, parent))
    os.register_at_fork(before=_block_signals, after_in_parent=_unblock_signals, after_in_child=_restore_signals)
    exit_with_parent(parent, signal.SIGTERM)
    for number in (channel, traces):
        os.set_inheritable(number, False)
    faulthandler.enable(traces)  # for crashes, such as a segmentation fault in a library
    server = server_class(socket.socket(fileno=channel), traces)
    atexit.register(server.end_group)  # executed after all functions registered later
    server.serve()


if __name__ == "__main__":
    main(_RewardServer, *map(int, sys.argv[1:]))
