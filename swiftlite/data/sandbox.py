"""Limit the memory of chat templates, which are untrusted programs.

jinja2's sandbox denies access to Python, files and the network; this module limits memory. Time is not limited, so a
template can run forever. With `--streaming`, rows are rendered in the training process without a memory limit.
"""

import os
import resource
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from swiftlite.base.errors import clip
from swiftlite.data.rows.conversation import RowError

MAX_MEGABYTES = 1000
"""Memory limit of a template in MB; a conversation of ten million characters needs less than a tenth of it."""
MAX_CHARACTERS = 10_000_000
"""Maximum length of a conversation. Tokenizing takes up to 500 bytes per character."""


@contextmanager
def running_the_template() -> Iterator[None]:
    """Convert failures of a chat template to a RowError, such as a division by zero, endless recursion or `'a' *
    10**10`.

    Raises:
        RowError: the template raised an exception, or exceeded MAX_MEGABYTES.
    """
    try:
        with _bounded_memory(MAX_MEGABYTES * 1_000_000):
            yield
    except MemoryError:
        problem = f"the chat template requires more than {MAX_MEGABYTES} MB of memory"
        raise RowError("messages", problem, "read the template before you use this model") from None
    except Exception as error:
        # On a single line, so that a template cannot forge log lines.
        problem = " ".join(str(error).split()) or type(error).__name__
        raise RowError("messages", f"the chat template fails: {clip(problem, 200)}") from None


def check_length(text: str) -> None:
    """Check the length of a conversation before it is tokenized.

    Raises:
        RowError: the conversation has more than MAX_CHARACTERS.
    """
    if len(text) > MAX_CHARACTERS:
        problem = f"have {len(text):,} characters, over the limit of {MAX_CHARACTERS:,}"
        raise RowError("messages", problem, "split the row; tokenizing takes up to 500 bytes per character")


def run_templates_unbounded() -> None:
    """Disable the memory limit in this thread, because the limit would also apply to the training in the same
    process."""
    _thread.is_unbounded = True


@contextmanager
def _bounded_memory(num_bytes: int) -> Iterator[None]:
    """Limit the additional memory of this process; exceeding it raises a MemoryError.

    The kernel enforces the limit, because jinja2 has no hook that covers all expressions that allocate memory ('a' * n,
    'a'.center(n), '%99999d' % 1, x ~ x ~ x ...). The limit works only on Linux. All threads share one limit, which is
    removed by the last thread that leaves the context.
    """
    if sys.platform != "linux" or getattr(_thread, "is_unbounded", False):
        yield
        return
    _limit.enter(num_bytes)
    try:
        yield
    finally:
        _limit.leave()


class _Limit:
    """The memory limit of this process, and the number of threads that use it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_inside = 0
        self._before = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
        self._limit = 0

    def enter(self, num_bytes: int) -> None:
        with self._lock:
            if not self._num_inside:
                self._before = resource.getrlimit(resource.RLIMIT_AS)
                self._limit = 0
            # Each new thread uses address space, so the limit is raised for threads that enter later.
            self._limit = max(self._limit, _address_space() + num_bytes)
            # The user's limit (`ulimit -v`) can be lower.
            bounds = (self._limit, *self._before)
            lowest = min(bound for bound in bounds if bound != resource.RLIM_INFINITY)
            resource.setrlimit(resource.RLIMIT_AS, (lowest, self._before[1]))
            self._num_inside += 1

    def leave(self) -> None:
        with self._lock:
            self._num_inside -= 1
            if not self._num_inside:
                resource.setrlimit(resource.RLIMIT_AS, self._before)


_thread = threading.local()
_limit = _Limit()


def _address_space() -> int:
    """Return the bytes that count towards RLIMIT_AS.

    The function is called several times per row. It does not use `open`, which would take 10 us longer.
    """
    file = os.open("/proc/self/statm", os.O_RDONLY)
    try:
        pages, _, _ = os.read(file, 100).partition(b" ")
    finally:
        os.close(file)
    return int(pages) * resource.getpagesize()
