"""Find and run programs that have a separate virtual environment.

Some programs require other releases of packages than the engines. This module does not import torch.
"""

import os
import shlex
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from swiftlite.base.log import write_line
from swiftlite.runtime.parent import exit_with_parent

LINES_TO_SHOW = 15
SECONDS_BETWEEN_PROGRESS = 10


@dataclass(frozen=True)
class SeparateEnvironment:
    """A virtual environment for one program.

    Attributes:
        distribution: name of the program's package, which is also the name of the default directory in this
            environment.
        variable: environment variable with which a user can name another directory.
    """

    distribution: str
    variable: str

    @property
    def directory(self) -> Path:
        """Directory of the virtual environment, which may not exist."""
        return Path(os.environ.get(self.variable) or Path(sys.prefix) / self.distribution).absolute()

    @property
    def interpreter(self) -> Path:
        """The Python of the environment, which may not exist."""
        return self.directory / "bin" / "python"

    @property
    def is_installed(self) -> bool:
        """Whether the environment contains the program."""
        packages = self.directory.glob(f"lib/python*/site-packages/{self.distribution}-*.dist-info")
        return self.interpreter.exists() and any(packages)

    def install_command(self, packages: Sequence[str]) -> str:
        """Return the shell command that creates the environment with these packages."""
        venv = shlex.quote(str(self.directory))
        return f"{shlex.quote(sys.executable)} -m venv {venv} && {venv}/bin/pip install {shlex.join(packages)}"


@dataclass(frozen=True)
class Ended:
    """A process that has ended: its exit code, negative for a signal, and the last lines of its output."""

    code: int
    lines: Sequence[str]

    @property
    def tail(self) -> str:
        """The last lines in the form of an error message."""
        return "".join(f"\n    | {line}" for line in self.lines)


def run_separately(
    command: Sequence[str],
    label: str,
    variables: Mapping[str, str],
    *,
    is_shown: Callable[[str], bool],
    directory: Path | None = None,
) -> Ended:
    """Run a command and print its output. If this process ends, the other process is killed.

    Args:
        label: name of the program, before each line.
        variables: additional environment variables.
        is_shown: whether a line is printed. Lines of progress bars are printed at intervals.
        directory: current directory of the program. Default: that of this process.
    """
    process = subprocess.Popen(
        command,
        cwd=directory,
        env={**os.environ, **variables},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        encoding="utf-8",
        errors="replace",
        preexec_fn=partial(exit_with_parent, os.getpid()),
    )
    lines: deque[str] = deque(maxlen=LINES_TO_SHOW)
    assert process.stdout is not None
    try:
        shown_at = 0.0
        for line in filter(None, map(str.rstrip, process.stdout)):
            is_progress = "%|" in line
            if not is_progress:
                lines.append(line)
            elif time.monotonic() < shown_at + SECONDS_BETWEEN_PROGRESS:
                continue
            else:
                shown_at = time.monotonic()
            if is_shown(line):
                write_line(f"{label}: {line}")
        return Ended(process.wait(), lines)
    except BaseException:
        process.kill()
        process.wait()
        raise
