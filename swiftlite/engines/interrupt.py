"""Convert SIGTERM to an exception, so that engines are closed before the process exits."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager


class Terminated(SystemExit):
    """The process received SIGTERM; its exit code is 143, as without a handler."""


@contextmanager
def raises_at_sigterm() -> Iterator[None]:
    """Let SIGTERM, for example from a batch system, end this process like Ctrl-C: its engines are closed first.

    Raises:
        Terminated: at any point of the context, when SIGTERM is received.
    """

    def stop(number: int, frame: object) -> None:
        raise Terminated(128 + number)

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
