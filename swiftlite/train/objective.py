"""The loss of a global batch: next-token loss plus weighted MTP losses, each a mean over its own valid targets.

For depth k of D, with N_k the number of valid targets of that depth in the whole global batch (N_0: the trunk's):

    loss = sum(w * CE) / N_0 + mtp_loss_scaling_factor / D * sum_k( sum(w * CE_k) / N_k )

The counts are known before the first forward pass, so the loss depends neither on how the batch is cut into
micro-batches, nor on data parallelism, nor on padding; a depth with no target contributes exactly 0.
megatron-core divides all gradients by N_0 at the end of the step (`calculate_per_token_loss`), so what is summed here
is `sum(w * CE) + sum_k( c_k * sum(w * CE_k) )` with `c_k = mtp_loss_scaling_factor / D * N_0 / N_k`.

Shapes: B batch, S sequence.
"""

from collections.abc import Callable, Iterator, Sequence

import torch

from swiftlite.data.batch import Batch
from swiftlite.model.gpt import Losses
from swiftlite.model.loss import IGNORE_INDEX
from swiftlite.model.mtp import shift_left


def count_targets(batches: Sequence[Batch], mtp_num_layers: int) -> torch.Tensor:
    """Valid targets of the trunk and of each MTP depth in these batches: int64 [1 + mtp_num_layers]."""
    counts = torch.zeros(1 + mtp_num_layers, dtype=torch.int64)
    for batch in batches:
        labels_BS = batch.labels_BS
        for depth in range(1 + mtp_num_layers):
            counts[depth] += (labels_BS != IGNORE_INDEX).sum().cpu()
            labels_BS = shift_left(labels_BS, fill=IGNORE_INDEX)
    return counts


def mtp_coefficients(counts: torch.Tensor, mtp_loss_scaling_factor: float) -> list[float]:
    """c_k of each depth from the global counts of `count_targets`."""
    main, *mtp = counts.tolist()
    return [mtp_loss_scaling_factor / len(mtp) * main / count if count else 0.0 for count in mtp]


class Statistics:
    """Sums that add up over micro-batches and ranks; read as token-weighted means.

    One row per head (the trunk, then each MTP depth): sum of weighted losses, number of targets, and, for MTP, how
    many of its predictions equal the trunk's own for the same token (which is what an engine would accept).
    """

    def __init__(self, rows: torch.Tensor):
        self.rows = rows

    @staticmethod
    def of(losses: Losses, loss_scale_BS: torch.Tensor) -> "Statistics":
        """The sums of one micro-batch, float64 [1 + mtp_num_layers, 3]."""
        rows = []
        weight_BS, trunk_BS = loss_scale_BS, losses.main.prediction_BS
        for depth, head in enumerate((losses.main, *losses.mtp)):
            if depth > 0:
                weight_BS, trunk_BS = shift_left(weight_BS, fill=0), shift_left(trunk_BS, fill=-1)
            valid_BS = head.prediction_BS != -1
            hits_BS = valid_BS & (head.prediction_BS == trunk_BS)
            rows.append(
                torch.stack([(head.loss_BS.detach() * weight_BS).sum().double(), valid_BS.sum(), hits_BS.sum()])
            )
        return Statistics(torch.stack(rows))

    @staticmethod
    def total(parts: Sequence["Statistics"], heads: int, device: torch.device, group) -> "Statistics":
        """The sum over these micro-batches and over the ranks of a data-parallel group."""
        rows = torch.zeros(heads, 3, dtype=torch.float64, device=device)
        for part in parts:
            rows += part.rows
        torch.distributed.all_reduce(rows, group=group)
        return Statistics(rows.cpu())

    def means(self, prefix: str = "") -> dict[str, float]:
        """`loss`, and per depth `mtp_K_loss` and `mtp_K_acceptance`; 0 where there was no target."""
        names: dict[str, float] = {}
        for depth, (loss, count, hits) in enumerate(self.rows.tolist()):
            head = f"mtp_{depth}_" if depth else ""
            names[f"{prefix}{head}loss"] = loss / count if count else 0.0
            if depth:
                names[f"{prefix}{head}acceptance"] = hits / count if count else 0.0
        return names


def total_loss(losses: Losses, loss_scale_BS: torch.Tensor, coefficients: Sequence[float]) -> torch.Tensor:
    """`sum(w * CE) + sum_k( c_k * sum(w * CE_k) )` of one micro-batch, a scalar."""
    total = (losses.main.loss_BS * loss_scale_BS).sum()
    weight_BS = loss_scale_BS
    for coefficient, head in zip(coefficients, losses.mtp, strict=True):
        weight_BS = shift_left(weight_BS, fill=0)
        total = total + coefficient * (head.loss_BS * weight_BS).sum()
    return total


def make_forward_step(coefficients: Sequence[float]) -> Callable:
    """The function that megatron-core's pipeline schedule calls for each micro-batch of a step."""

    def forward_step(batches: Iterator[Batch], model: torch.nn.Module):
        batch = next(batches)
        output = model(batch.tokens_BS, batch.position_ids_BS, labels=batch.labels_BS)

        def loss_func(losses: Losses):
            num_tokens = (batch.labels_BS != IGNORE_INDEX).sum().int()
            total = total_loss(losses, batch.loss_scale_BS, coefficients)
            return total, num_tokens, Statistics.of(losses, batch.loss_scale_BS)

        return output, loss_func

    return forward_step
