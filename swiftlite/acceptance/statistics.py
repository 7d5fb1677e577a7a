"""Compute losses and acceptance of the heads over the targets of a micro-batch, as sums.

The sums of all micro-batches and ranks are added, and `means` divides the totals by the numbers of targets.

Shapes: B batch, S sequence (this context-parallel rank's part).
"""

import torch

from swiftlite.model.gpt import Losses
from swiftlite.model.ranks import all_gather_rows
from swiftlite.runtime.mesh import Mesh


def depth_sums(
    losses: Losses, loss_scale_KBS: torch.Tensor, mesh: Mesh, cu_seqlens: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the sums of one micro-batch, float64 [1 + drafts, 3].

    The rows of the result are the trunk and each MTP depth. The columns are the sum of weighted losses, the number of
    targets, and for MTP the number of correct predictions. A prediction is correct if it equals the trunk's prediction
    of the same token; an engine would accept it. Losses are those of this rank. Predictions are compared on whole rows
    and counted on the first context-parallel rank.

    Args:
        cu_seqlens: starts of the sequences of a packed row, as in `Batch`; None if each row is one sequence.
    """
    counts_here = mesh.cp.rank() == 0
    rows = []
    trunk_BS = all_gather_rows(losses.main.prediction_BS, mesh, cu_seqlens)
    for depth, (head, weight_BS) in enumerate(zip((losses.main, *losses.mtp), loss_scale_KBS, strict=True)):
        if depth > 0:
            # Positions with values rolled in from another sequence have no target at this depth.
            trunk_BS = trunk_BS.roll(-1, dims=1)
        prediction_BS = all_gather_rows(head.prediction_BS, mesh, cu_seqlens)
        valid_BS = prediction_BS != -1
        hits_BS = valid_BS & (prediction_BS == trunk_BS)
        loss = (head.loss_BS.detach() * weight_BS).sum().double()
        rows.append(torch.stack([loss, valid_BS.sum() * counts_here, hits_BS.sum() * counts_here]))
    return torch.stack(rows)


def means(sums: torch.Tensor) -> dict[str, float]:
    """Return `loss`, and `mtp_K_loss` and `mtp_K_acceptance` of each depth K; 0 without targets."""
    (loss, count, _), *heads = sums.tolist()
    named = {"loss": _mean(loss, count)}
    for depth, (loss, count, hits) in enumerate(heads, start=1):
        named[f"mtp_{depth}_loss"] = _mean(loss, count)
        named[f"mtp_{depth}_acceptance"] = _mean(hits, count)
    return named


def _mean(total: float, count: float) -> float:
    if not count:
        return 0.0
    return total / count
