"""Run torchrun, with the exit code and the error of the rank that failed first. `launch.py` starts this module.

Arguments and agent are torchrun's. This module adds handling of the end of a job: it reports which rank failed first
(`failure.py`), informs the launchers of other nodes, and leaves no process behind. The store of a single-node job
listens only on the loopback address. No other module of `cli` imports torch.
"""

import ctypes
import json
import logging
import os
import signal
import socket
import sys
import tempfile
import threading
import time
from argparse import Namespace
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

import psutil

from swiftlite.cli import failure
from swiftlite.cli.failure import Failure
from swiftlite.cli.launch import LOOPBACK

if TYPE_CHECKING:
    from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

# Seconds that ranks have to save a checkpoint after SIGTERM or Ctrl-C before torchrun kills them; torchrun's default is
# 30. If a rank has failed, the others have torchrun's 30 seconds, because they cannot complete a step.
SHUTDOWN_SECONDS = 600
# Interval in seconds at which launchers check whether another node has failed.
POLL_SECONDS = 1
# Seconds that ranks have to end when another node has failed. With 30 s on that node, this is less than a minute.
GRACE_SECONDS = 20
# A rank that ends this many seconds after the first one was stopped by torchrun.
STOPPED_SECONDS = 20
# Seconds that a node waits for the report of the failed node, if it only lost connections.
REASON_SECONDS = 5
# Seconds that a failed node has to connect to the store of node 0, to report its failure.
CONNECT_SECONDS = 60


def main(argv: list[str]) -> int:
    """Run torchrun with `argv`, and return the exit code of the job.

    It is the exit code of the rank that failed first, 128 + N for signal N, or 0.
    """
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, _stop)  # until torchrun sets its handlers
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(SHUTDOWN_SECONDS))
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    # torch logs the signals of all ranks between the failed rank's error and swiftlite's line about it.
    for name in ("multiprocessing.api", "agent.server.api"):
        logging.getLogger(f"torch.distributed.elastic.{name}").setLevel(logging.CRITICAL)
    _become_subreaper()
    with tempfile.TemporaryDirectory(prefix="swiftlite_") as folder:
        os.environ[failure.FOLDER] = folder
        os.environ[failure.LAUNCHER] = str(os.getpid())
        options = run.parse_args(["--log-dir", folder, *argv])
        if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # nohup
            options.signals_to_handle = "SIGTERM,SIGINT,SIGQUIT"
        nodes = store = None
        if options.nnodes == "1":
            store = _open_local_store(options)  # noqa: F841  (it is open as long as it has a name)
        else:
            nodes = _Nodes(options)
        try:
            run.run(options)
            return 0
        except ChildFailedError as error:
            return _report(error, nodes)
        except SignalException as error:  # the agent has forwarded it and waited for the ranks
            _stop(error.sigval)
        finally:
            _end_children()
            if nodes:
                nodes.close()


def _stop(number: int, frame: FrameType | None = None) -> NoReturn:
    """Print which signal ended the job, and exit."""
    print(f"swiftlite: stopped by {signal.Signals(number).name}", file=sys.stderr, flush=True)
    sys.exit(128 + number)


def _open_local_store(options: Namespace) -> "TCPStore":
    """Open the rendezvous store for the ranks of this machine. torchrun uses this store instead of its own
    (`multi_tenant`).

    The store that torchrun would open listens on every network interface without authentication. With `--standalone`,
    torchrun unpickles the store's content, so anyone who can reach the port could run code.

    Args:
        options: options of torchrun; a master_port of 0 is replaced by a free port.
    """
    from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

    listener = socket.create_server((LOOPBACK, options.master_port))
    options.master_port = listener.getsockname()[1]
    return TCPStore(
        LOOPBACK, options.master_port, is_master=True, multi_tenant=True, master_listen_fd=listener.detach()
    )


def _report(error: "ChildFailedError", nodes: "_Nodes | None") -> int:
    """Print which rank ended the job, and return the rank's exit code."""
    first = _first_failure(error.failures)
    elsewhere = None
    if nodes:
        elsewhere = nodes.reason(wait=first.lost_connection != "")
    if elsewhere is not None:
        who, how = elsewhere["who"], elsewhere["how"]
        print(f"swiftlite: {who} failed first, {how}; the ranks on this node were stopped", file=sys.stderr)
        return elsewhere["code"]
    print(first.lost_connection, end="", file=sys.stderr)  # no rank has another error
    print(f"swiftlite: rank {first.rank} failed first, {first.how}; the others were stopped", file=sys.stderr)
    if nodes:
        who = f"rank {first.rank} on {socket.gethostname()}"
        nodes.publish({"who": who, "how": first.how, "code": first.code})
    return first.code


@dataclass(frozen=True)
class _FirstFailure:
    """The rank that failed first, and how it ended."""

    rank: int
    code: int
    """Exit code of the whole job: the exit code of the rank, or 128 + N if signal N ended the rank."""
    how: str
    lost_connection: str
    """Traceback of the rank if it only lost its connection to another rank and did not print the traceback; otherwise
    empty."""


