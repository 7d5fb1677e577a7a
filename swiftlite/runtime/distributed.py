"""Define `session`, which opens and closes the process groups of a run."""

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
from swiftlite.runtime.presence import signs_of_life


@contextmanager
def session(
    layout: ParallelLayout | None = None,
    *,
    tied_embeddings: bool = False,
    seed: int = 42,
    num_distributed_optimizer_instances: int = 1,
    timeout_minutes: int = 10,
    deterministic: bool = False,
) -> Iterator[Mesh]:
    """Connect the processes that torchrun started, or only this process, and yield the active mesh of the layout.

    Args:
        layout: default: all processes are data-parallel.
        tied_embeddings: whether the last pipeline stage uses the embedding as its output layer.
        num_distributed_optimizer_instances: see `Mesh.create`.
        timeout_minutes: maximum time for which a rank waits for another rank in a collective operation, and for a sign
            of life of another rank in `wait_for_ranks`.
        deterministic: whether torch uses deterministic algorithms, and raises an error for operations that have none.

    Raises:
        OptionError: the layout does not fit the number of processes.
    """
    layout = layout or ParallelLayout()
    device = current_device()
    cpu.install()
    megatron_fixes.install()
    compat.quiet_known_warnings()
    # All three, because Kubernetes' PyTorchJob also sets RANK for the process that will start torchrun.
    alone = not {"RANK", "LOCAL_RANK", "WORLD_SIZE"} <= os.environ.keys()
    world_size, rank = 1, 0
    store = device_id = None
    if alone:
        store = dist.HashStore()  # in memory, without a port  # pyright: ignore[reportPrivateImportUsage]
    else:
        world_size, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
    if device.is_cuda:
        device_id = device.torch_device  # otherwise NCCL's first barrier can select another GPU
    check_layout(layout, world_size)
    if world_size == int(os.environ.get("LOCAL_WORLD_SIZE", 1)):
        # All ranks are on this machine, but by default gloo listens on the address of the host name, often a public
        # one.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        device.backend,
        store=store,
        rank=rank,
        world_size=world_size,
        timeout=timedelta(minutes=timeout_minutes),
        device_id=device_id,
    )
    try:
        mesh = Mesh.create(
            device,
            layout,
            tied_embeddings=tied_embeddings,
            num_distributed_optimizer_instances=num_distributed_optimizer_instances,
            timeout_minutes=timeout_minutes,
        )
        with mesh.active(), _deterministic(deterministic), signs_of_life(timeout_minutes):
            torch.manual_seed(seed)
            tensor_parallel.model_parallel_cuda_manual_seed(seed)
            yield mesh
    except BaseException:
        # Not after an error under torchrun: connections would close before this rank's traceback is printed, and the
        # launcher could report ranks that lost their connection.
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
    parallel_state.destroy_model_parallel()  # all groups that megatron-core created
    dist.destroy_process_group()  # the groups of all meshes
