"""Collate the micro-batches of the next step in a thread, while the GPU computes the current step."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from swiftlite.data.batch import Batch


class Prefetched:
    """A function like `get`, whose results for the next step are computed in a thread.

    Results depend only on the step, so they do not depend on the thread. An error for a step is raised by the call for
    this step.

    Args:
        get: returns the micro-batches of a step (counted from 0). It must not communicate with other ranks.
        num_steps: number of steps of the run.
    """

    def __init__(self, get: Callable[[int], Sequence[Batch]], num_steps: int):
        self._get, self._num_steps = get, num_steps
        self._thread = ThreadPoolExecutor(1, "batches")
        self._started: dict[int, Future[Sequence[Batch]]] = {}

    def __call__(self, step: int) -> Sequence[Batch]:
        """Return the micro-batches of a step, and start to collate those of the next step."""
        following = step + 1
        found = self._started.pop(step, None) or self._thread.submit(self._get, step)
        self._started.clear()  # of another order of steps
        batches = found.result()
        # Only one step ahead, so that micro-batches of two steps at most are in memory.
        if following < self._num_steps:
            self._started[following] = self._thread.submit(self._get, following)
        return batches

    def close(self) -> None:
        """Wait until the thread has ended."""
        self._thread.shutdown(cancel_futures=True)
