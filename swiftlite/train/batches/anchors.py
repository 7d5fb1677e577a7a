"""Select the positions from which a block drafter drafts in a step (`--drafter_anchors`).

A block of N drafts costs about N tokens of the drafter's layers, from each position. Neighboring positions are similar,
so a part of them can teach almost as much per second. Positions are selected in runs, which attention computes as
quickly as whole rows. Heads get no label elsewhere, and the drafter computes nothing there (`ModelInputs.drafted`).

A selection depends on the seed, the step and the tokens of a sequence, and thus not on the layout or on packing.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch

from swiftlite.data.batch import Batch
from swiftlite.model.loss.losses import IGNORE_INDEX

RUN = 64
"""Number of consecutive positions that are selected together."""


def with_anchors(get: Callable[[int], Sequence[Batch]], share: float, seed: int) -> Callable[[int], Sequence[Batch]]:
    """Return a function that returns the micro-batches of a step with labels of heads only at selected positions.

    Args:
        get: returns this rank's micro-batches of a step, with whole rows.
        share: share of the runs with labels, between 0 and 1.
    """
    if share == 1:
        return get

    def selected(step: int) -> Sequence[Batch]:
        return [_select(batch, partial(_random, seed, step), share) for batch in get(step)]

    return selected


def _random(seed: int, step: int, ids: np.ndarray) -> np.random.Generator:
    digest = hashlib.sha256(ids.astype(np.int64).tobytes()).digest()
    return np.random.default_rng([seed, step, int.from_bytes(digest[:8], "little")])


def _select(batch: Batch, random: Callable[[np.ndarray], np.random.Generator], share: float) -> Batch:
    """Return the batch without labels of heads outside of selected runs.

    Args:
        random: returns the generator of a sequence with these tokens.
    """
    ids, numbers = batch.tokens_KBS[0].flatten().numpy(), batch.sequence_KBS[0].flatten().numpy()
    has_label = (batch.labels_KBS[1:] != IGNORE_INDEX).any(dim=0).flatten().numpy()
    is_idle = np.ones(len(ids), bool)
    for number in range(batch.num_sequences):
        (places,) = np.nonzero(numbers == number)
        runs = np.arange(len(places)) // RUN
        # Runs without a label, such as those of prompts, teach nothing and take no share.
        learned = np.unique(runs[has_label[places]])
        generator = random(ids[places])
        count = int(share * len(learned) + generator.random())  # in the mean, the share of these runs
        is_idle[places] = ~np.isin(runs, generator.permutation(learned)[:count])
    is_idle_BS = torch.from_numpy(is_idle).view_as(batch.position_ids_BS)
    labels_KBS, loss_scale_KBS = batch.labels_KBS.clone(), batch.loss_scale_KBS.clone()
    labels_KBS[1:].masked_fill_(is_idle_BS, IGNORE_INDEX)
    loss_scale_KBS[1:].masked_fill_(is_idle_BS, 0)
    return replace(batch, labels_KBS=labels_KBS, loss_scale_KBS=loss_scale_KBS)
