"""megatron-core's schedules: micro-batches through the pipeline stages of a mesh, forward and backward."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.utils import get_model_config

from swiftlite.plan.layout import num_virtual_stages
from swiftlite.runtime.mesh import Mesh

ForwardStep = Callable[[Iterator[Any], torch.nn.Module], tuple[Any, Callable]]
"""What a schedule calls for each micro-batch and chunk: (iterator, chunk) -> (the chunk's output, a function of the
model's output that gives what is to be minimised, its number of targets, and anything else)."""


def run_pipeline(
    model: Sequence[torch.nn.Module],
    mesh: Mesh,
    forward_step: ForwardStep,
    iterators: Sequence[Iterator[Any]],
    *,
    num_micro_batches: int,
    micro_batch_size: int,
    length: int,
    forward_only: bool,
    **options: Any,
) -> list[Any]:
    """Send micro-batches through all stages, and unless `forward_only` their gradients back.

    Args:
        model: the chunks of this rank, one per virtual pipeline stage.
        iterators: one for each chunk, since each walks over the micro-batches for itself.
        micro_batch_size, length: rows and tokens of a micro-batch. Stages send each other the shape of every one, so
            those of any will do.
        options: further ones of megatron-core's schedules.

    Returns:
        What `forward_step`'s function gave beside the loss, for each micro-batch; nothing before the last stage.
    """
    schedule = get_forward_backward_func(mesh.pp.size(), num_virtual_stages(mesh.layout))
    return schedule(
        forward_step_func=forward_step,
        data_iterator=list(iterators) if len(iterators) > 1 else iterators[0],
        model=list(model),
        num_microbatches=num_micro_batches,
        micro_batch_size=micro_batch_size,
        seq_length=length,
        forward_only=forward_only,
        # Both or neither, or megatron-core refuses: it would take the groups from its globals.
        p2p_communicator=P2PCommunicator(mesh.pp, get_model_config(model[0])),
        pg_collection=mesh.groups,
        **options,
    )
