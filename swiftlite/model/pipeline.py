"""Run micro-batches through the pipeline stages of a mesh, with megatron-core's schedules."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.pipeline_parallel.schedules import get_schedule_table
from megatron.core.utils import get_attr_wrapped_model, get_model_config

from swiftlite.model.forward_step import ForwardStep
from swiftlite.plan.layout import length_divisor, num_virtual_stages, states_sent
from swiftlite.runtime.mesh import Mesh

Shape = tuple[int, int, int]
"""Shape of a tensor sent between stages (`StageStates.to_wire`, `SentOutputs.append`): positions, rows, hidden size."""


def run_pipeline(
    model: Sequence[torch.nn.Module],
    mesh: Mesh,
    forward_step: ForwardStep,
    iterators: Sequence[Iterator[Any]],
    *,
    shapes: Sequence[Sequence[int]],
    num_items: Sequence[int] = (),
    forward_only: bool,
    tells_shapes: bool = False,
    **options: Any,
) -> list[Any]:
    """Run micro-batches through all stages, and their gradients back unless `forward_only`.

    Args:
        model: the chunks of this rank, one per virtual pipeline stage.
        iterators: one per chunk, because each iterates over the micro-batches separately.
        shapes: numbers of rows and of tokens per row of each micro-batch, before the split over context-parallel ranks.
        num_items: number of items of each micro-batch, which are the inputs of a tower; empty without items.
        tells_shapes: whether stages send a shape before each tensor, for which the host of the receiver waits. Required
            for decoding, which sends other states than training (`model/decode.py`).
        options: further options of megatron-core's schedules.

    Returns:
        For each micro-batch, the statistics that the loss function of `forward_step` returns; empty before the last
            stage.
    """
    config = get_model_config(model[0])
    schedule = get_forward_backward_func(mesh.pp.size(), num_virtual_stages(mesh.layout))
    if mesh.pp.size() == 1 or tells_shapes:
        communicator = P2PCommunicator(mesh.pp, config)
    else:
        communicator = _KnownShapes(mesh.pp, config, *_crossing(model, mesh, shapes, num_items or [0] * len(shapes)))
    num_rows, length = shapes[0]  # required arguments, which are not used with variable_seq_lengths
    return schedule(
        forward_step_func=forward_step,
        data_iterator=list(iterators) if len(iterators) > 1 else iterators[0],
        model=list(model),
        num_microbatches=len(shapes),
        micro_batch_size=num_rows,
        seq_length=length,
        forward_only=forward_only,
        # megatron-core requires both or neither; without them it uses global process groups.
        p2p_communicator=communicator,
        pg_collection=mesh.groups,
        **options,
    )


class _KnownShapes(P2PCommunicator):
    """megatron-core's communicator, without the messages that announce the shape of every tensor.

    megatron-core's class exchanges shapes before every tensor, and waits for the GPU twice
    (p2p_communication.py:214-242 of 0.16.1).

    Args:
        received: shapes of the states from the previous rank, in order.
        sent: shapes of the states to the next rank.
        gradients: shapes of the gradients from the next rank.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        config: ModelParallelConfig,
        received: Iterable[Shape],
        sent: Iterable[Shape],
        gradients: Iterable[Shape],
    ):
        super().__init__(group, config)
        self._received, self._sent, self._gradients = iter(received), iter(sent), iter(gradients)

    def _communicate_shapes(
        self,
        tensor_send_next: torch.Tensor | None,
        tensor_send_prev: torch.Tensor | None,
        recv_prev: bool,
        recv_next: bool,
    ) -> tuple[Shape | None, Shape | None]:
        if tensor_send_next is not None:  # NCCL does not detect a receiver that expects another shape
            found, expected = tuple(tensor_send_next.shape), next(self._sent, None)
            assert found == expected, f"states of shape {found}, and the next stage expects {expected}"
        received = next(self._received) if recv_prev else None
        gradient = next(self._gradients) if recv_next else None
        return received, gradient


def _crossing(
    model: Sequence[torch.nn.Module], mesh: Mesh, shapes: Sequence[Sequence[int]], num_items: Sequence[int]
) -> tuple[list[Shape], list[Shape], list[Shape]]:
    """Return the arguments of `_KnownShapes` (received, sent, gradients) for all micro-batches.

    Each rank computes pairs (micro-batch, chunk) in the order of megatron-core's schedule table, in the backward pass
    with reversed chunks, and sends each result immediately. For example, with two ranks of two chunks each, chunk 1 of
    rank 0 receives the output of chunk 0 of rank 1. Chunk 1 of rank 1 computes the loss and sends nothing.
    """
    config: Any = get_model_config(model[0])
    heads: Any = get_attr_wrapped_model(model[0], "heads", allow_none=False)
    drafting: Any = get_attr_wrapped_model(model[0], "drafting", allow_none=False)
    sent_outputs: Any = get_attr_wrapped_model(model[0], "sent_outputs", allow_none=False)
    sharing: Any = get_attr_wrapped_model(model[0], "sharing", allow_none=False)
    before_norm, features = drafting.takes_before_norm, heads.features
    num_states = states_sent(mesh.layout, config.num_layers, heads.drafts, before_norm, features)
    table = get_schedule_table(len(shapes), len(model), config.microbatch_group_size_per_vp_stage)
    backward = [(micro_batch, len(model) - 1 - chunk) for micro_batch, chunk in table]
    size, rank = mesh.pp.size(), mesh.pp.rank()

    def made_by(stages: Iterable[tuple[int, int]]) -> list[Shape]:
        """Return the shapes of the outputs of pairs (micro-batch, stage).

        The last stage sends nothing; -1 is the stage before the first one.
        """
        made = []
        for micro_batch, stage in stages:
            if 0 <= stage < len(num_states):
                num_rows, length = shapes[micro_batch]
                number = num_states[stage] + sharing.num_blocks(stage)
                num_positions = number * (length // length_divisor(mesh.layout))
                num_positions += sent_outputs.num_positions(stage, num_items[micro_batch], num_rows)
                made.append((num_positions, num_rows, config.hidden_size))
        return made

    before, behind = (rank - 1) % size, (rank + 1) % size
    received = made_by((micro_batch, chunk * size + before) for micro_batch, chunk in table)
    sent = made_by((micro_batch, chunk * size + rank) for micro_batch, chunk in table)
    gradients = made_by((micro_batch, chunk * size + behind - 1) for micro_batch, chunk in backward)
    return received, sent, gradients
