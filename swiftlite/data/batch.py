"""`Batch`: samples side by side as tensors, padded on the right, with labels shifted to where they are predicted.

Shape suffixes: B samples of the micro-batch, S longest sample, rounded up.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from swiftlite.data.sample import IGNORED, Sample

NO_SAMPLE = Sample(np.empty(0, np.int32), np.empty(0, np.int32), np.empty(0, np.float32), source="padding")
"""Fills a batch up where rows run out: nothing but padding, no label."""


@dataclass
class Batch:
    """One micro-batch.

    Attributes:
        tokens_BS: int64; the pad token after the end of a sample.
        labels_BS: int64; `labels[b, s]` is the token at s + 1, -100 where that does not train.
        loss_scale_BS: float32; weight of `labels[b, s]`, 0 where that is -100.
        position_ids_BS: int64; 0, 1, 2, ... in every row.
        num_tokens: tokens without padding.
    """

    tokens_BS: torch.Tensor
    labels_BS: torch.Tensor
    loss_scale_BS: torch.Tensor
    position_ids_BS: torch.Tensor
    num_tokens: int

    def to(self, device: torch.device) -> "Batch":
        """The same batch on another device."""
        return Batch(
            self.tokens_BS.to(device, non_blocking=True),
            self.labels_BS.to(device, non_blocking=True),
            self.loss_scale_BS.to(device, non_blocking=True),
            self.position_ids_BS.to(device, non_blocking=True),
            self.num_tokens,
        )


def collate(samples: Sequence[Sample], pad_token_id: int, pad_to_multiple_of: int = 1) -> Batch:
    """Pad to the longest sample, rounded up to a multiple, and shift labels and weights by one.

    Args:
        samples: at least one.
        pad_token_id: any token of the vocabulary; causal attention keeps samples from seeing what follows them.
        pad_to_multiple_of: tensor parallel size under sequence parallelism, else 1.
    """
    longest = max(1, max(map(len, samples)))
    length = -(-longest // pad_to_multiple_of) * pad_to_multiple_of
    shape = (len(samples), length)
    tokens = np.full(shape, pad_token_id, np.int64)
    labels = np.full(shape, IGNORED, np.int64)
    loss_scale = np.zeros(shape, np.float32)
    for row, sample in enumerate(samples):
        num_tokens = len(sample)
        tokens[row, :num_tokens] = sample.input_ids
        if num_tokens > 1:
            labels[row, : num_tokens - 1] = sample.labels[1:]
            loss_scale[row, : num_tokens - 1] = np.where(sample.labels[1:] == IGNORED, 0, sample.loss_scale[1:])
    return Batch(
        torch.from_numpy(tokens),
        torch.from_numpy(labels),
        torch.from_numpy(loss_scale),
        torch.arange(length).repeat(len(samples), 1),
        sum(map(len, samples)),
    )
