"""Core attention of an unrolled MTP head in training. It computes the attention that the head has when an engine
drafts.

When an engine drafts from position s, step 1 of the head reads the trunk's states up to s. The keys of step 1 stay in
the KV cache for all further steps. Step j (from 2) processes one more position, s + j - 1. Its query sees the keys of
step 1 and the keys of steps 2 .. j, which all belong to the draft from s. In training, drafts from all positions s are
computed at once: the query of s in step j sees the keys of step 1 up to s, and of each later step only the key of s
itself.

For example, step 3 of a sequence of 4 tokens (one query per line; x marks a key that the query sees):

             keys of step 1    of step 2    of step 3
    s = 0    x . . .           x . . .      x . . .
    s = 1    x x . .           . x . .      . x . .
    s = 2    x x x .           . . x .      . . x .
    s = 3    x x x x           . . . x      . . . x

Shapes: as in attention.py.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.enums import AttnMaskType

from swiftlite.model.attention import merged_attention
from swiftlite.model.attention.attention import (
    MAX_QUERIES,
    CoreAttention,
    for_kernel,
    is_for_slices,
    rows_to_tokens,
    tokens_to_rows,
    whole_row,
)
from swiftlite.model.attention.cache import Cache
from swiftlite.model.context_parallel import Segment, causal_segments, first_in_window, seen_by, shared_row


@dataclass
class Draft:
    """The keys and values of all previous draft steps of a forward pass, in order.

    megatron-core's layers pass this object to attention in the argument for a mask.

    Attributes:
        keys: for the first step the keys of the whole row, for later steps the keys of this rank, [S, B, G, D] each.
        values: the values of these keys.
        cache: the KV cache of the rows in decoding; None in training.
    """

    cache: Cache | None = None
    keys: list[torch.Tensor] = field(default_factory=list)
    values: list[torch.Tensor] = field(default_factory=list)

    @property
    def is_empty(self) -> bool:
        """Whether no step has been computed yet."""
        return not self.keys

    def add(self, key_SBGD: torch.Tensor, value_SBGD: torch.Tensor) -> None:
        """Add the keys and values of the next step."""
        self.keys.append(key_SBGD)
        self.values.append(value_SBGD)


class DraftAttention(CoreAttention):
    """`CoreAttention` for unrolled heads: each call computes one draft step from all positions.

    In later steps, the kernel `prefix` computes the attention to keys of the first step; without `prefix`, a mask is
    used.
    """

    def forward(
        self,
        query_SBND: torch.Tensor,
        key_SBGD: torch.Tensor,
        value_SBGD: torch.Tensor,
        attention_mask: Draft,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> torch.Tensor:
        """Compute attention: in the first draft step like `CoreAttention`, in later steps over the keys of all steps so
        far.

        Args:
            attention_mask: the `Draft`, passed in place of a mask; this step's keys and values are added to it.
            attention_bias: None. All other arguments and the result are those of `CoreAttention.forward`.
        """
        draft = attention_mask
        if draft.is_empty:
            if draft.cache is None:
                lengths, group = shared_row(query_SBND.size(0), packed_seq_params, self.cp_group)
                # Once for all steps: of later steps, a query sees only the key at its own position.
                key_SBGD, value_SBGD = (whole_row(local, lengths, group) for local in (key_SBGD, value_SBGD))
            if draft.cache is None and packed_seq_params is not None:
                # With the axis B, which `CoreAttention.forward` adds to its own arguments only.
                draft.add(key_SBGD.unsqueeze(1), value_SBGD.unsqueeze(1))
            else:
                draft.add(key_SBGD, value_SBGD)
            return super().forward(query_SBND, key_SBGD, value_SBGD, draft.cache, packed_seq_params=packed_seq_params)
        if packed_seq_params is not None:
            query_SBND, key_SBGD, value_SBGD = (t.unsqueeze(1) for t in (query_SBND, key_SBGD, value_SBGD))
        draft.add(key_SBGD, value_SBGD)
        if draft.cache is None:
            lengths, group = shared_row(query_SBND.size(0), packed_seq_params, self.cp_group)
            segments = causal_segments(lengths, group.rank(), group.size(), self.window)
            attend = self._attend_merged if self.prefix else self._attend_steps
        else:
            segments = causal_segments(draft.cache.lengths(query_SBND.size(0)), rank=0, size=1, window=self.window)
            attend = self._attend_steps
        out = attend(query_SBND, draft, segments).flatten(2)
        if packed_seq_params is not None:
            out = out.squeeze(1)
        return out

    def _attend_merged(self, query_SBND: torch.Tensor, draft: Draft, segments: tuple[Segment, ...]) -> torch.Tensor:
        """Compute the result of `_attend_steps` with one kernel call over the prefixes of all segments."""
        assert self.prefix is not None
        key_SBGD, value_SBGD = draft.keys[0], draft.values[0]
        later = draft.keys[1:], draft.values[1:]
        if is_for_slices(query_SBND, key_SBGD, segments):
            return self._attend_slices(query_SBND, key_SBGD, value_SBGD, segments, *later)
        query, key, value, places = for_kernel(query_SBND, key_SBGD, value_SBGD, segments)
        own_keys, own_values = ([rows_to_tokens(step) for step in steps] for steps in later)
        scale, sinks = self.softmax_scale, self.softmax_offset
        out = merged_attention.attend(self.prefix, query, key, value, places, own_keys, own_values, scale, sinks)
        return tokens_to_rows(out, query_SBND)

    def _attend_steps(self, query_SBND: torch.Tensor, draft: Draft, segments: Sequence[Segment]) -> torch.Tensor:
        """Return attention [S, B, N, D]. Each query sees the keys of step 1 up to its position, and of each later step
        the key at its position.
        """
        segments = list(_short_segments(segments, self.window))
        queries = query_SBND.split([segment.num_queries for segment in segments])
        keys, values = _visible(draft.keys, segments), _visible(draft.values, segments)
        parts = []
        for segment, query, key, value in zip(segments, queries, keys, values, strict=True):
            is_allowed = _allowed(segment, len(draft.keys), key.device, self.window)
            parts.append(self._attend(query, key, value, ~is_allowed))
        return torch.cat(parts)


def _visible(steps: Sequence[torch.Tensor], segments: Sequence[Segment]) -> list[torch.Tensor]:
    """Return the keys or values that the queries of each segment may see.

    These are a prefix of the first step's keys, and the keys of each later step at the positions of the queries.
    """
    first, *later = steps
    num_queries = [segment.num_queries for segment in segments]
    parts = zip(seen_by(segments, first), *(step.split(num_queries) for step in later), strict=True)
    return [torch.cat(segment_parts) for segment_parts in parts]


def _allowed(segment: Segment, num_steps: int, device: torch.device, window: int | None) -> torch.Tensor:
    """Return the mask over `_visible` for each query, True for visible keys (marked x in the module docstring).

    The query of the last step is at a position that is larger by `num_steps - 1`, and so is the end of its window.
    """
    num_keys = segment.key_end - segment.key_start
    prefix = torch.ones(segment.num_queries, num_keys, dtype=torch.bool, device=device)
    prefix = prefix.tril(num_keys - segment.num_queries)
    own = torch.eye(segment.num_queries, dtype=torch.bool, device=device)
    later = [own] * (num_steps - 1)
    if window is not None:
        # From s + num_steps - 1, a window of w reaches back to s + num_steps - w: in step 3 with w = 4 to s - 1.
        prefix = prefix.triu(num_keys - segment.num_queries + num_steps - window)
        later = [own if num_steps - step < window else own.new_zeros(own.shape) for step in range(2, num_steps + 1)]
    return torch.cat([prefix, *later], dim=1)


def _short_segments(segments: Sequence[Segment], window: int | None) -> Iterator[Segment]:
    """Split segments into segments of at most MAX_QUERIES queries, in order."""
    for segment in segments:
        num_before = segment.key_end - segment.num_queries  # end of the keys before the first query
        for start in range(0, segment.num_queries, MAX_QUERIES):
            end = min(start + MAX_QUERIES, segment.num_queries)
            key_start = first_in_window(segment.key_start, num_before + start, window)
            yield Segment(end - start, key_start, num_before + end)
