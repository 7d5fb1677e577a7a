"""Run reward functions in a child process, so that a function that hangs or crashes does not stop the training.

The child exchanges JSON with this process (`rewards/child.py`) and imports torch only if the user's functions do. Its
stdout is this process's stderr. The child is not a sandbox.
"""

import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Any, Self

from swiftlite.base.errors import UserError
from swiftlite.rewards.child import ASYNC_PATIENCE, LOAD_SECONDS, late
from swiftlite.rewards.load import ARGUMENTS, NOT_COLUMNS, RewardInfo, read_plugin
from swiftlite.rewards.models import identity_of
from swiftlite.rewards.settings import RewardSettings

FAILURES_TO_END = 3
"""Failed calls of one function in a row that end the run."""
PATIENCE = 5.0
"""Seconds after which a child that should have ended by its own time limit is killed, for example a stopped process."""
MAX_MESSAGE = 1 << 28
"""Bytes of the longest message of a child."""
CLOSING_SECONDS = 2.0
"""Seconds after which a child is killed that does not end although the socket is closed."""

Scores = list[float | None]


@dataclass(frozen=True)
class Scored:
    """The result of one call of all functions.

    Attributes:
        rewards: for each function, the score of each completion; None where it did not score one or failed.
        failures: one line for each function that failed, and for a child that ended between calls.
        metrics: the mean of the values that functions logged for each name.
    """

    rewards: list[Scores]
    failures: list[str]
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Failure:
    """The reason why the user's code failed, written to follow its name, with the traceback."""

    reason: str
    traceback: str = ""


class UserProcess:
    """The user's files in a child process, which starts when the context is entered.

    A child that hangs or ends is replaced. The new child executes the user's files again, as they were at the start, so
    their global variables have their initial values.

    Args:
        module: the module that the child executes, which calls `child.main`.
        paths: the user's files.
    """

    def __init__(self, module: str, paths: Iterable[str | Path]):
        self._module = module
        self.paths = [str(Path(path).expanduser().absolute()) for path in paths]
        self._child: Child | None = None

    @cached_property
    def _sources(self) -> list[bytes]:
        """Contents of the user's files, read once: a child that replaces another one executes the same code."""
        return [read_plugin(Path(path)) for path in self.paths]

    def __enter__(self) -> Self:
        """Start the child.

        Raises:
            UserError: a file or a function cannot be used.
        """
        self._open()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._child is not None:
            self._child.end(CLOSING_SECONDS)  # the user's `atexit` functions are executed first
            self._child = None

    def _open(self) -> "Child":
        """Return the child; start it if necessary.

        Raises:
            UserError: a file or a function cannot be used.
        """
        if self._child is None:
            sources = [source.decode("latin-1") for source in self._sources]  # JSON has no bytes
            child = Child(self._module)
            self._load(child, sources)
            self._child = child
        return self._child

    def _load(self, child: "Child", sources: list[str]) -> None:
        """Send the first request to a new child, with the contents of the user's files, and read the answer."""
        raise NotImplementedError

    def _end_child(self, error: Exception, if_late: str) -> Failure:
        """Kill the child, and return why it ended, as `Child.end_after` does."""
        assert self._child is not None
        child, self._child = self._child, None
        return child.end_after(error, if_late)


