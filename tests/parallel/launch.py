"""Run a function in several gloo processes on this machine, as torchrun would, and return the results."""

import gc
import os
import pickle
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]
from torch.multiprocessing.spawn import start_processes

from tests.forked import forkserver


def launch(num_processes: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """Call `function(*args)` once per process. torchrun's environment variables are set; no process group is open yet.

    Args:
        function: a function at the top level of a module, because each process imports the module.
        args: arguments that can be pickled.

    Returns:
        The results in order of rank; they must be picklable.

    Raises:
        ProcessRaisedException: a process failed; the error contains the traceback of the first failed process. The
            other processes are ended.
    """
    store = open_store()
    with tempfile.TemporaryDirectory() as directory:
        method = "spawn"
        if not torch.cuda.is_available():  # CUDA cannot be used in a fork of a process that has used it
            forkserver()  # which start_processes takes by its name
            method = "forkserver"
        arguments = (rank_environments(num_processes, store.port), directory, function, args)
        start_processes(_run, arguments, nprocs=num_processes, start_method=method)
        return [pickle.loads((Path(directory) / str(rank)).read_bytes()) for rank in range(num_processes)]


def open_store() -> TCPStore:
    """Return a store with which the processes of one session find each other.

    This process holds it, as torchrun does.
    """
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def prepare_session(port: int) -> None:
    """Prepare the next session of a process that opens several sessions: set its port, and free the previous session.

    Models and their process groups refer to each other in cycles. Each process group that is not freed keeps its
    threads and sockets.
    """
    gc.collect()
    gc.freeze()
    os.environ["MASTER_PORT"] = str(port)


def rank_environments(num_processes: int, port: int) -> list[dict[str, str]]:
    """Return the environment variables that torchrun sets for each process, with the port of `open_store`."""
    return [
        {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(num_processes),
            "LOCAL_WORLD_SIZE": str(num_processes),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }
        for rank in range(num_processes)
    ]


def _run(
    rank: int, environments: list[dict[str, str]], directory: str, function: Callable[..., Any], args: tuple
) -> None:
    gc.freeze()  # otherwise every collection visits all modules, which takes half a second
    os.environ |= environments[rank]
    torch.set_num_threads(1)  # the processes share this machine's cores
    result = function(*args)
    (Path(directory) / str(rank)).write_bytes(pickle.dumps(result))
