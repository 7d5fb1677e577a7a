"""Start torchrun with the same argv for NPROC_PER_NODE, NNODES, NODE_RANK, MASTER_ADDR and MASTER_PORT.

This process is replaced by `elastic.py` (torchrun, which forwards signals to the ranks); torch is not imported here.
Inside torchrun (RANK, LOCAL_RANK and WORLD_SIZE are set) nothing is started.
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
    """The processes of this run, from the environment."""

    nproc_per_node: int = 1
    nnodes: int = 1
    node_rank: int = 0
    master_addr: str | None = None
    master_port: int | None = None
    rank: int | None = None
    """This process's rank when torchrun has started it already, else None."""
    started_world_size: int = 1
    """Processes that torchrun has started; 1 when it has not."""

    @property
    def world_size(self) -> int:
        return self.nproc_per_node * self.nnodes if self.rank is None else self.started_world_size

    @property
    def must_start(self) -> bool:
        return self.rank is None and self.world_size > 1


def read_environment(env: Mapping[str, str]) -> Processes:
    """Read the processes of this run from the environment.

    Raises:
        OptionError: all values that are not numbers or contradict each other.
    """
    problems: list[tuple[str, str]] = []

    def number(name: str, default: int | None, lowest: int) -> int | None:
        text = env.get(name, "")
        if not text:
            return default
        if not text.isdigit() or int(text) < lowest:
            problem = f"{name}={text} is not a whole number of at least {lowest}"
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
        problems.append((f"MASTER_PORT={port} is above 65535", f"export MASTER_PORT={DEFAULT_MASTER_PORT}"))
    if nnodes > 1 and not env.get("MASTER_ADDR"):
        problems.append((f"NNODES={nnodes}, but MASTER_ADDR is not set", "export the address of node 0 on every node"))
    if nnodes > 1 and not env.get("NODE_RANK"):
        hint = f"export 0 to {nnodes - 1}, another on every node"
        problems.append((f"NNODES={nnodes}, but NODE_RANK is not set", hint))
    if node_rank is not None and node_rank >= nnodes:
        problems.append((f"NODE_RANK={node_rank}, but NNODES={nnodes}", f"NODE_RANK goes from 0 to {nnodes - 1}"))
    if problems:
        raise OptionError(problems)
    return Processes(nproc, nnodes, node_rank or 0, env.get("MASTER_ADDR") or None, port)


def torchrun_command(processes: Processes, argv: list[str]) -> list[str]:
    """The command line that runs `swiftlite argv` in these processes."""
    is_one_node = processes.nnodes == 1
    default_port = 0 if is_one_node else DEFAULT_MASTER_PORT  # 0: elastic.py finds a free one
    return [
        sys.executable,
        "-m",
        "swiftlite.cli.elastic",
        f"--nproc-per-node={processes.nproc_per_node}",
        f"--nnodes={processes.nnodes}",
        f"--node-rank={processes.node_rank}",
        f"--master-addr={LOOPBACK if is_one_node else processes.master_addr}",
        f"--master-port={processes.master_port or default_port}",
        "-m",
        "swiftlite",
        *argv,
    ]


def threads_per_process(nproc_per_node: int) -> int:
    """An even share of the cores that this process may use, which a batch system may have cut."""
    return max(1, len(os.sched_getaffinity(0)) // nproc_per_node)


def start(processes: Processes, argv: list[str]) -> NoReturn:
    """Replace this process by torchrun.

    Raises:
        UserError: MASTER_PORT is taken on node 0.
    """
    if processes.node_rank == 0 and (processes.nnodes > 1 or processes.master_port is not None):
        _refuse_taken_port(processes.master_port or DEFAULT_MASTER_PORT)
    env = dict(os.environ)
    # torchrun would set 1 and warn; one process alone would take all cores.
    env.setdefault("OMP_NUM_THREADS", str(threads_per_process(processes.nproc_per_node)))
    env.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # what the hub has is here now; ranks only look it up
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
                f"MASTER_PORT={port} cannot be used here: {error.strerror}", f"export MASTER_PORT={_free_port()}", 2
            ) from None


def _free_port() -> int:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]
