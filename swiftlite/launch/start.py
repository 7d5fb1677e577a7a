"""Start torchrun with the command's argv, as NPROC_PER_NODE, NNODES, NODE_RANK, MASTER_ADDR and MASTER_PORT specify.

NNODES is a number, or MIN:MAX as in torchrun: a run with --max_restarts continues with MIN to MAX nodes, and further
nodes wait as spares.

`elastic.py` (torchrun, which forwards signals to the ranks) replaces this process; torch is not imported here. Inside
torchrun, where RANK, LOCAL_RANK and WORLD_SIZE are set, nothing is started.
"""

import os
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from swiftlite.base.errors import OptionError, UserError
from swiftlite.runtime import progress

# Environment variable with the allowed numbers of nodes, separated by commas; unset without --max_restarts.
NODE_COUNTS = "SWIFTLITE_NODE_COUNTS"
DEFAULT_MASTER_PORT = 29500
LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class Processes:
    """The processes of this run, as specified by environment variables."""

    nproc_per_node: int = 1
    nnodes: int = 1
    node_rank: int = 0
    master_addr: str | None = None
    master_port: int | None = None
    rank: int | None = None
    """Rank of this process if torchrun started it; otherwise None."""
    started_world_size: int = 1
    """Number of processes that torchrun started; 1 without torchrun."""
    smallest: int | None = None
    """MIN of NNODES=MIN:MAX, whose MAX is `nnodes`; None if NNODES is a number."""

    @property
    def min_nodes(self) -> int:
        return self.smallest or self.nnodes

    @property
    def nnodes_text(self) -> str:
        """The value of NNODES."""
        return str(self.nnodes) if self.smallest is None else f"{self.smallest}:{self.nnodes}"

    @property
    def has_several_nodes(self) -> bool:
        """Whether other nodes can exist. With NNODES=1:1, they are spares."""
        return self.nnodes > 1 or self.smallest is not None

    @property
    def world_size(self) -> int:
        if self.rank is None:
            return self.nproc_per_node * self.nnodes
        return self.started_world_size

    def must_start(self, max_restarts: int = 0) -> bool:
        """Return whether torchrun has to be started. With restarts, it also starts a single process."""
        return self.rank is None and (self.world_size > 1 or self.has_several_nodes or max_restarts > 0)


@dataclass(frozen=True)
class Restarts:
    """The settings of restarts after failures.

    Attributes:
        most: maximum number of restarts.
        output_dir: directory of the run.
        node_counts: allowed numbers of nodes, ascending.
    """

    most: int
    output_dir: Path
    node_counts: list[int]


