"""Process groups and seeds of one run: `session(...)` opens them and closes them again."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel

from swiftlite.args.fields import ParallelLayout
from swiftlite.errors import OptionError
from swiftlite.plan.layout import mtp_pipeline_rank, num_virtual_stages, process_problems
from swiftlite.runtime import compat, cpu, megatron_fixes
from swiftlite.runtime.device import current_device
from swiftlite.runtime.mesh import Mesh, current_mesh


@contextmanager
def session(
    layout: ParallelLayout | None = None, *, tied_embeddings: bool = False, seed: int = 42, timeout_minutes: int = 10
) -> Iterator[Mesh]:
    """Connect the processes that torchrun started (or this one alone) and lay out megatron-core's groups.

    Args:
        layout: unset: all processes are data-parallel.
        tied_embeddings: the last pipeline stage uses the embedding as its output layer.
        timeout_minutes: longest wait of one rank for another.

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
    if problems := process_problems(layout, world_size):
        raise OptionError(problems)
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
            tensor_model_parallel_size=layout.tensor_model_parallel_size,
            pipeline_model_parallel_size=layout.pipeline_model_parallel_size,
            virtual_pipeline_model_parallel_size=num_virtual_stages(layout),
            context_parallel_size=layout.context_parallel_size,
            expert_model_parallel_size=layout.expert_model_parallel_size,
            expert_tensor_parallel_size=layout.expert_tensor_parallel_size,
            get_embedding_ranks=partial(_embedding_ranks, layout=layout, tied=tied_embeddings),
            create_gloo_process_groups=device.is_cuda,  # on a CPU the groups are gloo already
            distributed_timeout_minutes=timeout_minutes,
        )
        torch.manual_seed(seed)
        tensor_parallel.model_parallel_cuda_manual_seed(seed)
        yield current_mesh(device, layout)
    except BaseException:
        # Not under torchrun: connections would close before this rank's traceback is out, and the launcher could take
        # the ranks that lost theirs for the culprits.
        if alone:
            _close()
        raise
    _close()


def _close() -> None:
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


def _embedding_ranks(pp_ranks: Sequence[int], pp_size: int | None = None, *, layout: ParallelLayout, tied: bool):
    """Ranks of one pipeline that hold the embedding's numbers: the first, the one with MTP, the last if it is tied.

    megatron-core would take the first and the last, and with MTP on a stage of its own add the gradient of the
    embedding to that of the output layer, in silence (parallel_state.py:525, finalize_model_grads.py:146 of 0.16.1).
    """
    places = {0, mtp_pipeline_rank(layout)} | ({len(pp_ranks) - 1} if tied else set())
    return [pp_ranks[place] for place in sorted(places)]
