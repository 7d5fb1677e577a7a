"""Run torchrun, with the exit code and the error of the rank that failed first. `launch.py` starts this module.

Arguments and agent are torchrun's. This module adds handling of the end of a job: it reports which rank failed first
(`failure.py`), informs the launchers of other nodes (`nodes.py`), restarts the job with --max_restarts, and leaves no
process behind. The store of a single-node job listens only on the loopback address. Of the modules of `cli`, only this
one and `nodes.py` import torch.
"""

import ctypes
import itertools
import logging
import os
import signal
import socket
import sys
import time
from argparse import Namespace
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

import psutil

from swiftlite.launch import failure
from swiftlite.launch.failure import Failure
from swiftlite.launch.nodes import JOIN_SECONDS, Ending, Nodes, kill_children
from swiftlite.launch.start import LOOPBACK
from swiftlite.runtime.progress import RESTARTS, progress_file, read_progress
from swiftlite.runtime.temporary import temporary_directory

if TYPE_CHECKING:
    from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

# Seconds that ranks have to save a checkpoint after SIGTERM or Ctrl-C before torchrun kills them; torchrun's default is
# 30. If a rank has failed, the others have torchrun's 30 seconds, because they cannot complete a step.
SHUTDOWN_SECONDS = 600
# A rank that ends this many seconds after the first one was stopped by torchrun.
STOPPED_SECONDS = 20
# Exit codes of a rank that somebody asked to stop: killed by the signal, or ended after saving.
STOPPED_CODES = {code for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP) for code in (-number, 128 + number)}


def main(argv: list[str]) -> int:
    """Run torchrun with `argv`, and return the exit code of the job.

    It is the exit code of the rank that failed first, 128 + N for signal N, or 0. With --max-restarts, the ranks are
    started again after a failure. torchrun's own restarts are not used: they also repeat errors of the user, count
    separately on each node, and do not tell other nodes.
    """
    for number in (signal.SIGTERM, signal.SIGHUP):
        # A signal that the parent ignores (nohup) stays ignored.
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, _stop)  # until torchrun sets its handlers
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(SHUTDOWN_SECONDS))
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing import SignalException

    # torch logs the signals of all ranks between the failed rank's error and swiftlite's line about it.
    for name in ("multiprocessing.api", "agent.server.api"):
        logging.getLogger(f"torch.distributed.elastic.{name}").setLevel(logging.CRITICAL)
    _become_subreaper()
    with temporary_directory("swiftlite_") as folder:
        os.environ[failure.FOLDER] = str(folder)
        os.environ[failure.LAUNCHER] = str(os.getpid())
        options = run.parse_args(["--log-dir", str(folder), *argv])
        if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # nohup
            options.signals_to_handle = "SIGTERM,SIGINT,SIGQUIT"
        max_restarts, options.max_restarts = options.max_restarts, 0
        nodes = None
        if options.nnodes != "1":
            nodes = Nodes(options, has_restarts=max_restarts > 0)
        try:
            return _run_job(options, nodes, max_restarts)
        except SignalException as error:  # the agent has forwarded it and waited for the ranks
            _stop(error.sigval)
        finally:
            _end_children()
            if nodes:
                nodes.close()


def _run_job(options: Namespace, nodes: Nodes | None, max_restarts: int) -> int:
    """Run the ranks, and start them again after failures; return the exit code of the job."""
    if nodes is None or nodes.is_first:
        _delete_progress()  # of an earlier command
    port = options.master_port
    before: Ending | None = None
    for restarts in itertools.count():
        # Ranks write this number into the progress file, which tells steps of this attempt from earlier ones.
        os.environ[RESTARTS] = str(restarts)
        # A new port for each attempt, because a store at the old one can still have keys of the last ranks.
        options.master_port = port if restarts == 0 else 0
        if nodes and restarts:
            nodes.begin(restarts)
        ending = _attempt(options, nodes, _Limits(max_restarts, restarts, before))
        if ending is None:
            if nodes is None or nodes.is_first:
                _delete_progress()
            if nodes:
                nodes.publish_end()
            return 0
        _end_children()  # of killed ranks, such as writers of checkpoints, before others write there
        if not ending.is_restarted:
            return ending.code
        before = ending
    raise AssertionError


def _delete_progress() -> None:
    if path := progress_file():
        path.unlink(missing_ok=True)


@dataclass(frozen=True)
class _Limits:
    """The facts that decide whether a failed run is restarted.

    Attributes:
        max_restarts: maximum number of restarts.
        restarts: number of restarts so far.
        before: the failure that caused the last restart.
    """

    max_restarts: int
    restarts: int
    before: Ending | None

    def decide(self, first: "_FirstFailure", who: str) -> Ending:
        """Decide whether the run is restarted after a failure of this node."""
        ending = Ending(who, first.how, first.code, last_step=self._last_step())
        if not self.max_restarts or first.is_final:
            return ending
        if self.before and self.before.last_step == ending.last_step:
            return replace(ending, verdict=f"not restarted, because it failed twice {_after(ending.last_step)}")
        if self.restarts == self.max_restarts:
            return replace(ending, verdict=f"not restarted again, because --max_restarts is {self.max_restarts}")
        verdict = f"restart {self.restarts + 1} of {self.max_restarts}, {_after(ending.last_step)}"
        return replace(ending, verdict=verdict, is_restarted=True)

    def _last_step(self) -> int | None:
        """Return the last completed step since the last restart; None before the first step."""
        path = progress_file()
        progress = read_progress(path) if path else None
        if progress is None or progress.restarts != self.restarts:
            return None
        return progress.last


