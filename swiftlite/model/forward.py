"""Run a micro-batch through the model."""

from collections.abc import Callable, Iterator

import torch

from swiftlite.data.batch import Batch
from swiftlite.model.forward_step import ForwardStep
from swiftlite.model.gpt import Losses
from swiftlite.model.inputs import ModelInputs, Target
from swiftlite.model.loss.balance import Balance


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
        output = model(ModelInputs.of(batch, balance), Target.of(batch, with_entropy=with_entropy))
        return output, lambda losses: compute(losses, batch)

    return forward_step