def _first_failure(failures: "dict[int, ProcessFailure]") -> _FirstFailure:
    """Return the failure that caused the failures of all other ranks.

    Args:
        failures: torchrun's record of every failed rank on this node.
    """
    reports = {}
    for rank, failed in failures.items():
        if Path(failed.error_file).is_file():
            reports[rank] = Failure(**failed.error_file_data)
    rank = _rank_at_fault(failures, reports)
    report = reports.get(rank)
    code = failures[rank].exitcode
    lost_connection = ""
    if report:
        code = report.code
    if report and report.is_lost:
        lost_connection = report.message
    if code < 0:
        return _FirstFailure(rank, 128 - code, f"with signal {signal.Signals(-code).name}", lost_connection)
    return _FirstFailure(rank, code, f"with exit code {code}", lost_connection)


def _rank_at_fault(failures: "dict[int, ProcessFailure]", reports: dict[int, Failure]) -> int:
    """Return the rank whose failure caused the failures of all other ranks.

    Example: rank 2 runs out of memory and is killed. Ranks 0 and 1 lose their connection to it and report that; rank 3
    still computes, and torchrun stops it. Only rank 2 ended by itself without a report, so the result is rank 2.
    """
    own_errors = [rank for rank, report in reports.items() if not report.is_lost]
    if own_errors:
        return min(own_errors, key=lambda rank: reports[rank].timestamp)
    earliest = min(failed.timestamp for failed in failures.values())
    silent = [rank for rank in failures if rank not in reports and not _was_stopped(failures[rank], earliest)]
    if silent:
        return silent[0]
    if reports:  # all reports are lost connections
        return min(reports, key=lambda rank: reports[rank].timestamp)
    return next(iter(failures))


def _was_stopped(failed: "ProcessFailure", earliest: float) -> bool:
    """Return whether torchrun ended the rank: with SIGTERM, or with SIGKILL 30 seconds after the first rank ended."""
    return failed.exitcode == -signal.SIGTERM or failed.timestamp - earliest >= STOPPED_SECONDS


class _Nodes:
    """Informs the launchers of other nodes about failed nodes, because torchrun's agents do not.

    Without this class, a rank that waits in an NCCL collective for a lost node would wait until the timeout, ten
    minutes by default. The launchers communicate through the store that torchrun opens at MASTER_ADDR:MASTER_PORT. The
    first published reason ends the job on all nodes.
    """

    KEY = "swiftlite/ended_first"

    def __init__(self, options: Namespace):
        self.address = (options.master_addr, options.master_port)
        self.is_first = options.node_rank == 0
        self.store = None
        self.heard: dict | None = None
        self.connected = threading.Event()
        self.over = threading.Event()
        self.thread = threading.Thread(target=self._listen, daemon=True)
        self.thread.start()

    def close(self) -> None:
        """Stop listening, because a thread in the store's C++ code would abort the process when Python exits."""
        self.over.set()
        self.thread.join(REASON_SECONDS)  # it can wait for a lost node 0

    def reason(self, wait: bool) -> dict | None:
        """Return the report of another node that failed first: {"who", "how", "code"}; None if no node failed."""
        deadline = time.monotonic() + REASON_SECONDS
        while wait and self.heard is None and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS / 10)
        return self.heard

    def publish(self, reason: dict) -> None:
        """Report to the other launchers why this node ends."""
        self.over.set()
        self.connected.wait(CONNECT_SECONDS)  # ranks can fail before this thread has connected
        if self.store is None:
            return
        with suppress(RuntimeError):  # node 0 is lost, which other nodes detect
            self.store.compare_set(self.KEY, "", json.dumps(reason))
            if self.is_first:
                time.sleep(2 * POLL_SECONDS)  # the store of node 0 ends with this process

    def _listen(self) -> None:
        from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

        host, port = self.address
        try:
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
        while self.heard is None:
            if self.over.wait(POLL_SECONDS):
                return
            try:
                if self.store.check([self.KEY]):
                    self.heard = json.loads(self.store.get(self.KEY))
            except RuntimeError:
                self.heard = {"who": f"node 0 ({host})", "how": "see its output", "code": 1}
        if not self.over.wait(GRACE_SECONDS):
            _kill_children()


def _become_subreaper() -> None:
    """Make this process the parent of orphans of killed ranks, such as the checkpoint writers of megatron-core."""
    PR_SET_CHILD_SUBREAPER = 36
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _end_children() -> None:
    """Kill all remaining child processes, repeatedly, because the children of a killed process become children of this
    process.
    """
    deadline = time.monotonic() + 5  # a process stuck in a driver cannot be killed
    while (children := _kill_children()) and time.monotonic() < deadline:
        psutil.wait_procs(children, timeout=1)


def _kill_children() -> list[psutil.Process]:
    """Kill the child processes of this process, and return them."""
    children = psutil.Process().children()
    for child in children:
        with suppress(psutil.NoSuchProcess):
            child.kill()
    return children


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
