"""Compile functions that fuse many operations on a GPU. On a CPU they run uncompiled (`runtime/cpu.py`)."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch

MAX_VERSIONS = 64
"""Compiled versions of one function. A run needs about six of `rope.rotate` (queries, keys, with and without
gradients, one row or several); at torch's own limit of 8 it silently stops compiling."""

Function = TypeVar("Function", bound=Callable[..., Any])


def compiled(function: Function) -> Function:
    """Compile a function at its first call, for tensors of any length: rows differ from micro-batch to micro-batch."""
    return torch.compile(function, dynamic=True)  # type: ignore[return-value]


def raise_version_limit() -> None:
    """Let this process keep `MAX_VERSIONS` versions of a compiled function; a second call changes nothing."""
    torch._dynamo.config.recompile_limit = MAX_VERSIONS
