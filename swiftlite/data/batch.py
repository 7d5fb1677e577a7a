"""`Batch`: samples side by side as tensors, padded on the right, with labels shifted to where they are predicted.

A batch carries what each MTP depth sees and predicts as well, shifted here, on whole rows: what comes later may cut the
rows over context-parallel ranks.

Shape suffixes: K the trunk and each MTP depth, B samples of the micro-batch, S longest sample, rounded up.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from swiftlite.data.sample import IGNORED, Sample

NO_SAMPLE = Sample(np.empty(0, np.int32), np.empty(0, np.int32), np.empty(0, np.float32), source="padding")
"""Fills a batch up where rows run out: nothing but padding, no label."""


def shift_left(tensor_BS: torch.Tensor, fill: float) -> torch.Tensor:
    """What stands one token later: result[b, s] = tensor[b, s + 1], and `fill` at the end of the row."""
    shifted = tensor_BS.roll(-1, dims=1)
    shifted[:, -1] = fill
    return shifted


def ahead(tensor_BS: torch.Tensor, mtp_num_layers: int, fill: float) -> torch.Tensor:
    """[K, B, S]: the tensor itself for the trunk, and for MTP depth k what stands k tokens later."""
    views = [tensor_BS]
    for _ in range(mtp_num_layers):
        views.append(shift_left(views[-1], fill))
    return torch.stack(views)


@dataclass
class Batch:
    """One micro-batch.

    Attributes:
        tokens_KBS: int64; the pad token after the end of a sample.
        labels_KBS: int64; `labels[k, b, s]` is the token at s + k + 1, -100 where that does not train.
        loss_scale_KBS: float32; weight of `labels[k, b, s]`, 0 where that is -100.
        position_ids_BS: int64; 0, 1, 2, ... in every row.
        num_tokens: tokens without padding.
    """

    tokens_KBS: torch.Tensor
    labels_KBS: torch.Tensor
    loss_scale_KBS: torch.Tensor
    position_ids_BS: torch.Tensor
    num_tokens: int

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> "Batch":
        """The batch with each of its tensors replaced: moved to a device, cut along the last axis."""
        return Batch(
            function(self.tokens_KBS),
            function(self.labels_KBS),
            function(self.loss_scale_KBS),
            function(self.position_ids_BS),
            self.num_tokens,
        )


def collate(
    samples: Sequence[Sample], pad_token_id: int, *, mtp_num_layers: int = 0, pad_to_multiple_of: int = 1
) -> Batch:
    """Pad to the longest sample, rounded up to a multiple, and shift labels and weights by one.

    Args:
        samples: at least one.
        pad_token_id: any token of the vocabulary; causal attention keeps samples from seeing what follows them.
        pad_to_multiple_of: so that ranks can share rows by position (`args.layout.length_multiple`).
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
        ahead(torch.from_numpy(tokens), mtp_num_layers, fill=0),
        ahead(torch.from_numpy(labels), mtp_num_layers, fill=IGNORED),
        ahead(torch.from_numpy(loss_scale), mtp_num_layers, fill=0),
        torch.arange(length).repeat(len(samples), 1),
        sum(map(len, samples)),
    )
