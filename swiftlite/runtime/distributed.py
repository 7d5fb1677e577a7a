"""One run's processes: `session(...)` connects them, and parts them again."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel

from swiftlite.args.fields import ParallelLayout
from swiftlite.runtime import compat, cpu, megatron_fixes
from swiftlite.runtime.device import current_device
from swiftlite.runtime.mesh import Mesh, check_layout


@contextmanager
def session(
    layout: ParallelLayout | None = None,
    *,
    tied_embeddings: bool = False,
    seed: int = 42,
    timeout_minutes: int = 10,
    deterministic: bool = False,
) -> Iterator[Mesh]:
    """Connect the processes that torchrun started (or this one alone); gives the mesh of the layout, which is active.

    Args:
        layout: unset: all processes are data-parallel.
        tied_embeddings: as for `Mesh.create`.
        timeout_minutes: longest wait of one rank for another.
        deterministic: torch adds in one order wherever it can, and raises where it cannot.

    Raises:
        OptionError: the layout does not fit the number of processes.
    """
    layout = layout or ParallelLayout()
    device = current_device()
    cpu.install()
    megatron_fixes.install()
    compat.quiet_known_warnings()
    # All three, as torchrun sets them: Kubernetes' PyTorchJob sets RANK for a process that is still to start torchrun.
    alone = not {"RANK", "LOCAL_RANK", "WORLD_SIZE"} <= os.environ.keys()
    world_size, rank = (1, 0) if alone else (int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"]))
    check_layout(layout, world_size)
    if world_size == int(os.environ.get("LOCAL_WORLD_SIZE", 1)):
        # All ranks are on this machine. Of itself gloo listens where the machine's name leads, often to the network.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    # A process alone needs no port: HashStore lives in its memory.
    dist.init_process_group(
        device.backend,
        store=dist.HashStore() if alone else None,  # pyright: ignore[reportPrivateImportUsage]
        rank=rank,
        world_size=world_size,
        timeout=timedelta(minutes=timeout_minutes),
        # Or NCCL's first barrier would guess another GPU.
        device_id=device.torch_device if device.is_cuda else None,
    )
    try:
        mesh = Mesh.create(device, layout, tied_embeddings=tied_embeddings, timeout_minutes=timeout_minutes)
        with mesh.active(), _deterministic(deterministic):
            torch.manual_seed(seed)
            tensor_parallel.model_parallel_cuda_manual_seed(seed)
            yield mesh
    except BaseException:
        # Not under torchrun: connections would close before this rank's traceback is out, and the launcher could take
        # the ranks that lost theirs for the culprits.
        if alone:
            _close()
        raise
    _close()


@contextmanager
def _deterministic(is_wanted: bool) -> Iterator[None]:
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(before or is_wanted)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def _close() -> None:
    parallel_state.destroy_model_parallel()  # megatron-core's own list of all groups that it made
    dist.destroy_process_group()  # the groups of all meshes