def _after(last_step: int | None) -> str:
    return "before its first step" if last_step is None else f"after step {last_step}"


def _attempt(options: Namespace, nodes: Nodes | None, limits: _Limits) -> Ending | None:
    """Run the ranks of this node until they end.

    Returns:
        None if the job is complete, otherwise how it ended.
    """
    from torch.distributed import DistStoreError, run  # pyright: ignore[reportPrivateImportUsage]
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    store = None
    if nodes is None:
        store = _open_local_store(options)
    elif limits.max_restarts:
        chosen = nodes.choose(partial(_decide_on_lost_node, limits))
        if isinstance(chosen, Ending):
            _print(chosen.verdict)
            return chosen
        if nodes.number not in chosen.numbers:
            _print("this node waits as a spare")
            ended = nodes.wait()
            if ended is not None:
                _print(f"{ended.who} failed first, {ended.how}", ended.verdict)
            return ended
        options.nnodes, options.node_rank = str(len(chosen.numbers)), chosen.numbers.index(nodes.number)
        options.master_port, options.rdzv_conf = chosen.port, f"timeout={JOIN_SECONDS}"
    try:
        run.run(options)
        return None
    except ChildFailedError as error:
        return _report(error, nodes, limits)
    except DistStoreError:  # a node was lost after it was chosen
        if nodes is None or not limits.max_restarts:
            raise
        return nodes.publish(_decide_on_lost_node(limits, "a node", "before its ranks were started"))
    finally:
        del store  # it is open as long as it has a name


def _stop(number: int, frame: FrameType | None = None) -> NoReturn:
    """Print which signal ended the job, and exit."""
    print(f"swiftlite: stopped by {signal.Signals(number).name}", file=sys.stderr, flush=True)
    sys.exit(128 + number)


def _decide_on_lost_node(limits: _Limits, who: str, how: str) -> Ending:
    return limits.decide(_FirstFailure(-1, 1, how, "", is_final=False), who)


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


def _report(error: "ChildFailedError", nodes: Nodes | None, limits: _Limits) -> Ending:
    """Print which rank failed first, and what follows; return how the job ended."""
    first = _first_failure(error.failures)
    elsewhere = None
    if nodes:
        elsewhere = nodes.reason(wait=first.lost_connection != "")
    if elsewhere is None:
        who = f"rank {first.rank}"
        if nodes:
            who += f" on {socket.gethostname()}"
        who = first.who or who
        own = limits.decide(first, who)
        elsewhere = nodes.publish(own) if nodes else None
        if elsewhere in (None, own):
            print(first.lost_connection, end="", file=sys.stderr)  # no rank has another error
            _print(f"{who} failed first, {first.how}; the others were stopped", own.verdict)
            return own
    _print(f"{elsewhere.who} failed first, {elsewhere.how}; the ranks on this node were stopped", elsewhere.verdict)
    return elsewhere


def _print(*texts: str) -> None:
    """Print those of the lines that are not empty."""
    for text in filter(None, texts):
        print(f"swiftlite: {text}", file=sys.stderr, flush=True)


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
    is_final: bool
    """Whether the failure would repeat after a restart, or somebody asked the run to stop."""
    who: str = ""
    """Name of the rank if it did not end, but hung, and another rank reported it."""


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
    if report and report.lost:
        who, how = report.lost
        return _FirstFailure(rank, report.code, how, "", is_final=False, who=who)
    if report:
        code = report.code
    if report and report.is_lost:
        lost_connection = report.message
    # A run that saved after such a signal ends with 128 + its number.
    is_final = (report is not None and report.is_final) or code in STOPPED_CODES
    if code < 0:
        return _FirstFailure(rank, 128 - code, f"with signal {signal.Signals(-code).name}", lost_connection, is_final)
    return _FirstFailure(rank, code, f"with exit code {code}", lost_connection, is_final)


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


def _become_subreaper() -> None:
    """Make this process the parent of orphans of killed ranks, such as the checkpoint writers of megatron-core."""
    PR_SET_CHILD_SUBREAPER = 36
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _end_children() -> None:
    """Kill all remaining child processes, repeatedly, because the children of a killed process become children of this
    process.
    """
    deadline = time.monotonic() + 5  # a process stuck in a driver cannot be killed
    while (children := kill_children()) and time.monotonic() < deadline:
        psutil.wait_procs(children, timeout=1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
