"""Run the steps of `speedup` and `adapt`.

Each step is a command of swiftlite in a separate process; the command is printed before it runs.
"""

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from swiftlite.args.commands import AdaptArgs, SpeedupArgs
from swiftlite.base.errors import UserError
from swiftlite.base.log import logger
from swiftlite.improve.resumable import Resumable
from swiftlite.runtime.parent import exit_with_parent

SECONDS_BETWEEN_WRITES = 5


@dataclass(frozen=True)
class CommandStep:
    """One command.

    Attributes:
        name: name in the file of the state.
        words: words of the command line after `swiftlite`.
        result: file that exists once the command has succeeded.
        is_atomic: whether an existing result proves that the command has succeeded. Such a command must not run twice,
            because it fails if its result exists.
    """

    name: str
    words: tuple[str, ...]
    result: Path
    is_atomic: bool = False

    def __str__(self) -> str:
        return shlex.join(("swiftlite", *self.words))


def model_words(args: SpeedupArgs | AdaptArgs, model: str, torch_dtype: str) -> list[str]:
    """Return the options of a command that name a model and state how it is read."""
    words = ["--model", model, "--torch_dtype", torch_dtype]
    if args.trust_remote_code:
        words += ["--trust_remote_code", "true"]
    if args.chat_template_kwargs:
        words += ["--chat_template_kwargs", json.dumps(args.chat_template_kwargs)]
    return words


def export_step(name: str, directory: Path) -> CommandStep:
    """Return the command that exports the run in `directory` / "run" to `directory` / "hf", as the step NAME/export."""
    output = directory / "hf"
    words = ("export", "--to_hf", "--model", str(directory / "run"), "--output_dir", str(output))
    return CommandStep(f"{name}/export", words, output / "config.json", is_atomic=True)


def is_complete(step: CommandStep, progress: Resumable) -> bool:
    """Return whether a step has run, and its result still exists."""
    return step.name in progress.seconds and step.result.exists()


def run_step(step: CommandStep, progress: Resumable, directory: Path) -> None:
    """Run a step unless it is complete, and record its duration, including the duration of interrupted attempts.

    An interrupted step runs again. All commands resume from their files, except `bench`, which starts from the
    beginning.

    Raises:
        UserError: the command failed.
    """
    if is_complete(step, progress):
        return
    before = progress.unfinished.pop(step.name, 0.0)
    if step.is_atomic and step.result.exists():  # killed before the state was written
        progress.seconds[step.name] = before
        progress.write(directory)
        return
    logger.info("$ %s", step)
    start = time.monotonic()

    def keep_time() -> None:
        progress.unfinished[step.name] = round(before + time.monotonic() - start, 1)
        progress.write(directory)

    code = _run(step.words, keep_time)
    progress.unfinished.pop(step.name, None)
    if code < 0:
        hint = "was the memory exhausted? Run the same command again to resume: completed steps are kept"
        raise UserError(f"the step {step.name} was ended by {signal.Signals(-code).name}: {step}", hint)
    if code or not step.result.exists():
        hint = "fix the cause above and run the same command again: completed steps are kept"
        raise UserError(f"the step {step.name} failed with exit code {code}: {step}", hint, max(code, 1))
    progress.seconds[step.name] = round(before + time.monotonic() - start, 1)
    progress.write(directory)


def _run(words: Sequence[str], keep_time: Callable[[], None]) -> int:
    """Run a command of swiftlite, and return its exit code. If this process ends, the command receives SIGTERM.

    Args:
        keep_time: function called every few seconds. It stores the time so far, so that kill -9 loses little of it.
    """
    stops_with_parent = partial(exit_with_parent, os.getpid(), signal.SIGTERM)
    process = subprocess.Popen([sys.executable, "-m", "swiftlite", *words], preexec_fn=stops_with_parent)
    try:
        while True:
            with suppress(subprocess.TimeoutExpired):
                return process.wait(timeout=SECONDS_BETWEEN_WRITES)
            keep_time()
    except BaseException:  # a signal; after Ctrl-C the command has received it as well
        process.terminate()
        process.wait()
        raise
