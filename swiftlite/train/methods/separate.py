"""Compute values of single samples under a model, in any layout."""

from collections.abc import Sequence
from itertools import accumulate

import torch
import torch.distributed as dist
from torch import nn

from swiftlite.data.sample import Sample
from swiftlite.model.forward import run_batches
from swiftlite.model.forward_step import ForwardStep
from swiftlite.model.ranks import broadcast_from_last_stage
from swiftlite.runtime.mesh import Mesh
from swiftlite.train.batches.micro_batches import Batches, Collated


@torch.no_grad()
def values_of(
    chunks: Sequence[nn.Module],
    mesh: Mesh,
    batches: Batches,
    samples: Sequence[Sample],
    sizes: Sequence[int],
    forward_step: ForwardStep,
) -> torch.Tensor:
    """Return the values of all samples, concatenated, float32 on all ranks of the mesh. Collective over the mesh.

    Each sample is a separate micro-batch, so that its values do not depend, bit for bit, on other samples.

    Args:
        chunks: the model's stages on this rank. They stay in evaluation mode.
        batches: splits rows over the ranks of `mesh`.
        sizes: number of values of each sample.
        forward_step: its loss function returns, as the third result, the values of the only sample of a micro-batch.
            Values behind those of the sample, of padding, are ignored.
    """
    firsts = range(0, len(samples), mesh.dp.size())
    mine = [first + mesh.dp.rank() for first in firsts]  # an index past the end is computed as padding
    micro_batches = Collated(batches.collate, [samples[index : index + 1] for index in mine])
    for chunk in chunks:
        chunk.eval()
    with mesh.active():
        parts = run_batches(chunks, mesh, micro_batches, forward_step, forward_only=True)
    ends = [*accumulate(sizes)]
    found = torch.zeros(sum(sizes), device=mesh.device.torch_device)
    for index, part in zip(mine, parts, strict=False):  # empty before the last stage
        if index < len(samples):
            found[ends[index] - sizes[index] : ends[index]] = part[: sizes[index]]
    dist.all_reduce(found, group=mesh.dp)  # one rank has the values of a sample, the others zero
    return broadcast_from_last_stage(found, mesh)
