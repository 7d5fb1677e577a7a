"""Core attention of an MTP head that goes on from its own state, in training, as engines run it.

An engine that drafts from position s first lets the head read the trunk's states up to s; the keys it keeps stay for
all further steps. Step j (from 2) is one more position, s + j - 1, which sees those keys and the ones that the steps
2 .. j left, all of them from the same s. Here every s is drafted from at once: the query of s in step j sees the keys
of step 1 up to s, and of each later step the one key of s itself.

Shapes: as in attention.py.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.enums import AttnMaskType

from swiftlite.model.attention import CoreAttention
from swiftlite.model.context_parallel import (
    Segment,
    causal_segments,
    gather_sequence,
    padded_cu_seqlens,
    sequence_lengths,
)

MAX_QUERIES = 1024
"""Of one call: scores are masked, and a mask has an entry for each query and key."""


class DraftAttention(CoreAttention):
    """`CoreAttention`, and inside `drafting()` each call after the first is one more step from every position."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self._steps: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._is_drafting = False

    @contextmanager
    def drafting(self) -> Iterator[None]:
        """Between the first step and the last; keys and values are kept meanwhile."""
        self._is_drafting = True
        try:
            yield
        finally:
            self._is_drafting = False
            self._steps = []

    def forward(
        self,
        query_SBND: torch.Tensor,
        key_SBGD: torch.Tensor,
        value_SBGD: torch.Tensor,
        attention_mask: torch.Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> torch.Tensor:
        """As `CoreAttention.forward`; no mask while drafting."""
        is_first = not self._steps
        if not self._is_drafting or is_first:
            out = super().forward(
                query_SBND, key_SBGD, value_SBGD, attention_mask, attn_mask_type, attention_bias, packed_seq_params
            )
            if not self._is_drafting:
                return out
        assert attention_mask is None
        group, cu_seqlens = self.cp_group, None
        if packed_seq_params is not None:
            group = packed_seq_params.cp_group or group
            cu_seqlens = padded_cu_seqlens(packed_seq_params)
            query_SBND, key_SBGD, value_SBGD = (t.unsqueeze(1) for t in (query_SBND, key_SBGD, value_SBGD))
        lengths = sequence_lengths(query_SBND.size(0) * group.size(), cu_seqlens)
        if is_first:
            if group.size() > 1:
                key_SBGD, value_SBGD = (gather_sequence(t, lengths, group) for t in (key_SBGD, value_SBGD))
            self._steps.append((key_SBGD, value_SBGD))
            return out
        self._steps.append((key_SBGD, value_SBGD))
        segments = [part for s in causal_segments(lengths, group.rank(), group.size()) for part in _cut(s)]
        out = self._attend_steps(query_SBND, segments).flatten(2)
        return out if packed_seq_params is None else out.squeeze(1)

    def _attend_steps(self, query_SBND: torch.Tensor, segments: Sequence[Segment]) -> torch.Tensor:
        """[S, B, N, D]: the query of each position over the first step's prefix and its own place in the later ones."""
        (first_key, first_value), *later = self._steps
        parts, start = [], 0
        for segment in segments:
            here = slice(start, start + segment.num_queries)
            prefix = slice(segment.key_start, segment.key_end)
            key = torch.cat([first_key[prefix], *(key[here] for key, _ in later)])
            value = torch.cat([first_value[prefix], *(value[here] for _, value in later)])
            num_keys = segment.key_end - segment.key_start
            causal = torch.ones(segment.num_queries, num_keys, dtype=torch.bool, device=key.device)
            own = torch.eye(segment.num_queries, dtype=torch.bool, device=key.device)
            is_allowed = torch.cat([causal.tril(num_keys - segment.num_queries), *[own] * len(later)], dim=1)
            parts.append(self._attend(query_SBND[here], key, value, ~is_allowed))
            start = here.stop
        return torch.cat(parts)


def _cut(segment: Segment) -> Iterator[Segment]:
    """Runs of at most MAX_QUERIES queries, in order."""
    first_end = segment.key_end - segment.num_queries  # keys before the first query
    for start in range(0, segment.num_queries, MAX_QUERIES):
        end = min(start + MAX_QUERIES, segment.num_queries)
        yield Segment(end - start, segment.key_start, first_end + end)
