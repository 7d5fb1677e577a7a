"""Draw the next generation while the trainer trains on the current one (`--async_rollouts`)."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue

from swiftlite.rollouts.generation import Generation

Draw = Callable[[], Generation]


class DrawingAhead:
    """Draws generations in a thread of the first rank, one at a time.

    The thread stays for the whole run: child processes of reward functions end with the thread that started them
    (PR_SET_PDEATHSIG, prctl(2)). It is a daemon, so that a run that fails does not wait for it.
    """

    def __init__(self) -> None:
        self._tasks: SimpleQueue[tuple[Future[Generation], Draw]] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._number = -1
        self._future: Future[Generation] | None = None

    def begin(self, number: int, draw: Draw) -> None:
        """Begin to draw a generation."""
        assert self._future is None, "the generation before was not taken"
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="rollouts", daemon=True)
            self._thread.start()
        self._number, self._future = number, Future()
        self._tasks.put((self._future, draw))

    def wait(self) -> tuple[int, Generation] | None:
        """Wait for the generation that is drawn, and return its number and the generation, or None without one.

        Raises:
            UserError: the engine or a reward function failed.
        """
        if self._future is None:
            return None
        return self._number, self._future.result()

    def keep(self, number: int, generation: Generation) -> None:
        """Replace the generation that was drawn."""
        # A new future, because the old one already has its result: the generation without scores.
        self._number, self._future = number, Future()
        self._future.set_result(generation)

    def take(self, number: int) -> Generation | None:
        """Return a generation after waiting for it; None if it was not drawn ahead. Errors are those of `wait`."""
        found = self.wait()
        self._future = None
        if found is None or found[0] != number:
            return None
        return found[1]

    def _work(self) -> None:
        while True:
            future, draw = self._tasks.get()
            try:
                future.set_result(draw())
            except BaseException as error:  # for the thread that waits
                future.set_exception(error)
