"""The loss of a global batch: next-token loss plus weighted MTP losses, each a mean over its own valid targets.

For depth k of D, with N_k the number of valid targets of that depth in the whole global batch (N_0: the trunk's) and
a_k the weight of the depth (`Plan.mtp_weights`: 1 / D, unless one layer is unrolled over D steps):

    loss = sum(w * CE) / N_0 + mtp_loss_scaling_factor * sum_k( a_k * sum(w * CE_k) / N_k )

The counts are known before the first forward pass, so the loss depends neither on how the batch is cut into
micro-batches, nor on data parallelism, nor on padding; a depth with no target contributes exactly 0.
megatron-core divides all gradients by N_0 at the end of the step (`calculate_per_token_loss`), so what is summed here
is `sum(w * CE) + sum_k( c_k * sum(w * CE_k) )` with `c_k = mtp_loss_scaling_factor * a_k * N_0 / N_k`.

Shapes: K the trunk and each MTP depth, B batch, S sequence (this context-parallel rank's part in the pipeline).
"""

from collections.abc import Callable, Iterator, Sequence

import torch
from megatron.core import parallel_state

from swiftlite.data.batch import Batch, shift_left
from swiftlite.model.context_parallel import describe_packed
from swiftlite.model.gpt import Losses
from swiftlite.model.loss import IGNORE_INDEX
from swiftlite.train.ranks import from_last_stage, whole_rows


def count_targets(batches: Sequence[Batch], mtp_depths: int) -> torch.Tensor:
    """Valid targets of the trunk and of each MTP depth in these batches: int64 [1 + mtp_depths]."""
    counts = torch.zeros(1 + mtp_depths, dtype=torch.int64)
    for batch in batches:
        counts += (batch.labels_KBS != IGNORE_INDEX).sum(dim=(1, 2)).cpu()
    return counts


def mtp_coefficients(counts: torch.Tensor, mtp_loss_scaling_factor: float, mtp_weights: Sequence[float]) -> list[float]:
    """c_k of each depth from the global counts of `count_targets` and `Plan.mtp_weights`."""
    main, *mtp = counts.tolist()
    return [
        mtp_loss_scaling_factor * weight * main / count if count else 0.0
        for weight, count in zip(mtp_weights, mtp, strict=True)
    ]


class Statistics:
    """Sums that add up over micro-batches and ranks; read as token-weighted means.

    One row per head (the trunk, then each MTP depth): sum of weighted losses, number of targets, and, for MTP, how
    many of its predictions equal the trunk's own for the same token (which is what an engine would accept).
    """

    def __init__(self, rows: torch.Tensor):
        self.rows = rows

    @staticmethod
    def of(losses: Losses, loss_scale_KBS: torch.Tensor, cu_seqlens: torch.Tensor | None = None) -> "Statistics":
        """The sums of one micro-batch, float64 [1 + mtp_depths, 3].

        Only losses are local: predictions are compared on whole rows, and counted by the first context-parallel rank.

        Args:
            cu_seqlens: as in `Batch`.
        """
        counts_here = parallel_state.get_context_parallel_rank() == 0
        rows = []
        trunk_BS = whole_rows(losses.main.prediction_BS, cu_seqlens)
        for depth, (head, weight_BS) in enumerate(zip((losses.main, *losses.mtp), loss_scale_KBS, strict=True)):
            if depth > 0:
                trunk_BS = shift_left(trunk_BS, fill=-1, cu_seqlens=cu_seqlens)
            prediction_BS = whole_rows(head.prediction_BS, cu_seqlens)
            valid_BS = prediction_BS != -1
            hits_BS = valid_BS & (prediction_BS == trunk_BS)
            loss = (head.loss_BS.detach() * weight_BS).sum().double()
            rows.append(torch.stack([loss, valid_BS.sum() * counts_here, hits_BS.sum() * counts_here]))
        return Statistics(torch.stack(rows))

    @staticmethod
    def total(parts: Sequence["Statistics"], heads: int, device: torch.device) -> "Statistics":
        """The sum over these micro-batches and over all ranks, the same on every rank.

        Args:
            parts: of this rank; pipeline stages without the loss have none.
        """
        rows = torch.zeros(heads, 3, dtype=torch.float64, device=device)
        for part in parts:
            rows += part.rows
        torch.distributed.all_reduce(rows, group=parallel_state.get_data_parallel_group(with_context_parallel=True))
        return Statistics(from_last_stage(rows).cpu())

    def means(self, prefix: str = "") -> dict[str, float]:
        """`loss`, and per depth `mtp_K_loss` and `mtp_K_acceptance`; 0 where there was no target."""
        names: dict[str, float] = {}
        for depth, (loss, count, hits) in enumerate(self.rows.tolist()):
            head = f"mtp_{depth}_" if depth else ""
            names[f"{prefix}{head}loss"] = loss / count if count else 0.0
            if depth:
                names[f"{prefix}{head}acceptance"] = hits / count if count else 0.0
        return names


def total_loss(losses: Losses, loss_scale_KBS: torch.Tensor, coefficients: Sequence[float]) -> torch.Tensor:
    """`sum(w * CE) + sum_k( c_k * sum(w * CE_k) )` of one micro-batch, a scalar."""
    total = (losses.main.loss_BS * loss_scale_KBS[0]).sum()
    for coefficient, head, weight_BS in zip(coefficients, losses.mtp, loss_scale_KBS[1:], strict=True):
        total = total + coefficient * (head.loss_BS * weight_BS).sum()
    return total


def forward(model: torch.nn.Module, batch: Batch):
    """What the model makes of a micro-batch: Losses on the last pipeline stage."""
    return model(
        batch.tokens_KBS[0],
        batch.position_ids_BS,
        labels=batch.labels_KBS[0],
        mtp_input_ids=batch.tokens_KBS[1:],
        mtp_labels=batch.labels_KBS[1:],
        packed_seq_params=describe_packed(batch.cu_seqlens),
    )


def make_forward_step(coefficients: Sequence[float]) -> Callable:
    """The function that megatron-core's pipeline schedule calls for each micro-batch of a step."""

    def forward_step(batches: Iterator[Batch], model: torch.nn.Module):
        batch = next(batches)
        output = forward(model, batch)

        def loss_func(losses: Losses):
            num_tokens = (batch.labels_KBS[0] != IGNORE_INDEX).sum().int()
            total = total_loss(losses, batch.loss_scale_KBS, coefficients)
            return total, num_tokens, Statistics.of(losses, batch.loss_scale_KBS, batch.cu_seqlens)

        return output, loss_func

    return forward_step
