"""Copy checkpoints to a store in a thread, while training continues."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from swiftlite.base.errors import UserError
from swiftlite.base.log import logger
from swiftlite.store.best import Evaluations, best_checkpoint
from swiftlite.store.objects import ObjectStore, StoreError, url_of
from swiftlite.store.retention import delete_oldest, is_ephemeral
from swiftlite.store.run_store import FLAG, RunStore, own_id
from swiftlite.store.shares import ALONE, Shares

_RETRY_SECONDS = 120
"""For how long a store that does not answer is asked again, while training continues."""


@dataclass(frozen=True)
class Job:
    """A checkpoint to copy, and the ranks that copy it.

    Attributes:
        is_ephemeral: whether it is one of --ephemeral_save_steps. The first rank may delete it while other ranks wait.
    """

    checkpoint: Path
    shares: Shares
    is_ephemeral: bool = False


@dataclass
class Copies:
    """A thread that copies the newest checkpoint of a run, on each rank the files that the rank has written.

    A checkpoint that is added while another is copied waits; if a third is added, the second is not copied, unless only
    the third is one of --ephemeral_save_steps. A failed copy is a warning, and the next checkpoint is tried; `finish`
    raises an error if the newest checkpoint could not be copied.

    Args:
        store: the copy of the run.
        run: directory of the run.
        keep: number of checkpoints to keep in the store, see `old_ones`.
        shares: the ranks that copy. The first one completes each copy, and copies what others could not.
    """

    store: RunStore
    run: Path
    keep: int | None = None
    shares: Shares = ALONE
    _num_added: int = 0
    _waiting: Job | None = None
    _current: Job | None = None
    _error: str = ""
    _ends: bool = False
    _is_claimed: bool = False
    _changed: threading.Condition = field(default_factory=threading.Condition)

    def __post_init__(self):
        self._thread = threading.Thread(target=self._work, name=f"copies to {FLAG}", daemon=True)
        self._thread.start()

    @property
    def in_use(self) -> set[Path]:
        """Return the checkpoints that are copied or wait, and must not be deleted."""
        with self._changed:
            return {job.checkpoint for job in (self._waiting, self._current) if job}

    def add(self, checkpoint: Path) -> None:
        """Copy a checkpoint that was saved. Every rank must call this function; it returns at once."""
        self._num_added += 1
        self._add(Job(checkpoint, self.shares.of(self._num_added), is_ephemeral(checkpoint)))

    def add_alone(self, checkpoint: Path) -> None:
        """Copy a checkpoint of an earlier process. Only the first rank calls this function; it returns at once."""
        self._add(Job(checkpoint, ALONE, is_ephemeral(checkpoint)))

    def _add(self, job: Job) -> None:
        with self._changed:
            omitted, chosen = self._waiting, job
            if omitted and job.is_ephemeral and not omitted.is_ephemeral:
                omitted, chosen = job, omitted
            self._waiting = chosen
            self._changed.notify_all()
        if omitted and self.shares.rank:
            omitted.shares.report([])

    def finish(self) -> None:
        """Wait for the last copy; on the first rank, copy the files that the run has written since.

        Raises:
            UserError: the newest checkpoint or the files could not be copied. Only on the first rank.
        """
        with self._changed:
            self._ends = True
            self._changed.notify_all()
        while self._thread.is_alive():
            self._thread.join(0.1)  # with a time limit, so that Ctrl-C is handled
        if self.shares.rank:
            return
        if not self._error:
            self._error = self._try(self._copy_rest)
        if self._error:
            raise UserError(
                f"{FLAG} {self.store.objects.place}: the newest checkpoint was not copied: {self._error}",
                f"{self.store.objects.hint}; the checkpoint is in {self.run}, and --resume copies it",
            )

    def _work(self) -> None:
        while True:
            with self._changed:
                while not (self._waiting or self._ends):
                    self._changed.wait()
                if self._waiting is None:
                    return
                self._current, self._waiting = self._waiting, None
                job = self._current
            copy = self._copy_share if self.shares.rank else self._copy
            self._error = self._try(lambda copy=copy, job=job: copy(job))
            if self._error and job.checkpoint.exists():  # otherwise it became old, and the first rank has deleted it
                logger.warning("%s: %s was not copied: %s", FLAG, job.checkpoint.name, self._error)
            with self._changed:
                self._current = None

    def _copy_share(self, job: Job) -> None:
        copied: list[str] = []
        try:
            copied = self.store.put_share(job.checkpoint, job.shares)
        finally:
            job.shares.report(copied)

    def _copy(self, job: Job) -> None:
        start = time.monotonic()
        self._claim()
        checkpoint = job.checkpoint
        step = int(checkpoint.name.removeprefix("checkpoint-"))
        evaluations = Evaluations.read(self.run)
        self.store.delete_oldest(None, step, evaluations)  # incomplete ones, whose space is needed
        num_bytes = self.store.put_checkpoint(checkpoint, job.shares)
        self.store.delete_oldest(self.keep, step + 1, evaluations)
        if num_bytes:
            seconds = time.monotonic() - start
            place = self.store.objects.place
            logger.info("copied %s to %s: %.2f GB in %.1f s", checkpoint.name, place, num_bytes / 1e9, seconds)

    def _copy_rest(self) -> None:
        """Copy the files that the run has written since the last copy, and its best checkpoint, which may have waited
        while others were copied.
        """
        self.store.put_files(self.run)
        best = best_checkpoint(self.run)
        if best and int(best.name.removeprefix("checkpoint-")) not in self.store.steps():
            self.store.put_checkpoint(best)

    def _claim(self) -> None:
        """Reserve the store for the run, unless this was done before the first step, when the store may not have
        answered.
        """
        if not self._is_claimed and (own_id(self.run) is None or own_id(self.run) != self.store.run_id()):
            self.store.claim(self.run, resume=True)
        self._is_claimed = True

    def _try(self, call: Callable[[], object]) -> str:
        """Call a function, and return the reason if it fails."""
        try:
            call()
        except StoreError as error:
            return str(error)
        except UserError as error:
            return error.problem
        except OSError as error:
            return f"{error.filename}: {error.strerror}"
        except Exception as error:  # otherwise the thread would end, and `finish` would find no error
            logger.exception("%s", error)
            return f"{type(error).__name__}: {error}"
        return ""


@contextmanager
def copies_of(run: Path, option: str | None, keep: int | None, shares: Shares = ALONE) -> Iterator[Copies | None]:
    """Copy the checkpoints of a run to the store of `--checkpoint_store` until the context ends.

    Args:
        shares: the ranks that copy; each of them opens this context.

    Yields:
        None without the option.

    Raises:
        UserError: the newest checkpoint was not copied.
    """
    if option is None:
        yield None
        return
    copies = Copies(RunStore(ObjectStore.open(url_of(option), _RETRY_SECONDS)), run, keep, shares)
    try:
        yield copies
    except BaseException:
        shares.is_alone.set()
        try:
            copies.finish()
        except UserError as error:  # the first error is the important one
            logger.warning("%s", error.problem)
        raise
    copies.finish()
    if not shares.rank:
        delete_oldest(run, keep)  # of those that were in use
