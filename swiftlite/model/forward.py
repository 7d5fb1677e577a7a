"""Run a micro-batch through the model."""

from collections.abc import Callable, Iterator

import torch

from swiftlite.data.batch import Batch
from swiftlite.model.context_parallel import describe_packed
from swiftlite.model.forward_step import ForwardStep
from swiftlite.model.gpt import Losses, TrunkOutput
from swiftlite.model.loss.balance import Balance
from swiftlite.model.loss.chunked_loss import TeacherTarget
from swiftlite.model.tower import TowerInputs


def forward(
    model: torch.nn.Module,
    batch: Batch,
    balance: Balance | None = None,
    trunk: TrunkOutput | None = None,
    teacher: TeacherTarget | None = None,
    with_entropy: bool = False,
):
    """Run a micro-batch through the model, and return its `Losses`. Before the last pipeline stage, return the states
    to send.

    Args:
        balance: load balance of the global batch; without it routers have no load-balancing loss.
        trunk: output of the trunk for the micro-batch, if it was already computed (for example in a previous epoch).
        teacher: predictions of a teacher, from which the trunk learns instead of the labels; for the last stage.
        with_entropy: whether the trunk's losses have the entropy of its distributions.
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
        tower_inputs=TowerInputs.of(batch),
        axes_3BS=batch.axes_3BS,
        lengths=batch.lengths,
        teacher=teacher,
        with_entropy=with_entropy,
    )


def forward_step_of(
    compute: Callable[[Losses, Batch], tuple[torch.Tensor, torch.Tensor, torch.Tensor]],
    balance: Balance | None = None,
    *,
    with_entropy: bool = False,
) -> ForwardStep:
    """Return the forward step that runs each micro-batch through the model.

    Args:
        compute: returns for a micro-batch the loss summed over targets, the number of these targets, and the
            statistics.
        balance: load balance of the global batch; without it routers have no load-balancing loss.
        with_entropy: whether the trunk's losses have the entropy of its distributions.
    """

    def forward_step(batches: Iterator[Batch], model: torch.nn.Module) -> tuple[object, Callable]:
        batch = next(batches)
        output = forward(model, batch, balance, with_entropy=with_entropy)
        return output, lambda losses: compute(losses, batch)

    return forward_step
