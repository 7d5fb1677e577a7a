"""Let the launchers (`elastic.py`) of several nodes agree: which node failed first, and which nodes continue.

The launchers communicate through a store at MASTER_ADDR:MASTER_PORT, which the launcher of node 0 holds. Keys contain
the number of restarts, so that messages of an earlier attempt have no effect.
"""

import json
import os
import socket
import threading
import time
from argparse import Namespace
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING

import psutil

from swiftlite.launch.start import NODE_COUNTS

if TYPE_CHECKING:
    from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

# Interval in seconds at which launchers check whether another node has failed.
POLL_SECONDS = 1
# Seconds that ranks have to end when another node has failed. The ranks of the failed node have 30 s (torchrun's
# default), so the job ends in less than a minute.
GRACE_SECONDS = 20
# The same if the ranks are restarted. They only have to release their devices and files.
RESTART_GRACE_SECONDS = 5
# Seconds that a node waits for the report of the failed node, if it only lost connections.
REASON_SECONDS = 5
# Seconds that a failed node has to connect to the store of node 0, to report its failure.
CONNECT_SECONDS = 60
# Seconds without a sign of life after which a node counts as lost. Only with restarts.
LOST_SECONDS = 30
# Seconds to wait for further nodes when enough nodes are there.
LAST_CALL_SECONDS = 30
# Seconds to wait for enough nodes.
ENOUGH_SECONDS = 600
# Seconds that the chosen nodes have to start.
JOIN_SECONDS = 60


@dataclass(frozen=True)
class Ending:
    """The end of one attempt to run the job.

    Attributes:
        who: the rank or node that failed first.
        how: how it ended.
        code: exit code of the job, if it is not restarted.
        verdict: whether and why the job is restarted, for the log; empty without --max_restarts, and for failures that
            are never restarted.
        is_restarted: whether the ranks are started again.
        last_step: last completed step of the attempt; None before its first step.
    """

    who: str
    how: str
    code: int
    verdict: str = ""
    is_restarted: bool = False
    last_step: int | None = None


@dataclass(frozen=True)
class Chosen:
    """The nodes that run an attempt.

    Attributes:
        numbers: the numbers of their launchers, in the order of their ranks.
        port: port on node 0 of the store in which the ranks meet.
    """

    numbers: list[int]
    port: int


