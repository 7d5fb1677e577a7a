"""Stop a run when it receives SIGTERM, SIGHUP or Ctrl-C: after a training step, or in long work before a step."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from swiftlite.base.log import logger

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Stopped(BaseException):
    """The run was asked to stop before the step started, for example while completions were generated.

    Not an Exception, so that libraries do not catch it.
    """


class StopSignals:
    """Defers SIGTERM, SIGHUP and Ctrl-C until the end of the training step.

    A second Ctrl-C ends the process immediately.

    A second SIGTERM is deferred as well, because a rank can receive one signal twice: SLURM sends it to every process,
    and the launcher forwards the signal that it received.
    """

    def __init__(self):
        self.received = 0
        self._previous = {}

    def __enter__(self) -> "StopSignals":
        for number in SIGNALS:
            if number == signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN:
                continue  # nohup: the run continues without its terminal
            self._previous[number] = signal.signal(number, self._remember)
        return self

    def _remember(self, number: int, frame: FrameType | None) -> None:
        self.received = number
        if number == signal.SIGINT:
            signal.signal(number, self._previous[number])
            logger.warning("stopping and saving after this step; press Ctrl-C again to stop without saving")

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)


@contextmanager
def handled_later() -> Iterator[None]:
    """Handle signals that are received in this context when it ends, for work that all ranks do together."""
    received: list[int] = []
    previous = {number: signal.getsignal(number) for number in SIGNALS if callable(signal.getsignal(number))}
    for number in previous:
        signal.signal(number, lambda number, frame: received.append(number))
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
        for number in received:
            signal.raise_signal(number)


class EarlyStop:
    """Ends parts of the work in this context at a signal, in addition to what the previous handlers do.

    Attributes:
        received: whether a signal was received in this context.
    """

    def __init__(self):
        self.received = False
        self._raises = False
        self._previous = {}

    def __enter__(self) -> "EarlyStop":
        for number in SIGNALS:
            handler = signal.getsignal(number)
            if callable(handler):
                self._previous[number] = handler
                signal.signal(number, self._remember)
        return self

    @contextmanager
    def raising(self) -> Iterator[None]:
        """End the work in this inner context.

        Raises:
            Stopped: a signal is received, or was received before.
        """
        self._raises = True
        try:
            if self.received:
                raise Stopped
            yield
        finally:
            self._raises = False

    def _remember(self, number: int, frame: FrameType | None) -> None:
        self.received = True
        self._previous[number](number, frame)
        if self._raises:
            raise Stopped

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._previous.items():
            if signal.getsignal(number) == self._remember:  # the previous handler may have set another one
                signal.signal(number, handler)