def read_environment(env: Mapping[str, str]) -> Processes:
    """Read the processes of this run from the environment.

    Raises:
        OptionError: values are invalid or contradictory; the error lists all of them.
    """
    problems: list[tuple[str, str]] = []

    def number(name: str, default: int | None, lowest: int) -> int | None:
        text = env.get(name, "")
        if not text:
            return default
        if not text.isdigit() or int(text) < lowest:
            problem = f"invalid value for {name}: {text} is not an integer of at least {lowest}"
            problems.append((problem, f"export {name}=NUMBER, or unset it"))
            return default
        return int(text)

    if all(env.get(name) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE")):
        rank = number("RANK", 0, 0)
        size = number("WORLD_SIZE", 1, 1)
        if problems:
            raise OptionError(problems)
        return Processes(rank=rank, started_world_size=size or 1)

    nproc = number("NPROC_PER_NODE", 1, 1) or 1
    smallest, nnodes = None, 1
    if ":" in env.get("NNODES", ""):
        smallest, nnodes = _node_range(env["NNODES"], problems)
    else:
        nnodes = number("NNODES", 1, 1) or 1
    several = nnodes > 1 or smallest is not None
    node_rank = number("NODE_RANK", None, 0)
    port = number("MASTER_PORT", None, 1)
    if port is not None and port > 65535:
        problems.append((f"MASTER_PORT={port} must be at most 65535", f"export MASTER_PORT={DEFAULT_MASTER_PORT}"))
    given = env.get("NNODES")
    if several and not env.get("MASTER_ADDR"):
        hint = "export MASTER_ADDR=ADDRESS of node 0 on every node"
        problems.append((f"NNODES={given} requires MASTER_ADDR", hint))
    if several and not env.get("NODE_RANK"):
        hint = f"export NODE_RANK=0 to {nnodes - 1}, a different one on every node"
        if smallest is not None:
            # With a range, numbers can be larger than the number of nodes that run: further nodes are spares.
            hint = "export NODE_RANK=0 on the node of MASTER_ADDR, and a different larger number on every other node"
        problems.append((f"NNODES={given} requires NODE_RANK", hint))
    if node_rank is not None and node_rank >= nnodes and smallest is None:  # with MIN:MAX, it is a spare
        problem = f"NODE_RANK={node_rank} must be below NNODES={nnodes}"
        problems.append((problem, f"export NODE_RANK=0 to {nnodes - 1}"))
    if problems:
        raise OptionError(problems)
    return Processes(nproc, nnodes, node_rank or 0, env.get("MASTER_ADDR") or None, port, smallest=smallest)


def _node_range(text: str, problems: list[tuple[str, str]]) -> tuple[int | None, int]:
    """Return MIN and MAX of NNODES=MIN:MAX. Add a problem if the value is invalid, and return those of one node."""
    least, _, most = text.partition(":")
    if least.isdigit() and most.isdigit() and 1 <= int(least) <= int(most):
        return int(least), int(most)
    problem = f"invalid value for NNODES: {text} is not MIN:MAX with 1 <= MIN <= MAX"
    problems.append((problem, "export NNODES=NUMBER, or for example NNODES=3:4 with --max_restarts"))
    return None, 1


def check_restarts(processes: Processes, max_restarts: int, *, is_parallel: bool) -> None:
    """Check that --max_restarts fits the environment.

    Raises:
        UserError: another launcher started this process, or NNODES=MIN:MAX is given without --max_restarts.
    """
    if processes.rank is not None:
        progress.check_launcher(max_restarts)
    elif processes.smallest is not None and is_parallel and not max_restarts:
        problem = f"NNODES={processes.nnodes_text} requires --max_restarts"
        raise UserError(problem, f"add --max_restarts 3, or export NNODES={processes.nnodes}", 2)


def torchrun_command(processes: Processes, argv: list[str], max_restarts: int = 0) -> list[str]:
    """Return the command line with which torchrun runs `swiftlite argv` in these processes."""
    address, default_port = processes.master_addr, DEFAULT_MASTER_PORT
    restarts = []
    if max_restarts:
        restarts = [f"--max-restarts={max_restarts}"]
    if not processes.has_several_nodes:
        address, default_port = LOOPBACK, 0  # 0: elastic.py selects a free port
    return [
        sys.executable,
        "-m",
        "swiftlite.launch.elastic",
        f"--nproc-per-node={processes.nproc_per_node}",
        f"--nnodes={processes.nnodes_text}",
        f"--node-rank={processes.node_rank}",
        f"--master-addr={address}",
        f"--master-port={processes.master_port or default_port}",
        *restarts,
        "-m",
        "swiftlite",
        *argv,
    ]


def threads_per_process(nproc_per_node: int) -> int:
    """Return an equal share of the cores that this process can use. A batch system may limit these cores."""
    return max(1, len(os.sched_getaffinity(0)) // nproc_per_node)


def start(processes: Processes, argv: list[str], restarts: Restarts | None = None) -> NoReturn:
    """Replace this process by torchrun.

    Args:
        restarts: None: a failure ends the run.

    Raises:
        UserError: MASTER_PORT is in use on node 0.
    """
    # Only node 0 listens there. torchrun would report a taken port after it has imported torch, with a traceback.
    if processes.node_rank == 0 and (processes.has_several_nodes or processes.master_port is not None):
        _refuse_taken_port(processes.master_port or DEFAULT_MASTER_PORT)
    env = dict(os.environ)
    # Without this variable, torchrun would set 1 and warn. Outside of torchrun, each process would use all cores.
    env.setdefault("OMP_NUM_THREADS", str(threads_per_process(processes.nproc_per_node)))
    env.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # downloads are complete; ranks only read the cache
    # execve replaces the process without running Python's exit, which would write these buffers.
    sys.stdout.flush()
    sys.stderr.flush()
    max_restarts = 0
    if restarts:
        max_restarts = restarts.most
        env[progress.FILE] = str(restarts.output_dir.absolute() / progress.NAME)
        env[NODE_COUNTS] = ",".join(map(str, restarts.node_counts))
    os.execve(sys.executable, torchrun_command(processes, argv, max_restarts), env)


def _refuse_taken_port(port: int) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as error:
            raise UserError(
                f"MASTER_PORT={port} cannot be used: {error.strerror}", f"export MASTER_PORT={_free_port()}", 2
            ) from None


def _free_port() -> int:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]
