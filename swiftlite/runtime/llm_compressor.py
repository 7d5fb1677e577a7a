"""Find and run llm-compressor, which `export --quant_method gptq|awq` starts as a separate process.

It requires other releases of transformers and compressed-tensors than the engines, so it has a separate environment.
This module does not import torch.
"""

import signal
from collections.abc import Sequence
from importlib.metadata import version

from swiftlite.base.errors import UserError
from swiftlite.runtime.separate import SeparateEnvironment, run_separately

RELEASE = "0.14.0.1"
LLM_COMPRESSOR = SeparateEnvironment("llmcompressor", "SWIFTLITE_LLMCOMPRESSOR_VENV")
_REFUSED = 3  # exit code of export/oneshot.py


def install_command() -> str:
    """Return the shell command that creates the environment, with the torch of this environment."""
    torch = version("torch").partition("+")[0]  # without the suffix of a build, such as +cpu
    return LLM_COMPRESSOR.install_command([f"torch=={torch}", f"llmcompressor=={RELEASE}"])


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
    # "METRIC" marks the error of each matrix.
    ended = run_separately(command, "llm-compressor", settings, is_shown=lambda line: "| METRIC -" not in line)
    code, lines = ended.code, ended.lines
    if code == 0:
        return
    if code == _REFUSED and lines:
        raise UserError(f"--quant_method {method}: {lines[-1]}", "use --quant_method rtn or fp8")
    if code < 0:
        problem = f"llm-compressor was ended by {signal.Signals(-code).name}; end of its output:{ended.tail}"
        raise UserError(problem, "nothing was written; was the memory exhausted?")
    raise UserError(
        f"llm-compressor failed with exit code {code}; end of its output:{ended.tail}",
        "nothing was written; the last line above is the cause",
    )
