"""Process groups and seeds of one run: `session(...)` opens them and closes them again."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel

from swiftlite.errors import UserError
from swiftlite.runtime import cpu, megatron_fixes
from swiftlite.runtime.device import Device, current_device


@contextmanager
def session(*, tensor_model_parallel_size: int = 1, seed: int = 42, timeout_minutes: int = 30) -> Iterator[Device]:
    """Connect the processes that torchrun started (or this one alone) and lay out megatron-core's groups.

    Raises:
        UserError: the world size is not a multiple of the model-parallel size.
    """
    device = current_device()
    cpu.install()
    megatron_fixes.install()
    # All three, as torchrun sets them: Kubernetes' PyTorchJob sets RANK for a process that is still to start torchrun.
    alone = not {"RANK", "LOCAL_RANK", "WORLD_SIZE"} <= os.environ.keys()
    world_size, rank = (1, 0) if alone else (int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"]))
    if world_size % tensor_model_parallel_size:
        raise UserError(
            f"--tensor_model_parallel_size {tensor_model_parallel_size} does not divide the {world_size} processes",
            f"start {tensor_model_parallel_size} processes, or a multiple: NPROC_PER_NODE={tensor_model_parallel_size}",
        )
    # A process alone needs no port: HashStore lives in its memory.
    dist.init_process_group(
        device.backend,
        store=dist.HashStore() if alone else None,  # pyright: ignore[reportPrivateImportUsage]
        rank=rank,
        world_size=world_size,
        timeout=timedelta(minutes=timeout_minutes),
    )
    try:
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=tensor_model_parallel_size,
            create_gloo_process_groups=device.is_cuda,  # on a CPU the groups are gloo already
            distributed_timeout_minutes=timeout_minutes,
        )
        torch.manual_seed(seed)
        tensor_parallel.model_parallel_cuda_manual_seed(seed)
        yield device
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