class Nodes:
    """Informs the launchers of other nodes about failed nodes, because torchrun's agents do not.

    Without this class, a rank that waits in an NCCL collective for a lost node would wait until the timeout, ten
    minutes by default. The first published ending counts for all nodes.

    A node has up to three numbers: NODE_RANK of the user, which only tells whether this is node 0; its number in order
    of arrival, which is new in each attempt; and its place in `Chosen.numbers`, which is its node rank for torchrun.

    Attributes:
        is_first: whether this is node 0.
        number: number of this launcher in the attempt, in order of arrival; -1 before `choose`.
    """

    def __init__(self, options: Namespace, *, has_restarts: bool):
        self.address = (options.master_addr, options.master_port)
        self.is_first = options.node_rank == 0
        self.nnodes = options.nnodes
        self.has_restarts = has_restarts
        self.store: TCPStore | None = None
        self.store_of_ranks: TCPStore | None = None
        self.connected = threading.Event()
        self.begin(0)

    def begin(self, restarts: int) -> None:
        """Start to listen to the other nodes in an attempt."""
        if restarts:
            self.close()
        self.restarts = restarts
        self.number = -1
        self.chosen: Chosen | None = None
        self.decide: Callable[[str, str], Ending] = lambda who, how: Ending(who, how, 1)
        self.heard: Ending | None = None
        self.over = threading.Event()
        self.thread = threading.Thread(target=self._listen, daemon=True)
        self.thread.start()

    def close(self) -> None:
        """Stop listening, because a thread in the store's C++ code would abort the process when Python exits."""
        self.over.set()
        self.thread.join(REASON_SECONDS)  # it can wait for a lost node 0

    def choose(self, decide: Callable[[str, str], Ending]) -> Chosen | Ending:
        """Wait for the other nodes, and return which of them run the attempt. Only with restarts.

        Args:
            decide: returns what follows if a chosen node is lost, from its name and how it was lost.

        Returns:
            An `Ending` if there are not enough nodes, or node 0 cannot be reached.
        """
        self.connected.wait()
        if self.store is None:
            return self._lost_node_0()
        try:
            self.number = self.store.add(self._key("joined"), 1) - 1
            self.store.set(self._key(f"host/{self.number}"), socket.gethostname())
            if self.is_first:
                chosen = self._choose()
                if isinstance(chosen, Ending):
                    return self.publish(chosen)
                self.store.set(self._key("chosen"), json.dumps(asdict(chosen)))
            while not self.store.check([self._key("chosen")]):
                if self.heard:
                    return self.heard
                time.sleep(POLL_SECONDS / 10)
            # Before `chosen`, from which on the thread of `_listen` can call it.
            self.decide = decide
            self.chosen = Chosen(**json.loads(self.store.get(self._key("chosen"))))
            return self.chosen
        except RuntimeError:
            return self._lost_node_0()

    def wait(self) -> Ending | None:
        """Wait, as a spare, until the attempt ends; return None if the job is complete."""
        while self.heard is None:
            with suppress(RuntimeError):  # node 0 is lost, which `_listen` detects
                if self.store and self.store.check([self._key("complete")]):
                    return None
            time.sleep(POLL_SECONDS / 10)
        return self.heard

    def publish_end(self) -> None:
        """Report to spares that the job is complete. Only node 0 does."""
        if self.has_restarts and self.is_first and self.store:
            self.store.set(self._key("complete"), "")
            time.sleep(2 * POLL_SECONDS)  # the store ends with this process

    def reason(self, wait: bool) -> Ending | None:
        """Return how another node that failed first ended; None if no node failed."""
        deadline = time.monotonic() + REASON_SECONDS
        while wait and self.heard is None and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS / 10)
        return self.heard

    def publish(self, ending: Ending) -> Ending:
        """Report to the other launchers why this node ends; return the ending that was published first."""
        self.over.set()
        self.connected.wait(CONNECT_SECONDS)  # ranks can fail before this thread has connected
        if self.store is None:
            return ending
        try:
            first = self._publish(ending)
        except RuntimeError:  # node 0 is lost, which other nodes detect
            return replace(ending, is_restarted=False, verdict="")
        if self.is_first and not first.is_restarted:
            time.sleep(2 * POLL_SECONDS)  # the store of node 0 ends with this process
        return first

    def _publish(self, ending: Ending) -> Ending:
        assert self.store is not None
        # Stores only if the key is empty, and returns what is stored: two nodes that fail at once agree on one ending.
        first = self.store.compare_set(self._key("ended"), "", json.dumps(asdict(ending)))
        return Ending(**json.loads(first))

    def _key(self, name: str) -> str:
        return f"swiftlite/{self.restarts}/{name}"

    def _lost_node_0(self) -> Ending:
        return Ending(f"node 0 ({self.address[0]})", "see its output", 1)

    def _choose(self) -> Chosen | Ending:
        """On node 0, wait for other nodes, and choose the first ones that arrive."""
        from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

        assert self.store is not None
        counts = list(map(int, os.environ[NODE_COUNTS].split(",")))
        start, enough_since = time.monotonic(), None
        while (arrived := self.store.add(self._key("joined"), 0)) < counts[-1]:
            now = time.monotonic()
            if arrived < counts[0] and now - start > ENOUGH_SECONDS:
                how = f"has waited {ENOUGH_SECONDS} s for {counts[0]} nodes, and {arrived} are there"
                return Ending("node 0", how, 1, f"NNODES={self.nnodes}: node 0 {how}")
            if arrived >= counts[0]:
                enough_since = enough_since or now
                if now - enough_since > LAST_CALL_SECONDS:
                    break
            time.sleep(POLL_SECONDS / 10)
        # A layout may fit only some numbers of nodes: with 2 or 4 allowed and 3 there, one of them is a spare.
        size = max(count for count in counts if count <= arrived)
        others = [number for number in range(arrived) if number != self.number]
        listener = socket.create_server(("", 0))
        port = listener.getsockname()[1]
        # A store for this attempt only, because ranks leave keys behind. torchrun also uses it, because of its port.
        self.store_of_ranks = TCPStore(
            self.address[0],
            port,
            is_master=True,
            wait_for_workers=False,
            multi_tenant=True,
            master_listen_fd=listener.detach(),
        )
        return Chosen([self.number, *others[: size - 1]], port)

    def _listen(self) -> None:
        from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

        host, port = self.address
        # A local name, because `begin` makes a new event for the next attempt.
        over = self.over
        try:
            if self.store is None:
                # multi_tenant: on node 0 this is also torchrun's server, which remains open until this launcher ends.
                self.store = TCPStore(
                    host,
                    port,
                    is_master=self.is_first,
                    timeout=timedelta(minutes=10),
                    wait_for_workers=False,
                    multi_tenant=True,
                )
        except RuntimeError:
            return  # torchrun also fails and reports it
        finally:
            self.connected.set()
        alive = _SignsOfLife(self.store)
        while self.heard is None:
            if over.wait(POLL_SECONDS):
                return
            try:
                if self.store.check([self._key("ended")]):
                    self.heard = Ending(**json.loads(self.store.get(self._key("ended"))))
                elif self.chosen and self.number in self.chosen.numbers:
                    self.store.add(self._key(f"alive/{self.number}"), 1)
                    self.heard = self._lost_node(alive)
            except RuntimeError:
                self.heard = self._lost_node_0()
        seconds = GRACE_SECONDS
        if self.heard.is_restarted:
            seconds = RESTART_GRACE_SECONDS
        # torchrun's agent then finds failed ranks, and `_report` in elastic.py prints what was heard.
        if not over.wait(seconds):
            kill_children()

    def _lost_node(self, alive: "_SignsOfLife") -> Ending | None:
        """On node 0, return how the attempt ends if a chosen node has given no sign of life for some time."""
        if not self.is_first or self.chosen is None or self.store is None:
            return None
        for number in self.chosen.numbers:
            if alive.have_stopped(self._key(f"alive/{number}")):
                host = self.store.get(self._key(f"host/{number}")).decode()
                return self._publish(self.decide(f"node {host}", f"without a sign of life for {LOST_SECONDS} s"))
        return None


class _SignsOfLife:
    """Detects counters in a store that have stopped increasing."""

    def __init__(self, store: "TCPStore"):
        self.store = store
        self.seen: dict[str, tuple[int, float]] = {}
        """By key, the last value and when it changed."""

    def have_stopped(self, key: str) -> bool:
        """Return whether the counter has not changed for `LOST_SECONDS`."""
        value, now = self.store.add(key, 0), time.monotonic()
        before = self.seen.get(key)
        # The time of this machine when the counter changed, because clocks of nodes differ.
        if before is None or before[0] != value:
            self.seen[key] = (value, now)
            return False
        return now - before[1] > LOST_SECONDS


def kill_children() -> list[psutil.Process]:
    """Kill the child processes of this process, and return them."""
    children = psutil.Process().children()
    for child in children:
        with suppress(psutil.NoSuchProcess):
            child.kill()
    return children
