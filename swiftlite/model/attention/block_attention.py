"""Core attention of a block drafter (`families/dflash.py`) in training.

When an engine drafts from position s, the block has one query for the anchor, token s + 1, and one per draft. All of
them see the context up to s and each other. In training, blocks of all positions are computed at once: the query of s
sees the keys of the context up to s, and of each query number only the key of s itself.

For example, each query number in a sequence of 3 tokens with 1 draft (one line per query; x marks a key that it sees):

             context    queries 0    queries 1
    s = 0    x . .      x . .        x . .
    s = 1    x x .      . x .        . x .
    s = 2    x x x      . . x        . . x

These are the keys that a later step of an unrolled head sees (`draft_attention.py`), with the context as its first
step. But here query 0 also sees the keys of query 1.

The layer computes all K queries of a block as one longer row: first query 0 of all positions, then query 1, and so on.
With sequence parallelism, each rank's part of the longer row is built from its parts of these rows, so the gathered row
has another order (`joined`).

Shapes: as in attention.py; K queries of a block.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.enums import AttnMaskType

from swiftlite.model.attention.attention import whole_row
from swiftlite.model.attention.cache import Cache
from swiftlite.model.attention.draft_attention import Draft, DraftAttention
from swiftlite.model.context_parallel import causal_segments, parts_of, shared_row


@dataclass(frozen=True)
class Context:
    """Hold what the queries of a block see in one layer, in addition to each other.

    megatron-core's layers pass this object to attention in the argument for a mask.

    Attributes:
        key_SBGD, value_SBGD: keys and values of the context on this context-parallel rank.
        num_queries: K.
        num_parts: number of sequence-parallel ranks whose parts a gathered row consists of.
        cache: the cache of the rows in decoding, whose spans are whole rows; None in training.
        runs: runs of positions that the queries belong to (`parts_of`); None for all.
    """

    key_SBGD: torch.Tensor
    value_SBGD: torch.Tensor
    num_queries: int
    num_parts: int
    cache: Cache | None
    runs: tuple[tuple[int, int], ...] | None


def joined(rows: Sequence[torch.Tensor], num_parts: int) -> torch.Tensor:
    """Join K rows [S, ...] in the order of a gathered row: for each rank, its parts of all rows.

    For example, rows a0 a1 and b0 b1 of 2 ranks: a0 b0 a1 b1.
    """
    parts = [row.chunk(num_parts) for row in rows]
    return torch.cat([each for of_rank in zip(*parts, strict=True) for each in of_rank])


def separated(joined_row: torch.Tensor, num_rows: int, num_parts: int) -> list[torch.Tensor]:
    """Invert `joined`: return K rows [S, ...]."""
    by_rank = joined_row.unflatten(0, (num_parts, num_rows, -1))
    return list(by_rank.transpose(0, 1).flatten(1, 2))


class BlockAttention(DraftAttention):
    """`DraftAttention` for all queries of a block."""

    def forward(
        self,
        query_SBND: torch.Tensor,
        key_SBGD: torch.Tensor,
        value_SBGD: torch.Tensor,
        attention_mask: Context,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> torch.Tensor:
        """Compute attention of K queries at each position, or at those of `Context.runs`; the first dimension of all
        arguments is K times their number.

        Args:
            attention_mask: the `Context`, passed in place of a mask.
            attention_bias: None. All other arguments and the result are those of `CoreAttention.forward`.
        """
        context = attention_mask
        if packed_seq_params is not None:
            query_SBND, key_SBGD, value_SBGD = (t.unsqueeze(1) for t in (query_SBND, key_SBGD, value_SBGD))
        rows = [separated(each, context.num_queries, context.num_parts) for each in (query_SBND, key_SBGD, value_SBGD)]
        queries, keys, values = rows
        context_key, context_value, num_positions = context.key_SBGD, context.value_SBGD, len(context.key_SBGD)
        if context.cache is None:
            lengths, group = shared_row(num_positions, packed_seq_params, self.cp_group)
            context_key, context_value = (whole_row(each, lengths, group) for each in (context_key, context_value))
            segments = causal_segments(lengths, group.rank(), group.size())
            attend = self._attend_merged if self.prefix else self._attend_steps
        else:
            segments = causal_segments(context.cache.lengths(num_positions), rank=0, size=1)
            attend = self._attend_steps
        if context.runs is not None:
            segments = parts_of(segments, context.runs)
        # All steps at once, because query 0 sees the keys of later queries, unlike a step of a draft.
        seen = Draft(context.cache, [context_key, *keys], [context_value, *values])
        out = joined([attend(query, seen, segments).flatten(2) for query in queries], context.num_parts)
        if packed_seq_params is not None:
            out = out.squeeze(1)
        return out
