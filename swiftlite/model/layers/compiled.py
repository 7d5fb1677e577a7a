"""Compile functions that fuse many operations on a GPU. On a CPU they run uncompiled (`runtime/cpu.py`)."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch

MAX_VERSIONS = 64
"""Maximum number of compiled versions of one function. A run needs about six of `rope.rotate` (queries, keys, with and
without gradients, one row or several); at torch's default limit of 8, torch silently stops compiling.
"""

Function = TypeVar("Function", bound=Callable[..., Any])


def compiled(function: Function) -> Function:
    """Compile a function at its first call, with dynamic shapes, because the length of rows varies."""
    return torch.compile(function, dynamic=True)  # type: ignore[return-value]


def raise_version_limit() -> None:
    """Set torch's limit of compiled versions per function to `MAX_VERSIONS` for this process. May be called several
    times.
    """
    torch._dynamo.config.recompile_limit = MAX_VERSIONS
