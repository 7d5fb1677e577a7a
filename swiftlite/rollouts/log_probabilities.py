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
from swiftlite.model.forward import forward_step_of
from swiftlite.model.gpt import Losses
from swiftlite.model.loss.losses import IGNORE_INDEX
from swiftlite.runtime.device import on_device
from swiftlite.runtime.mesh import Mesh
from swiftlite.train.batches.micro_batches import Batches
from swiftlite.train.methods.separate import values_of


def token_log_probabilities(
    chunks: Sequence[nn.Module], mesh: Mesh, batches: Batches, samples: Sequence[Sample]
) -> list[np.ndarray]:
    """Return for each sample the log-probabilities of its labels, float32, in order; collective over the mesh.

    Each sample is a separate micro-batch, so that its result does not depend, bit for bit, on other samples.

    Args:
        chunks: the model's stages on this rank. They stay in evaluation mode.
        batches: splits rows over the ranks of `mesh`.
    """

    def compute(losses: Losses, batch: Batch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        log_p_BS = -losses.main.loss_BS
        one = torch.ones((), dtype=torch.int32, device=log_p_BS.device)
        return log_p_BS.sum(), one, _by_position(log_p_BS, batch, mesh)

    sizes = [len(sample) for sample in samples]
    found = values_of(chunks, mesh, batches, samples, sizes, forward_step_of(compute)).cpu()
    parts = zip(samples, found.split(sizes), strict=True)
    return [part.numpy()[sample.labels != IGNORE_INDEX] for sample, part in parts]


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
    # Each position is set on one rank and 0 on the others.
    dist.all_reduce(values, group=mesh.cp)
    return values
