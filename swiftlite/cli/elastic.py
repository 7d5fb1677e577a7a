"""torchrun, with the failed rank's exit code as its own, and its error as the one that is shown. By `launch.py`.

Not a replacement: the arguments are torchrun's, the agent is torchrun's. What it adds is for the end of a job: which
rank broke first (`failure.py`), launchers of other nodes that hear of it, and no process left behind. The only file of
`cli` that imports torch.
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
from datetime import timedelta
from pathlib import Path

from swiftlite.cli import failure

# Seconds that ranks have to save a checkpoint after SIGTERM or Ctrl-C before torchrun kills them; its default is 30.
# (After a rank has failed the others have torchrun's 30: nothing they wait for will come.)
SHUTDOWN_SECONDS = 600
# Seconds between two looks at whether another node has failed.
POLL_SECONDS = 1
# Seconds that ranks have to end by themselves when another node has failed: with 30 on that node, less than a minute.
GRACE_SECONDS = 20
# Ranks that end this many seconds after the first were stopped by torchrun.
SILENT_SECONDS = 20
# Seconds in which a node that only lost connections waits for the one that broke them to say so.
REASON_SECONDS = 5


def main(argv: list[str]) -> int:
    """Run torchrun with `argv`; returns the exit code of the rank that failed first, 128 + N for signal N, or 0."""
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(SHUTDOWN_SECONDS))
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    # They would list who got which signal, between the failed rank's own words and our one line about it.
    for name in ("multiprocessing.api", "agent.server.api"):
        logging.getLogger(f"torch.distributed.elastic.{name}").setLevel(logging.CRITICAL)
    _adopt_orphans()
    with tempfile.TemporaryDirectory(prefix="swiftlite_") as folder:
        os.environ[failure.FOLDER] = folder
        options = run.parse_args(["--log-dir", folder, *argv])
        nodes = None if options.standalone or options.nnodes in ("1", "1:1") else _Nodes(options)
        try:
            run.run(options)
            return 0
        except ChildFailedError as error:
            return _report(error, folder, nodes)
        except SignalException as error:
            return 128 + error.sigval  # the agent has forwarded it and waited for the ranks
        finally:
            _end_children()


def _report(error, folder: str, nodes: "_Nodes | None") -> int:
    """Say which rank ended the job, and return its exit code.

    Args:
        error: torchrun's ChildFailedError.
    """
    rank, code, how, lost = _first_failure(error.failures, folder)
    elsewhere = nodes.reason(wait=lost is not None) if nodes else None
    if elsewhere is not None:
        who, how = elsewhere["who"], elsewhere["how"]
        print(f"swiftlite: {who} ended first, {how}; the ranks here were stopped", file=sys.stderr)
        return elsewhere["code"]
    if lost is not None:  # nobody has a better reason
        print(lost.traceback, end="", file=sys.stderr)
    print(f"swiftlite: rank {rank} ended first, {how}; the others were stopped", file=sys.stderr)
    if nodes:
        nodes.tell({"who": f"rank {rank} on {socket.gethostname()}", "how": how, "code": code})
    return code


def _first_failure(failures: dict, folder: str) -> tuple[int, int, str, failure.Failure | None]:
    """The rank to believe, its exit code, how it ended, and its lost connection if it has nothing better to say.

    First of all a rank with an error of its own; then one that ended without a word (killed, out of memory); then
    those that lost a connection. Whom torchrun stopped (SIGTERM at once, SIGKILL 30 seconds later) is never the first.
    """
    told = {rank: what for rank in failures if (what := failure.told(folder, rank)) is not None}
    by_time = sorted(told, key=lambda rank: told[rank].time)
    earliest = min(each.timestamp for each in failures.values())
    silent = [
        rank
        for rank, each in failures.items()
        if rank not in told and each.exitcode != -signal.SIGTERM and each.timestamp - earliest < SILENT_SECONDS
    ]
    own, lost = ([rank for rank in by_time if told[rank].is_lost == is_lost] for is_lost in (False, True))
    rank = [*own, *silent, *lost, *failures][0]
    code = told[rank].code if rank in told else failures[rank].exitcode
    if code > 0:
        how = f"with exit code {code}"
    else:
        code, how = 128 - code, f"with signal {signal.Signals(-code).name}"
    return rank, code, how, told[rank] if rank in lost else None


class _Nodes:
    """What the launchers of a job tell each other: torchrun's do not talk once the ranks run.

    Without it a rank that waits in an NCCL collective for a node that is gone waits until the collective times out, ten
    minutes by default. They meet in the store that torchrun opens at MASTER_ADDR:MASTER_PORT.
    """

    KEY = "swiftlite/ended_first"

    def __init__(self, options: Namespace):
        self.address = (options.master_addr, options.master_port)
        self.is_first = options.node_rank == 0
        self.store = None
        self.heard: dict | None = None
        self.told = False
        threading.Thread(target=self._listen, daemon=True).start()

    def reason(self, wait: bool) -> dict | None:
        """Who ended first on another node, as that node says: {"who", "how", "code"}; None if none did."""
        deadline = time.monotonic() + REASON_SECONDS
        while wait and self.heard is None and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS / 10)
        return self.heard

    def tell(self, reason: dict) -> None:
        """Let the other launchers know; the first to tell is the one that counts."""
        self.told = True
        if self.store is None:
            return
        with suppress(RuntimeError):  # node 0 is gone: the others see that
            self.store.compare_set(self.KEY, "", json.dumps(reason))
            if self.is_first:
                time.sleep(2 * POLL_SECONDS)  # the store goes with this process

    def _listen(self) -> None:
        from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

        host, port = self.address
        try:
            # multi_tenant: on node 0 this is torchrun's own server, kept open until this launcher ends.
            self.store = TCPStore(
                host,
                port,
                is_master=self.is_first,
                timeout=timedelta(minutes=10),
                wait_for_workers=False,
                multi_tenant=True,
            )
        except RuntimeError:
            return  # torchrun meets the same, and says so
        while self.heard is None:
            time.sleep(POLL_SECONDS)
            if self.told:
                return
            try:
                if self.store.check([self.KEY]):
                    self.heard = json.loads(self.store.get(self.KEY))
            except RuntimeError:
                self.heard = {"who": f"node 0 ({host})", "how": "see its output", "code": 1}
        time.sleep(GRACE_SECONDS)
        _kill_children()


def _adopt_orphans() -> None:
    """Make this process the parent of what killed ranks leave behind, such as megatron-core's checkpoint writers."""
    PR_SET_CHILD_SUBREAPER = 36
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _end_children() -> None:
    """Kill all that is left; what a killed process leaves behind is a child of this one in turn."""
    deadline = time.monotonic() + 5  # a process stuck in a driver cannot be killed
    while _kill_children() and time.monotonic() < deadline:
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG) != (0, 0):
                pass
        time.sleep(0.01)


def _kill_children() -> bool:
    """Whether there were any."""
    children = _children()
    for pid in children:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return bool(children)


def _children() -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            # pid (name, which may hold spaces and brackets) state parent ...
            if int(path.read_text().rpartition(")")[2].split()[1]) == os.getpid():
                found.append(int(path.parent.name))
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
