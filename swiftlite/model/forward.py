"""A micro-batch through the model."""

import torch

from swiftlite.data.batch import Batch
from swiftlite.model.context_parallel import describe_packed
from swiftlite.model.gpt import TrunkOutput
from swiftlite.model.loss.balance import Balance


def forward(model: torch.nn.Module, batch: Batch, balance: Balance | None = None, trunk: TrunkOutput | None = None):
    """What the model makes of a micro-batch: Losses on the last pipeline stage.

    Args:
        balance: of the global batch; without it routers learn no load-balancing loss.
        trunk: what the trunk makes of the micro-batch, if it is known already.
    """
    return model(
        batch.tokens_KBS[0],
        batch.position_ids_BS,
        labels=batch.labels_KBS[0],
        mtp_input_ids=batch.tokens_KBS[1:],
        mtp_labels=batch.labels_KBS[1:],
        packed_seq_params=describe_packed(batch.cu_seqlens),
        sequences=batch.sequence_KBS,
        balance=balance,
        trunk=trunk,
    )
