"""Count predictions by the length of their context and by their position in the answer.

The counts show, for example, whether heads predict badly at the start of an answer or after a long prompt.

Shapes: K MTP depths, S tokens of a row, P `PLACES`, N `NUM_BUCKETS`.
"""

from typing import Any

import torch

from swiftlite.data.batch import shift_left

PLACES = ("by_context", "by_position")
"""Two groupings of predictions. `by_context` groups by the predicted token's position in its sequence, which is the
length of its context. `by_position` groups by its position in the answer. Both positions count from 0."""
NUM_BUCKETS = 24


def bucket_of(count: torch.Tensor) -> torch.Tensor:
    """Return the bucket of each count: 0 for 0 to 15, 1 for 16 to 31, 2 for 32 to 63, and so on in powers of two."""
    return (count // 8).clamp(min=1).double().log2().long().clamp(max=NUM_BUCKETS - 1)


def bounds_of(bucket: int) -> tuple[int, int]:
    """Return the smallest and the largest count of a bucket."""
    smallest = 0
    if bucket:
        smallest = 8 << bucket
    return smallest, (16 << bucket) - 1


def tally(
    valid_KS: torch.Tensor,
    hits_KS: torch.Tensor,
    learned_S: torch.Tensor,
    position_S: torch.Tensor,
    cu_seqlens: torch.Tensor | None,
) -> torch.Tensor:
    """Count predictions, and correct predictions, by grouping (`PLACES`), bucket and depth: int64 [P, N, K, 2].

    Example: an answer of 3 tokens follows a prompt of 5. Its last token, at position 7, has 7 tokens before it, 2 of
    them in the answer.

    Args:
        valid_KS: whether the token that depth k predicts at position s (the token at s + k + 1) is a label.
        hits_KS: whether the prediction of depth k at position s equals the trunk's prediction of the same token.
        learned_S: whether the token at s + 1 is a label; consecutive labels are an answer.
        position_S: position of s in its sequence.
        cu_seqlens: starts of the sequences of a packed row, as in `Batch`; None if the row is one sequence.
    """
    number_S = torch.arange(len(learned_S), device=learned_S.device)
    last_outside_S = torch.where(learned_S, -1, number_S).cummax(0).values
    of_answer_S = number_S - last_outside_S - 1
    table = torch.zeros(len(PLACES), NUM_BUCKETS, len(valid_KS), 2, dtype=torch.int64)
    for number, (valid_S, hits_S) in enumerate(zip(valid_KS, hits_KS, strict=True)):
        of_answer_S = shift_left(of_answer_S[None], 0, cu_seqlens)[0]
        for place, count_S in enumerate((position_S + number + 2, of_answer_S)):
            buckets = bucket_of(count_S)
            table[place, :, number, 0] = buckets[valid_S].bincount(minlength=NUM_BUCKETS).cpu()
            table[place, :, number, 1] = buckets[valid_S & hits_S].bincount(minlength=NUM_BUCKETS).cpu()
    return table


def describe(table: torch.Tensor) -> dict[str, list[dict[str, Any]]]:
    """Return the result of `tally` in the format of evaluation.json: for each of PLACES, the
    buckets with predictions.
    """
    return {name: _buckets(bucket_counts.tolist()) for name, bucket_counts in zip(PLACES, table, strict=True)}


def _buckets(rows: list[list[list[int]]]) -> list[dict[str, Any]]:
    found = []
    for bucket, depths in enumerate(rows):
        first, last = bounds_of(bucket)
        heads = [{"targets": targets, "acceptance": hits / max(targets, 1)} for targets, hits in depths]
        if any(head["targets"] for head in heads):
            found.append({"from": first, "to": last, "heads": heads})
    return found
