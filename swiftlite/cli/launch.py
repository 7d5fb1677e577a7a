"""Start torchrun with the command's argv, as NPROC_PER_NODE, NNODES, NODE_RANK, MASTER_ADDR and MASTER_PORT specify.

`elastic.py` (torchrun, which forwards signals to the ranks) replaces this process; torch is not imported here. Inside
torchrun, where RANK, LOCAL_RANK and WORLD_SIZE are set, nothing is started.
"""

import os
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NoReturn

from swiftlite.errors import OptionError, UserError

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

    @property
    def world_size(self) -> int:
        if self.rank is None:
            return self.nproc_per_node * self.nnodes
        return self.started_world_size

    @property
    def must_start(self) -> bool:
        return self.rank is None and self.world_size > 1


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
    nnodes = number("NNODES", 1, 1) or 1
    node_rank = number("NODE_RANK", None, 0)
    port = number("MASTER_PORT", None, 1)
    if port is not None and port > 65535:
        problems.append((f"MASTER_PORT={port} must be at most 65535", f"export MASTER_PORT={DEFAULT_MASTER_PORT}"))
    if nnodes > 1 and not env.get("MASTER_ADDR"):
        hint = "export MASTER_ADDR=ADDRESS of node 0 on every node"
        problems.append((f"NNODES={nnodes} requires MASTER_ADDR", hint))
    if nnodes > 1 and not env.get("NODE_RANK"):
        hint = f"export NODE_RANK=0 to {nnodes - 1}, a different one on every node"
        problems.append((f"NNODES={nnodes} requires NODE_RANK", hint))
    if node_rank is not None and node_rank >= nnodes:
        problem = f"NODE_RANK={node_rank} must be below NNODES={nnodes}"
        problems.append((problem, f"export NODE_RANK=0 to {nnodes - 1}"))
    if problems:
        raise OptionError(problems)
    return Processes(nproc, nnodes, node_rank or 0, env.get("MASTER_ADDR") or None, port)


def torchrun_command(processes: Processes, argv: list[str]) -> list[str]:
    """Return the command line with which torchrun runs `swiftlite argv` in these processes."""
    address, default_port = processes.master_addr, DEFAULT_MASTER_PORT
    if processes.nnodes == 1:
        address, default_port = LOOPBACK, 0  # 0: elastic.py selects a free port
    return [
        sys.executable,
        "-m",
        "swiftlite.cli.elastic",
        f"--nproc-per-node={processes.nproc_per_node}",
        f"--nnodes={processes.nnodes}",
        f"--node-rank={processes.node_rank}",
        f"--master-addr={address}",
        f"--master-port={processes.master_port or default_port}",
        "-m",
        "swiftlite",
        *argv,
    ]


def threads_per_process(nproc_per_node: int) -> int:
    """Return an equal share of the cores that this process can use. A batch system may limit these cores."""
    return max(1, len(os.sched_getaffinity(0)) // nproc_per_node)


def start(processes: Processes, argv: list[str]) -> NoReturn:
    """Replace this process by torchrun.

    Raises:
        UserError: MASTER_PORT is in use on node 0.
    """
    if processes.node_rank == 0 and (processes.nnodes > 1 or processes.master_port is not None):
        _refuse_taken_port(processes.master_port or DEFAULT_MASTER_PORT)
    env = dict(os.environ)
    # Without this variable, torchrun would set 1 and warn. Outside of torchrun, each process would use all cores.
    env.setdefault("OMP_NUM_THREADS", str(threads_per_process(processes.nproc_per_node)))
    env.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # downloads are complete; ranks only read the cache
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(sys.executable, torchrun_command(processes, argv), env)


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