class RewardProcess(UserProcess):
    """The functions of `--reward_funcs` in a child process. Without functions there is no child.

    The thread that enters the context or calls `score` must not end before the context does: Linux reports the end of
    this thread to the child as the end of the parent.

    Args:
        names: names of functions, then of reward models and of servers, in the order of the results.
        plugins: the user's files (`--external_plugins`).
        settings: the time limit of a call, the settings of named functions, and the directories of reward models.

    Attributes:
        rewards: descriptions of the functions, known when the context is entered.
    """

    def __init__(
        self,
        names: Sequence[str],
        plugins: Sequence[str | Path] = (),
        settings: RewardSettings | None = None,
    ):
        super().__init__("swiftlite.rewards.child", plugins)
        self.names = tuple(names)
        self.settings = settings or RewardSettings()
        self.rewards: list[RewardInfo] = []
        self._last_failures: list[list[Failure]] = [[] for _ in names]
        self._logged: dict[str, list[float]] = {}

    @property
    def identity(self) -> dict[str, Any]:
        """Names, settings and digests of files and models that scores depend on, as JSON values. The modules that the
        files import are not included. The models of servers are known when the context is entered."""
        files = [hashlib.sha256(source).hexdigest() for source in self._sources]
        settings = asdict(self.settings)
        for name in ("timeout", "reward_models", "reward_servers", "trust_remote_code"):
            del settings[name]
        served = [reward.source for reward in self.rewards if reward.option == "--reward_server"]
        models = [*self._models, *served]
        models = {"models": models} if models else {}  # absent in generations of earlier releases
        return {"names": list(self.names), "files": files, **settings, **models}

    @cached_property
    def _models(self) -> list[str]:
        """Digests of the reward models."""
        return list(map(identity_of, self.settings.reward_models))

    def __enter__(self) -> Self:
        if self.names:
            self._open()
        return self

    def check_columns(
        self, columns: Collection[str], flag: str = "--dataset", omitted: Mapping[str, str] | None = None
    ) -> None:
        """Check that a dataset has the columns that the functions name in their signatures.

        Args:
            flag: the option that names the dataset, for errors.
            omitted: types of values that cannot be passed to functions, by the name of their column.

        Raises:
            UserError: a column is missing, cannot be passed, or has the name of another argument.
        """
        for reward in self.rewards:
            check_columns(f"--reward_funcs {reward.name}", reward, NOT_COLUMNS, columns, flag, omitted or {})

    def score(
        self,
        prompts: Sequence[Any],
        completions: Sequence[str],
        completion_ids: Sequence[Sequence[int]],
        columns: Mapping[str, Sequence[Any]],
        step: int,
        prompt_texts: Sequence[str] | None = None,
    ) -> Scored:
        """Call every function, first all coroutine functions together, then the others one after another.

        Args:
            prompts: [completions] text or messages of each completion's prompt.
            completions: [completions] text.
            completion_ids: [completions] token ids of each completion.
            columns: other columns of the dataset, each with one value per completion.
            step: number of the optimizer step.
            prompt_texts: [completions] each prompt as the model reads it; empty texts if None.

        Raises:
            UserError: a required column is missing, or a function failed in this and the two previous calls.
        """
        failures: list[str] = []
        self._logged = {}
        self._open().has_batch = False
        self.check_columns(columns)
        given = {
            "prompts": prompts,
            "prompt_texts": prompt_texts or [""] * len(completions),
            "completions": completions,
            "completion_ids": completion_ids,
            "step": step,
        }
        batch = _encode_batch({**columns, **given}, self.rewards)
        try:
            self._open_with(batch)
        except (OSError, ValueError) as error:
            end = self._end_child(error, late(self.settings.timeout))
            failures.append(f"the process of the reward functions {end.reason} between two calls")

        together = [index for index, reward in enumerate(self.rewards) if reward.is_async]
        number = len(completions)
        results = self._call(together, batch, number) if together else {}
        for index, reward in enumerate(self.rewards):
            if not reward.is_async:
                results |= self._call([index], batch, number)

        rewards: list[Scores] = []
        for index, name in enumerate(self.names):
            result = results[index]
            if isinstance(result, Failure):
                self._last_failures[index].append(result)
                failures.append(f"{name} {result.reason}")
                rewards.append([None] * len(completions))
            else:
                self._last_failures[index].clear()
                rewards.append(result)
        self._check_failures()
        return Scored(rewards, failures, {name: fmean(values) for name, values in self._logged.items()})

    def _call(self, group: Sequence[int], batch: bytes, number: int) -> dict[int, Scores | Failure]:
        """Call the functions with these indices for a number of completions.

        If the child ends, each function that has not returned is called again separately, to find the one that failed.
        """
        results: dict[int, Scores | Failure] = {}
        try:
            child = self._open_with(batch)
            child.send(json.dumps({"call": list(group)}).encode())
            seconds = max(self.rewards[index].time_limit(self.settings.timeout, number) for index in group)
            while len(results) < len(group):
                answer = child.receive(seconds + ASYNC_PATIENCE + PATIENCE)
                failure = Failure(answer.get("failure", ""), answer.get("traceback", ""))
                results[answer["index"]] = answer.get("scores", failure)
                for name, value in answer.get("metrics", ()):
                    self._logged.setdefault(name, []).append(value)
        except (OSError, ValueError, KeyError) as error:
            end = self._end_child(error, late(self.settings.timeout) + " (--reward_timeout)")
            missing = [index for index in group if index not in results]
            if len(missing) == 1:
                results[missing[0]] = end
            else:
                for index in missing:
                    results |= self._call([index], batch, number)
        return results

    def _open_with(self, batch: bytes) -> "Child":
        """Return the child, after it has confirmed that it received the batch.

        The confirmation proves that the child is alive. The socket alone does not: the kernel closes the sockets of a
        killed process only after all its threads have ended.

        Raises:
            OSError, ValueError: the child has ended or does not answer.
            UserError: the child had to be started, and a function or a file cannot be loaded.
        """
        child = self._open()
        if not child.has_batch:
            child.send(batch)
            child.receive(self.settings.timeout + PATIENCE)
            child.has_batch = True
        return child

    def _load(self, child: "Child", sources: list[str]) -> None:
        request = {"names": self.names, "plugins": self.paths, "sources": sources, "settings": asdict(self.settings)}
        answer = child.load(request, f"--external_plugins {' '.join(self.paths)}")
        self.rewards = [RewardInfo(**reward) for reward in answer["rewards"]]

    def _check_failures(self) -> None:
        for reward, failures in zip(self.rewards, self._last_failures, strict=True):
            if len(failures) == FAILURES_TO_END:
                last = failures[-1]
                problem = f"{reward.option} {reward.name}: failed in {FAILURES_TO_END} calls in a row. The last call"
                problem += f" {last.reason}{indented(last.traceback)}"
                where = f"fix the function in {reward.source}" if reward.source else "check the rows of --dataset"
                if reward.option != "--reward_funcs":
                    where = f"check {reward.source}"
                raise UserError(problem, f"{where}, and run the same command with --resume")


