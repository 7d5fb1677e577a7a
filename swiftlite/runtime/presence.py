"""Let ranks wait for each other before the first step, and name a rank that hangs.

A step has a time limit (--distributed_timeout_minutes). Reading and tokenizing rows has none, because it can take
hours, and not equally many on each node. Instead, every rank gives signs of life: a thread increases a counter in the
store in which the ranks met. A rank that waits for others ends if the counter of one of them has not increased during
the time limit; a process that is stopped, or in which one call keeps Python's lock, does not increase it.
"""

import os
import re
import socket
import threading
import time
from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from swiftlite.base.errors import LostRank, is_of_connection
from swiftlite.base.log import logger
from swiftlite.runtime.flight_recorder import last_collective, write_trace

# Seconds between two signs of life.
BEAT_SECONDS = 5.0
# Seconds between two looks at whether the others have arrived.
POLL_SECONDS = 0.2
# Seconds without a sign of life after which a rank counts as hanging, if a step has already reached its time limit.
AFTER_TIMEOUT_SECONDS = 3 * BEAT_SECONDS
# Seconds after which a wait is logged.
LOG_SECONDS = 60


def key_value_store() -> Any:
    """Return a client, for another thread, of the store in which the ranks met.

    A client handles one request at a time, and a request of this rank's main thread may wait for another rank. Without
    `clone` (torch 2.6), the threads share the client.
    """
    store = _get_default_store()
    return getattr(store, "clone", lambda: store)()


class Presence:
    """The signs of life of this rank and of all others.

    Args:
        limit: seconds without a sign of life after which a rank that others wait for counts as lost.
    """

    def __init__(self, limit: float):
        self.limit = limit
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self._store = _get_default_store()
        self._store_of_thread = key_value_store()
        self._numbers: Counter[str] = Counter()
        self._seen: dict[int, tuple[int, float]] = {}
        """By rank, the last value of its counter and when it changed."""
        self._over = threading.Event()
        self._store.set(f"host/{self.rank}", socket.gethostname())
        self._thread = threading.Thread(target=self._beat, name="signs of life", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread, because a thread in the store's C++ code would abort the process when Python exits."""
        self._over.set()
        self._thread.join(2 * BEAT_SECONDS)

    def _beat(self) -> None:
        while not self._over.wait(BEAT_SECONDS):
            try:
                self._store_of_thread.add(f"alive/{self.rank}", 1)
            except RuntimeError:  # the launcher that holds the store has ended
                return

    def number_of(self, name: str) -> int:
        """Return how often this method was called with the name, so that each wait has a key of its own."""
        self._numbers[name] += 1
        return self._numbers[name]

    def arrive(self, key: str) -> None:
        """Report that this rank has arrived at the place `key`."""
        self._store.set(f"{key}/{self.rank}", "")
        self._store.add(key, 1)

    def wait_for(self, key: str, ranks: Collection[int], what: str) -> None:
        """Wait until all of the ranks, and no others, have arrived at the place `key`.

        Raises:
            LostRank: one of them has given no sign of life for some time.
        """
        start = looked = logged = time.monotonic()
        while self._store.add(key, 0) < len(ranks):
            time.sleep(POLL_SECONDS)
            now = time.monotonic()
            if now - looked > max(BEAT_SECONDS, self.limit / 20):  # rarely, because every rank asks for every other one
                looked = now
                missing = [rank for rank in ranks if not self._store.check([f"{key}/{rank}"])]
                if lost := self._lost(missing, self.limit):
                    raise self._error(lost, self.limit, what)
                if now - logged > LOG_SECONDS:
                    logged = now
                    names = ", ".join(map(str, missing[:8]))
                    logger.info("waiting for rank %s (%s) since %.0f s", names, what, now - start)

    def find_hanging(self, what: str) -> LostRank | None:
        """Return an error that names a rank without signs of life, after a step has failed; None without such a rank.

        Args:
            what: what this rank waited for.
        """
        try:
            deadline = time.monotonic() + AFTER_TIMEOUT_SECONDS + BEAT_SECONDS
            others = [rank for rank in range(self.size) if rank != self.rank]
            self._seen.clear()
            self._lost(others, 0)
            first = dict(self._seen)
            while time.monotonic() < deadline:
                if lost := self._lost(others, AFTER_TIMEOUT_SECONDS):
                    return self._error(lost, AFTER_TIMEOUT_SECONDS, what)
                if all(self._seen[rank] != first[rank] for rank in others):
                    return None
                time.sleep(POLL_SECONDS)
        except RuntimeError:  # the store has ended as well
            pass
        return None

    def _lost(self, ranks: Collection[int], limit: float) -> list[int]:
        """Return the ranks whose counter has not changed for `limit` seconds, since this method was first called."""
        lost = []
        for rank in ranks:
            value, now = self._store.add(f"alive/{rank}", 0), time.monotonic()
            before = self._seen.get(rank)
            if before is None or before[0] != value:
                self._seen[rank] = (value, now)
            elif now - before[1] > limit:
                lost.append(rank)
        return lost

    def _error(self, lost: list[int], limit: float, what: str) -> LostRank:
        host = self._store.get(f"host/{lost[0]}").decode()
        name = f"rank {lost[0]} on {host}"
        if len(lost) > 1:
            name += f" (and {len(lost) - 1} more)"
        return LostRank(name, f"without a sign of life for {limit:.0f} s in {what}")


_present: Presence | None = None
_TIMEOUT = re.compile("time(d )?out", re.IGNORECASE)


@contextmanager
def signs_of_life(timeout_minutes: float) -> Iterator[None]:
    """Give signs of life until the context ends, and watch those of other ranks while this rank waits for them.

    Raises:
        LostRank: the context raised an error because a collective operation failed, and another rank hangs.
    """
    global _present
    if dist.get_world_size() == 1:
        yield
        return
    _present = Presence(60 * timeout_minutes)
    try:
        yield
    except RuntimeError as error:
        # If a connection was closed, the launcher knows which process has ended.
        if is_of_connection(error) and _TIMEOUT.search(str(error)) and "TORCHELASTIC_ERROR_FILE" in os.environ:
            _explain(error, _present)
        raise
    finally:
        _present.close()
        _present = None


def _explain(error: RuntimeError, present: Presence) -> None:
    """Name the collective operation that reached its time limit, and the rank at fault if it gives no signs of life.

    Raises:
        LostRank: a rank hangs.
    """
    where = last_collective() or "a step"
    logger.warning("rank %d waited in %s until --distributed_timeout_minutes", present.rank, where)
    with suppress(OSError):  # the error itself matters more
        write_trace(present.rank)
    if hanging := present.find_hanging(where):
        raise hanging from error


def wait_for_ranks(what: str) -> None:
    """Wait, without a time limit, until all ranks have called this function. Collective.

    Args:
        what: what the ranks did before, in a few words.

    Raises:
        LostRank: a rank hangs.
    """
    if _present is not None:
        key = f"all/{_present.number_of('all')}"
        _present.arrive(key)
        _present.wait_for(key, range(_present.size), what)


def wait_for_first(ranks: Collection[int], what: str, *, is_first: bool) -> None:
    """Wait, without a time limit, until the first of some ranks has called this function. Collective over `ranks`.

    Raises:
        LostRank: the first rank hangs.
    """
    if _present is not None:
        first = min(ranks)
        key = f"first/{first}/{_present.number_of('first')}"
        if is_first:
            _present.arrive(key)
        else:
            _present.wait_for(key, [first], what)
