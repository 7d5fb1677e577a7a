"""SIGTERM as an exception, so that whoever started an engine can end it first."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager


class Terminated(SystemExit):
    """SIGTERM came; the process ends with 143, as it would have."""


@contextmanager
def ends_at_sigterm() -> Iterator[None]:
    """SIGTERM, a batch system's, ends this process as Ctrl-C does: after what it started.

    Raises:
        Terminated: from wherever the block is.
    """

    def stop(number: int, frame: object) -> None:
        raise Terminated(128 + number)

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
