"""Run micro-batches through the model."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from swiftlite.data.batch import Batch
from swiftlite.model.context_parallel import shard_sequence
from swiftlite.model.forward_step import ForwardStep
from swiftlite.model.gpt import Losses
from swiftlite.model.inputs import ModelInputs, Target
from swiftlite.model.loss.balance import Balance
from swiftlite.model.pipeline import run_pipeline
from swiftlite.runtime.device import on_device
from swiftlite.runtime.mesh import Mesh


def forward(model: torch.nn.Module, batch: Batch, balance: Balance | None = None):
    """Run a micro-batch through the model, and return its `Losses`. Before the last pipeline stage, return the states
    to send.

    Args:
        balance: load balance of the global batch; without it routers have no load-balancing loss.
    """
    return model(ModelInputs.of(batch, balance), Target.of(batch))


def forward_step_of(
    compute: Callable[[Losses, Batch], tuple[torch.Tensor, torch.Tensor, torch.Tensor]],
    balance: Balance | None = None,
    *,
    with_entropy: bool = False,
    trains_entropy: bool = False,
) -> ForwardStep:
    """Return the forward step that runs each micro-batch through the model.

    Args:
        compute: returns for a micro-batch the loss summed over targets, the number of these targets, and the
            statistics.
        balance: load balance of the global batch; without it routers have no load-balancing loss.
        with_entropy: whether the trunk's losses have the entropy of its distributions.
        trains_entropy: whether this entropy has a gradient.
    """

    def forward_step(batches: Iterator[Batch], model: torch.nn.Module) -> tuple[object, Callable]:
        batch = next(batches)
        target = Target.of(batch, with_entropy=with_entropy, trains_entropy=trains_entropy)
        output = model(ModelInputs.of(batch, balance), target)
        return output, lambda losses: compute(losses, batch)

    return forward_step


def shard(batch: Batch, rank: int, size: int) -> Batch:
    """Return the part of a batch for context-parallel rank `rank` of `size`, which consists of two chunks of each
    sequence."""
    return batch.map(partial(shard_sequence, dim=-1, rank=rank, size=size, cu_seqlens=batch.cu_seqlens))


def on_this_rank(batches: Iterable[Batch], mesh: Mesh) -> Iterator[Batch]:
    """Yield each batch on the device, reduced to the part of each row that this context-parallel rank computes.

    Labels stay on the host. There, the number of labels is known without waiting for the device
    (`model.loss.losses.select`).
    """
    move = partial(on_device, device=mesh.device.torch_device)
    for batch in batches:
        part = shard(batch, mesh.cp.rank(), mesh.cp.size())
        moved = part.map(move).map_per_sequence(move)
        yield replace(moved, labels_KBS=part.labels_KBS, on_host=part)


GROUP_PER_STAGE = 8
"""Micro-batches of a group per pipeline stage. Between groups a pipeline is empty: with this number for at most an
eighth of the time."""
_check: ContextVar[Callable[[], None] | None] = ContextVar("check", default=None)


@contextmanager
def between_groups(check: Callable[[], None]) -> Iterator[None]:
    """Let `run_batches` call a function before each group of micro-batches without gradients, in this context.

    The function is called on all ranks, and may raise an exception on all of them.
    """
    token = _check.set(check)
    try:
        yield
    finally:
        _check.reset(token)


def run_batches(
    model: Sequence[nn.Module], mesh: Mesh, batches: Sequence[Batch], forward_step: ForwardStep, *, forward_only: bool
) -> list[Any]:
    """Send this rank's micro-batches through its chunks of the model with `run_pipeline`, and return the result.

    With `forward_only`, work can be ended within a context of `between_groups`.
    """
    # One per virtual stage: megatron-core's interleaved schedule advances each separately.
    iterators = [on_this_rank(batches, mesh) for _ in model]
    shapes, num_items = [], []
    for batch in batches:  # once, because lazy batches are collated each time
        shapes.append(batch.position_ids_BS.shape)
        num_items.append(batch.num_items)
    check, size = _check.get(), len(shapes)
    if len(mesh.ranks) < dist.get_world_size():
        check = None  # which all ranks of the job must call
    if check and forward_only:
        size = GROUP_PER_STAGE * mesh.pp.size()
    results = []
    for first in range(0, len(shapes), max(size, 1)):
        if check and forward_only:
            check()
        group = slice(first, first + size)
        results += run_pipeline(
            model,
            mesh,
            forward_step,
            iterators,
            shapes=shapes[group],
            num_items=num_items[group],
            forward_only=forward_only,
        )
    return results
