"""Compute the log-probability of every token of completions under a model, in any layout.

Shapes: B rows, S tokens of a row on this context-parallel rank.
"""

from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from swiftlite.data.batch import Batch
from swiftlite.data.sample import Sample
from swiftlite.model.forward import forward_step_of, run_batches
from swiftlite.model.gpt import Losses
from swiftlite.model.loss.losses import IGNORE_INDEX
from swiftlite.model.ranks import broadcast_from_last_stage
from swiftlite.runtime.device import on_device
from swiftlite.runtime.mesh import Mesh
from swiftlite.train.batches.micro_batches import Batches, Collated


@torch.no_grad()
def token_log_probabilities(
    chunks: Sequence[nn.Module], mesh: Mesh, batches: Batches, samples: Sequence[Sample]
) -> list[np.ndarray]:
    """Return for each sample the log-probabilities of its labels, float32, in order; collective over the mesh.

    Each sample is a separate micro-batch, so that its result does not depend, bit for bit, on other samples.

    Args:
        chunks: the model's stages on this rank. They stay in evaluation mode.
        batches: splits rows over the ranks of `mesh`.
    """
    size = mesh.dp.size()
    firsts = range(0, len(samples), size)
    mine = [first + mesh.dp.rank() for first in firsts]  # an index past the end is computed as padding
    micro_batches = Collated(batches.collate, [samples[index : index + 1] for index in mine])
    for chunk in chunks:
        chunk.eval()

    def compute(losses: Losses, batch: Batch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        log_p_BS = -losses.main.loss_BS
        one = torch.ones((), dtype=torch.int32, device=log_p_BS.device)
        return log_p_BS.sum(), one, _by_position(log_p_BS, batch, mesh)

    with mesh.active():
        parts = run_batches(chunks, mesh, micro_batches, forward_step_of(compute), forward_only=True)
    ends = np.cumsum([len(sample) for sample in samples])
    found = torch.zeros(int(ends[-1]), device=mesh.device.torch_device)
    for index, part in zip(mine, parts, strict=False):  # empty before the last stage
        if index < len(samples):
            length = len(samples[index])
            found[ends[index] - length : ends[index]] = part[:length]
    dist.all_reduce(found, group=mesh.dp)  # one rank has a token's value, the others zero
    numbers = broadcast_from_last_stage(found, mesh).cpu().numpy()
    results = []
    for sample, end in zip(samples, ends, strict=True):
        of_sample = numbers[end - len(sample) : end]
        results.append(of_sample[sample.labels != IGNORE_INDEX])
    return results


def _by_position(log_p_BS: torch.Tensor, batch: Batch, mesh: Mesh) -> torch.Tensor:
    """Return the values of the only sequence of a micro-batch by the position of the token that is predicted, over all
    context-parallel ranks.

    Example: two ranks share a row of 8 tokens, and rank 0 has positions 0 1 6 7. At position 1 it has the
    log-probability of token 2, so its result has this value at index 2.
    """
    is_target_BS = on_device(batch.labels_KBS[0] != IGNORE_INDEX, log_p_BS.device)
    length = batch.position_ids_BS.numel() * mesh.cp.size()
    # Values without a label go to a last place, which is dropped. Selecting the others would require their number, for
    # which the host would wait.
    places_BS = torch.where(is_target_BS, batch.position_ids_BS + 1, length + 1)
    values = torch.zeros(length + 2, device=log_p_BS.device)
    values[places_BS.flatten()] = log_p_BS.float().flatten()
    values = values[:-1]
    dist.all_reduce(values, group=mesh.cp)
    return values
