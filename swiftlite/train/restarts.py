"""Measure what failures cost a run that its launcher restarts (--max_restarts)."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from swiftlite.base.log import logger
from swiftlite.report.metrics import LOST_SECONDS, NUM_RESTARTS, REPEATED_STEPS
from swiftlite.runtime.progress import Progress, num_restarts, progress_file, read_progress


@dataclass
class RestartClock:
    """Measures the time that failures cost, on the first rank.

    A failure costs the time from the last step that was completed before it to the start of the step after that: the
    detection of the failure, the new processes, reading the checkpoint, and all steps that are computed again.

    Attributes:
        path: the record of the run's progress. None: nothing is measured.
        restarts: number of restarts of the run so far.
    """

    path: Path | None = None
    restarts: int = 0
    _progress: Progress | None = None
    _is_behind: bool = False
    """Whether a step that was completed before a failure has not been reached again."""

    def start(self, first: int) -> None:
        """Called before the first step after step `first`, which is that of the checkpoint, or 0."""
        if self.path is None:
            return
        now = Progress(self.restarts, first, first, time.time())
        before = read_progress(self.path) if self.restarts else None
        if before:
            self._is_behind = True
            now = replace(before, restarts=self.restarts, last=first)
        self._write(now)

    def before(self, step: int) -> Mapping[str, float]:
        """Called before each step, and after the last one.

        Returns:
            The metrics of a failure if `step` is the first step that was not completed before it; otherwise empty.
        """
        if not self._is_behind or self._progress is None or step <= self._progress.furthest:
            return {}
        self._is_behind = False
        seconds, repeated = time.time() - self._progress.finished, self._progress.repeated
        self._progress = replace(self._progress, repeated=0)
        logger.warning(
            "step %d is reached again after a failure: %.1f s were lost, and %d steps were computed twice (restart %d)",
            step - 1,
            seconds,
            repeated,
            self.restarts,
        )
        return {LOST_SECONDS: seconds, REPEATED_STEPS: repeated, NUM_RESTARTS: self.restarts}

    def after(self, step: int) -> None:
        """Called after each step."""
        progress = self._progress
        if progress is None:
            return
        if step > progress.furthest:
            self._write(replace(progress, last=step, furthest=step, finished=time.time()))
        else:
            self._write(replace(progress, last=step, repeated=progress.repeated + 1))

    def _write(self, progress: Progress) -> None:
        assert self.path is not None
        self._progress = progress
        try:
            progress.write(self.path)
        except OSError as error:  # a full disk; the checkpoint reports it
            logger.warning("%s cannot be written: %s", self.path, error.strerror)


def make_restart_clock(*, is_first_rank: bool) -> RestartClock:
    """Return the clock of this rank, as the launcher's environment specifies."""
    return RestartClock(progress_file() if is_first_rank else None, num_restarts())
