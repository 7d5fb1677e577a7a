"""Find the environment of llm-compressor, which `export --quant_method gptq|awq` starts as a separate process.

It requires other releases of transformers and compressed-tensors than the engines, so it is installed separately.
This module does not import torch.
"""

import os
import shlex
import sys
from importlib.metadata import version
from pathlib import Path

RELEASE = "0.14.0.1"
VARIABLE = "SWIFTLITE_LLMCOMPRESSOR_VENV"
"""Environment variable with the directory of the virtual environment (default: llmcompressor in this environment)."""


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