class Child:
    """A child process of user code, with a socket for messages and a file in which faulthandler leaves tracebacks.

    Args:
        module: the module that the process executes, which calls `child.main`.

    Attributes:
        has_batch: whether the child has received the current batch.
    """

    def __init__(self, module: str) -> None:
        self.has_batch = False
        self._socket, theirs = socket.socketpair()
        self._received = bytearray()
        self._traces = tempfile.TemporaryFile()  # noqa: SIM115, closed by `end`
        numbers = (theirs.fileno(), self._traces.fileno())
        words = [sys.executable, "-u", "-m", module, *map(str, numbers), str(os.getpid())]
        with theirs:
            self._process = subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL,
                stdout=2,
                pass_fds=numbers,
                start_new_session=True,  # so that processes started by functions are killed with it
            )

    def load(self, request: Mapping[str, Any], given: str) -> dict[str, Any]:
        """Send the first request, with the user's files, and return the answer.

        Args:
            given: the option that names the files, with its value, for errors.

        Raises:
            UserError: the process cannot load them; it has ended.
        """
        try:
            self.send(json.dumps(request).encode())
            answer = self.receive(LOAD_SECONDS + PATIENCE)
        except (OSError, ValueError) as error:
            end = self.end_after(error, late(LOAD_SECONDS))
            problem = f"{given}: importing {end.reason}{indented(end.traceback)}"
            raise UserError(problem, "fix the cause above and run the same command again", exit_code=2) from None
        if "error" in answer:
            self.end(CLOSING_SECONDS)
            problem, hint = answer["error"]
            raise UserError(problem, hint, exit_code=2)
        return answer

    def send(self, line: bytes) -> None:
        """Send a message.

        Raises:
            OSError: the child has ended, or does not read.
        """
        self._socket.settimeout(PATIENCE)
        self._socket.sendall(line + b"\n")

    def receive(self, seconds: float) -> dict[str, Any]:
        """Wait for a message.

        Raises:
            OSError: the child has ended; a TimeoutError if it did not send a message in time.
            ValueError: the message is not a JSON object.
        """
        end = time.monotonic() + seconds
        while b"\n" not in self._received:
            self._socket.settimeout(max(end - time.monotonic(), 0.001))
            part = self._socket.recv(1 << 20)
            if not part:
                raise ConnectionError("the child has ended")
            self._received += part
            if len(self._received) > MAX_MESSAGE:
                raise ValueError("the message is too long")
        line, _, self._received = self._received.partition(b"\n")
        message = json.loads(line)
        if not isinstance(message, dict):
            raise ValueError("not a message of the child")
        return message

    def end_after(self, error: Exception, if_late: str) -> Failure:
        """Kill the child, and return why it ended.

        Args:
            error: the error of the last `send` or `receive`: a TimeoutError if the child did not answer in time.
            if_late: reason of the failure if the child exceeded its time limit.
        """
        is_late = isinstance(error, TimeoutError)
        code, traces = self.end(0.0 if is_late else CLOSING_SECONDS)
        if is_late or traces.startswith("Timeout"):
            return Failure(if_late, traces)
        if code is None:
            return Failure("closed the socket of its process", traces)
        if code < 0:
            reason = f"was ended by {signal.Signals(-code).name}"
            return Failure(reason + " (out of memory?)" * (code == -signal.SIGKILL), traces)
        return Failure(f"ended its process with exit code {code}", traces)

    def end(self, seconds: float) -> tuple[int | None, str]:
        """Close the socket, and kill the child and the processes that it started.

        Args:
            seconds: time that the child has to end by itself.

        Returns:
            its exit code, None if it had to be killed; and the text that faulthandler wrote.
        """
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # a forked process of this one may have the socket, too
        self._socket.close()
        code = None
        with suppress(subprocess.TimeoutExpired):
            code = self._process.wait(seconds)
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        with self._traces:
            self._traces.seek(0)
            return code, self._traces.read().decode(errors="replace").strip()


