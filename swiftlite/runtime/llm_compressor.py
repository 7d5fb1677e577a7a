"""Find and run llm-compressor, which `export --quant_method gptq|awq` starts as a separate process.

It requires other releases of transformers and compressed-tensors than the engines, so it has a separate environment.
This module does not import torch.
"""

import os
import shlex
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path

from swiftlite.base.errors import UserError
from swiftlite.base.log import write_line
from swiftlite.runtime.parent import exit_with_parent

RELEASE = "0.14.0.1"
VARIABLE = "SWIFTLITE_LLMCOMPRESSOR_VENV"
"""Environment variable with the directory of the virtual environment (default: llmcompressor in this environment)."""
LINES_TO_SHOW = 15
SECONDS_BETWEEN_PROGRESS = 10
_REFUSED = 3  # exit code of export/oneshot.py


def environment() -> Path:
    """Return the directory of the virtual environment, which may not exist."""
    return Path(os.environ.get(VARIABLE) or Path(sys.prefix) / "llmcompressor").absolute()


def interpreter() -> Path:
    """Return the Python of the environment, which may not exist."""
    return environment() / "bin" / "python"


def is_installed() -> bool:
    """Return whether the environment contains llm-compressor."""
    packages = environment().glob("lib/python*/site-packages/llmcompressor-*.dist-info")
    return interpreter().exists() and any(packages)


def install_command() -> str:
    """Return the shell command that creates the environment, with the torch of this environment."""
    venv = shlex.quote(str(environment()))
    torch = version("torch").partition("+")[0]  # without the suffix of a build, such as +cpu
    packages = f"torch=={torch} llmcompressor=={RELEASE}"
    return f"{shlex.quote(sys.executable)} -m venv {venv} && {venv}/bin/pip install {packages}"


def run(command: Sequence[str], method: str) -> None:
    """Run a command with llm-compressor, and print its output. If this process ends, the other process is killed.

    Args:
        method: --quant_method, for errors.

    Raises:
        UserError: it failed.
    """
    settings = {
        "HF_HUB_OFFLINE": "1",
        "LLM_COMPRESSOR_LOG_LEVEL": "WARNING",
        "TRANSFORMERS_VERBOSITY": "error",
    }
    process = subprocess.Popen(
        command,
        env=os.environ | settings,
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
            is_metric = "| METRIC -" in line  # the error of each matrix
            if is_metric or (is_progress and time.monotonic() < shown_at + SECONDS_BETWEEN_PROGRESS):
                continue
            if is_progress:
                shown_at = time.monotonic()
            else:
                lines.append(line)
            write_line(f"llm-compressor: {line}")
        code = process.wait()
    except BaseException:
        process.kill()
        process.wait()
        raise
    if code == 0:
        return
    if code == _REFUSED and lines:
        raise UserError(f"--quant_method {method}: {lines[-1]}", "use --quant_method rtn or fp8")
    tail = "".join(f"\n    | {line}" for line in lines)
    if code < 0:
        problem = f"llm-compressor was ended by {signal.Signals(-code).name}; end of its output:{tail}"
        raise UserError(problem, "nothing was written; was the memory exhausted?")
    raise UserError(
        f"llm-compressor failed with exit code {code}; end of its output:{tail}",
        "nothing was written; the last line above is the cause",
    )
