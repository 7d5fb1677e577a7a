"""Compile functions that fuse many operations on a GPU. On a CPU they run uncompiled (`runtime/cpu.py`)."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import torch

MAX_VERSIONS = 64
"""Maximum number of compiled versions of one function. A run needs about six of `rope.rotate` (queries, keys, with and
without gradients, one row or several); at torch's default limit of 8, torch silently stops compiling.
"""

Function = TypeVar("Function", bound=Callable[..., Any])


def compiled(function: Function, static: Sequence[int] = ()) -> Function:
    """Compile a function at its first call, with dynamic shapes, because the length of rows varies.

    Args:
        static: for each of the first arguments, which are tensors, the number of last dimensions whose sizes are the
            same in a whole run. A kernel with a dynamic number of channels divides by it several times per element, and
            its loads are narrow, because rows may start anywhere.
    """
    with_any_shape: Any = torch.compile(function, dynamic=True)
    if not static:
        return with_any_shape

    @functools.wraps(function)
    def call(*args: Any) -> Any:
        for tensor, number in zip(args, static, strict=False):
            torch._dynamo.mark_static(tensor, list(range(tensor.dim() - number, tensor.dim())))
        return with_any_shape(*args)

    return cast(Function, call)


def raise_version_limit() -> None:
    """Set torch's limit of compiled versions per function to `MAX_VERSIONS` for this process. May be called several
    times.
    """
    torch._dynamo.config.recompile_limit = MAX_VERSIONS