def check_columns(
    given: str,
    info: RewardInfo,
    arguments: Sequence[str],
    columns: Collection[str],
    flag: str,
    omitted: Mapping[str, str],
) -> None:
    """Check that a dataset has the columns that a function of the user names, as `RewardProcess.check_columns` does.

    Args:
        given: the option that names the function, with its value, for errors.
        arguments: names of its arguments that are not columns.
    """
    for name in info.named:
        problem = f"{given}: {flag}: the column {name}"
        if name in omitted:
            problem += f" has values of type {omitted[name]}, which JSON cannot represent"
            raise UserError(problem, f"convert {name} to text or numbers")
        if name in arguments and name in columns:
            problem += " has the name of an argument that is not a column"
            raise UserError(problem, f"rename the column; other names than {', '.join(arguments)} are free")
    for group in info.columns:
        if not set(group) & set(columns):
            problem = f"{given}: {flag} does not have the column {' or '.join(group)}"
            raise UserError(problem, f"its other columns: {', '.join(sorted(columns)) or 'none'}")


def _encode_batch(batch: Mapping[str, Any], rewards: Sequence[RewardInfo]) -> bytes:
    """Return the message with a batch, without columns that no function accepts.

    Raises:
        UserError: a column has a value that JSON does not have, such as a date.
    """
    wanted = set(ARGUMENTS)
    for reward in rewards:
        wanted |= set(batch) if reward.takes_all else set(reward.named)
    texts = []
    for name in [name for name in batch if name in wanted]:
        try:
            texts.append(f"{json.dumps(name)}: {json.dumps(batch[name])}")
        except (TypeError, ValueError) as error:
            problem = f"--dataset: the column {name} cannot be passed to reward functions as JSON: {error}"
            raise UserError(problem, f"convert {name} to text or numbers, or remove it") from None
    return f'{{"batch": {{{", ".join(texts)}}}}}'.encode()


def indented(traceback: str) -> str:
    """Return a traceback as the end of an error."""
    return "".join(f"\n    | {line}" for line in traceback.splitlines())
