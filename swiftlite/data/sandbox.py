"""A chat template is a program that came with a model. The sandbox of jinja2 keeps it from Python, files and network,
this one from taking all memory. Nothing bounds its time: a loop may run for ever. Rows of `--streaming` are rendered
beside training, without a bound on memory.
"""

import os
import resource
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from swiftlite.data.rows.conversation import RowError
from swiftlite.errors import clip

MAX_MEGABYTES = 1000
"""That a template may take; a conversation of ten million characters needs less than a tenth of it."""
MAX_CHARACTERS = 10_000_000
"""Of one conversation. Tokenizing takes up to 500 bytes for each."""


@contextmanager
def running_the_template() -> Iterator[None]:
    """Inside, a chat template may divide by zero, call itself for ever, or multiply a text by 10**10.

    Raises:
        RowError: whatever it raised, or it wanted more than MAX_MEGABYTES.
    """
    try:
        with _bounded_memory(MAX_MEGABYTES * 1_000_000):
            yield
    except MemoryError:
        problem = f"the chat template wants more than {MAX_MEGABYTES} MB of memory"
        raise RowError("messages", problem, "read the template before you use this model") from None
    except Exception as error:
        # On one line: whoever wrote the template must not write lines of ours.
        problem = " ".join(str(error).split()) or type(error).__name__
        raise RowError("messages", f"the chat template fails: {clip(problem, 200)}") from None


def check_length(text: str) -> None:
    """Refuse what no tokenizer should be given.

    Raises:
        RowError: the text of a conversation has more than MAX_CHARACTERS.
    """
    if len(text) > MAX_CHARACTERS:
        problem = f"they are {len(text):,} characters long, and a row may have {MAX_CHARACTERS:,}"
        raise RowError("messages", problem, "split it; tokenizing it whole would take up to 500 bytes a character")


def run_templates_unbounded() -> None:
    """Take no notice of memory in this thread from now on: its process trains, and what bounds a template would bound
    the memory of a step as well."""
    _thread.is_unbounded = True


@contextmanager
def _bounded_memory(num_bytes: int) -> Iterator[None]:
    """Inside, this process may take so much more than it has; what wants more gets a MemoryError.

    The limit is the kernel's, because no hook of jinja2 sees all: 'a' * n, 'a'.center(n), '%99999d' % 1, x ~ x ~ x ...
    Only Linux keeps to it, and says how much a process has. It is one for all threads: those inside share it, and
    the last one to leave takes it away.
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
    """The limit of this process, and how many threads are inside."""

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
            # Each thread that starts takes address space of its own: whoever comes later is given as much as the first.
            self._limit = max(self._limit, _address_space() + num_bytes)
            # The user's own limit (`ulimit -v`) may be lower.
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
    """Bytes that count for RLIMIT_AS. Every row asks several times, and `open` would take 10 microseconds more."""
    file = os.open("/proc/self/statm", os.O_RDONLY)
    try:
        pages, _, _ = os.read(file, 100).partition(b" ")
    finally:
        os.close(file)
    return int(pages) * resource.getpagesize()
