"""Core attention without Transformer Engine, with the interface of megatron-core.

For dense rows, torch's scaled_dot_product_attention is called as in transformers, so that logits are bitwise identical.
megatron-core's own class gives logits that differ by 2e-6 in float32 and by 0.05 in bfloat16. It also allocates scores
of S x S, and supports neither packed rows nor context parallelism nor MLA.

Shapes: S sequence, T tokens of a packed row, B batch, N query heads, G key-value heads, D head size (values may have a
different one); N and G are per tensor-parallel rank, S and T per context-parallel rank.
"""

import math
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from itertools import accumulate
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

from swiftlite.model.attention import cudnn, merged_attention
from swiftlite.model.attention.cache import Cache
from swiftlite.model.attention.sinks import attend_with_sinks
from swiftlite.model.context_parallel import (
    Segment,
    causal_segments,
    first_in_window,
    gather_sequence,
    seen_by,
    shared_row,
)
from swiftlite.runtime.device import on_device

LONG = 2048
"""Minimum average number of queries per segment for one kernel call per segment with context parallelism. With fewer
queries, keys and values of all segments are copied for a single call. On an H100, launching a kernel in the forward and
the backward pass is estimated to take about 20 microseconds. Copying the keys and values of 2,048 tokens for 8 heads of
size 128 takes as long; with latent attention, copies take ten times as long.
"""

MAX_QUERIES = 1024
"""Maximum number of queries in one call with a mask, because the mask has an entry for each pair of query and key."""


class Offsets(NamedTuple):
    """The positions of queries and keys of all segments of all rows for one kernel call.

    Attributes:
        keys_T: indices of the keys in the row, in the order of segments; None: all keys of the row, in order.
        cu_q, cu_k: start of each segment, int32 [segments + 1], on the device.
    """

    keys_T: torch.Tensor | None
    cu_q: torch.Tensor
    cu_k: torch.Tensor
    longest_q: int
    longest_k: int


@lru_cache(maxsize=16)  # every layer calls it for the row of the micro-batch
def offsets(segments: tuple[Segment, ...], num_rows: int, num_keys: int, device: torch.device) -> Offsets:
    """Create the `Offsets` on the host, and copy them to the device.

    The result is cached for all layers of a pass, because each copy waits for the device.
    """
    keys = torch.cat([torch.arange(segment.key_start, segment.key_end) for segment in segments])
    # Without context parallelism, the segments are the whole row.
    keys_T = None
    if not torch.equal(keys, torch.arange(num_keys)):
        keys_T = on_device(keys, device)
    # Rows are concatenated for the kernel, and all rows of a micro-batch have the same segments.
    queries_of = [segment.num_queries for segment in segments] * num_rows
    keys_of = [segment.key_end - segment.key_start for segment in segments] * num_rows
    starts = torch.tensor([[0, *accumulate(queries_of)], [0, *accumulate(keys_of)]], dtype=torch.int32)
    cu_q, cu_k = on_device(starts, device)
    return Offsets(keys_T, cu_q, cu_k, max(queries_of), max(keys_of))


class CoreAttention(MegatronModule):
    """Causal attention for dense rows (one sequence each, padded at the end) and packed rows, for any CP size.

    With context parallelism, each rank holds two chunks of each sequence (context_parallel.py). Each rank gathers all
    keys and values, whose gradients are reduce-scattered, and computes the attention of its own queries. Latent
    attention gathers latents itself, and calls this class with keys and values of the whole row.

    The constructor accepts the arguments that megatron-core passes in SelfAttention and MLASelfAttention
    (transformer/attention.py of 0.16.1).

    Args:
        varlen: kernel for all sequences of a packed row in one call (`kernels.varlen_kernel`). None: a kernel is called
            for each sequence.
        prefix: attention kernel with separate forward and backward functions (`kernels.prefix_kernel`); None if the
            selected kernels have no such functions.
        prefers_cudnn: whether cuDNN computes long sequences, see `cudnn.py`.
        packs_with_cudnn: whether cuDNN computes the sequences of packed rows in one call as well.
        window: number of keys that a query sees: the last ones up to its position; None: all keys up to its position.
            With context parallelism, keys outside of the windows are gathered too, but neither copied nor computed.
        has_sinks: whether each head has a sink (`sinks.py`).
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        *,
        pg_collection: ProcessGroupCollection | None,
        softmax_scale: float | None = None,
        k_channels: int | None = None,
        varlen: Callable[..., Any] | None = None,
        prefix: merged_attention.PrefixKernel | None = None,
        prefers_cudnn: bool = False,
        packs_with_cudnn: bool = False,
        window: int | None = None,
        has_sinks: bool = False,
        **unused: Any,
    ):
        super().__init__(config=config)
        self.window = window
        self.softmax_offset: torch.nn.Parameter | None = None  # megatron-core's name
        self.sink_kernel: merged_attention.PrefixKernel | None = None
        if has_sinks:
            own = torch.zeros(
                config.num_attention_heads // config.tensor_model_parallel_size, dtype=config.params_dtype
            )
            self.softmax_offset = torch.nn.Parameter(own)
            # Without the mark, megatron-core would count the sinks of one rank only in the norm of the gradients.
            set_tensor_model_parallel_attributes(self.softmax_offset, is_parallel=True, dim=0, stride=1)
            self.sink_kernel = prefix and prefix.with_window(window)
        if window is not None:
            prefix = None  # it requires that each segment sees a longer prefix than the segment before
            varlen = varlen and partial(varlen, window=window)
        self.varlen, self.prefix = varlen, prefix
        self.dropout = config.attention_dropout
        # `cudnn.attend` supports none of these.
        self.prefers_cudnn = prefers_cudnn and window is None and not has_sinks and not self.dropout
        self.packs_with_cudnn = packs_with_cudnn
        k_channels = k_channels or config.kv_channels
        assert k_channels is not None
        if softmax_scale is None:
            softmax_scale = 1.0 / math.sqrt(k_channels)
        self.softmax_scale = softmax_scale
        assert pg_collection is not None  # never None, unlike in the annotation of megatron-core
        self.cp_group = pg_collection.cp

    def forward(
        self,
        query_SBND: torch.Tensor,
        key_SBGD: torch.Tensor,
        value_SBGD: torch.Tensor,
        attention_mask: torch.Tensor | Cache | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> torch.Tensor:
        """Compute attention; without a mask it is causal, which is sufficient for rows padded at the end.

        Args:
            query_SBND: queries; for a packed row [T, N, D], the shape that megatron-core passes.
            key_SBGD, value_SBGD: keys and values in the same layout, of this rank or of all context-parallel ranks.
            attention_mask: a mask [B or 1, 1, S, S], True at masked entries as in megatron-core, only for dense rows
                without context parallelism; or, in decoding, the KV cache of the rows, to which the tokens of this pass
                are added.
            packed_seq_params: for a packed row (`qkv_format` thd): starts of its padded sequences in the whole row.
                There is no attention between sequences.

        Returns:
            [S, B, N * D], or [T, N * D] for a packed row, like Transformer Engine.

        Raises:
            ValueError: a mask is not supported for this row, or the sequences do not cover the row.
        """
        assert attention_bias is None
        if isinstance(attention_mask, Cache):
            # Each step has another length, for which cuDNN would build a plan.
            with cudnn.excluded(query_SBND.device):
                return self._attend_cached(query_SBND, key_SBGD, value_SBGD, attention_mask).flatten(2)
        if packed_seq_params is not None:
            assert packed_seq_params.qkv_format == "thd"
            query_SBND, key_SBGD, value_SBGD = (t.unsqueeze(1) for t in (query_SBND, key_SBGD, value_SBGD))
        elif self.cp_group.size() == 1:
            if attention_mask is not None and self.window is not None:
                outside = outside_window(query_SBND.size(0), key_SBGD.size(0), self.window, query_SBND)
                # The mask is True at masked entries, where `outside` is -inf.
                attention_mask = attention_mask | (outside < 0)
            if attention_mask is None and self.prefers_cudnn and query_SBND.size(0) >= cudnn.LEAST:
                return cudnn.attend(query_SBND, key_SBGD, value_SBGD, self.softmax_scale).flatten(2)
            return self._attend(query_SBND, key_SBGD, value_SBGD, attention_mask).flatten(2)

        if attention_mask is not None:
            raise ValueError(
                "attention_mask with a packed row or context parallelism: only causal attention is cut over ranks; "
                "pass None and pad rows at the end"
            )
        lengths, group = shared_row(query_SBND.size(0), packed_seq_params, self.cp_group)
        num_tokens = query_SBND.size(0) * group.size()
        if sum(lengths) != num_tokens:
            raise ValueError(
                f"cu_seqlens ends at {sum(lengths)}, but {group.size()} context-parallel ranks hold {num_tokens} "
                f"tokens; it counts the padded tokens of the whole row"
            )
        key_SBGD, value_SBGD = (whole_row(local, lengths, group) for local in (key_SBGD, value_SBGD))
        segments = causal_segments(lengths, group.rank(), group.size(), self.window)
        out = self._attend_row(query_SBND, key_SBGD, value_SBGD, segments).flatten(2)
        if packed_seq_params is not None:
            out = out.squeeze(1)
        return out

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Return the part of the sinks that this rank writes to a checkpoint."""
        state = self.state_dict(prefix="", keep_vars=True)
        return make_sharded_tensors_for_checkpoint(state, prefix, {"softmax_offset": 0}, sharded_offsets)

    def _attend_row(
        self,
        query_SBND: torch.Tensor,
        key_SBGD: torch.Tensor,
        value_SBGD: torch.Tensor,
        segments: tuple[Segment, ...],
    ) -> torch.Tensor:
        """Return the attention [S, B, N, D] of this rank's queries to the keys of the whole row."""
        num_queries = query_SBND.size(0)
        # Between context-parallel ranks, queries see more keys than there are queries, which cuDNN aligns differently.
        is_for_cudnn = self.prefers_cudnn and num_queries == key_SBGD.size(0)
        lengths = tuple(segment.num_queries for segment in segments)
        if is_for_cudnn and self.packs_with_cudnn:
            query, key, value = (tensor.squeeze(1) for tensor in (query_SBND, key_SBGD, value_SBGD))
            return cudnn.attend_packed(query, key, value, lengths, self.softmax_scale).unsqueeze(1)
        if is_for_cudnn and num_queries >= LONG * len(segments):
            sequences = zip(*(tensor.split(lengths) for tensor in (query_SBND, key_SBGD, value_SBGD)), strict=True)
            return torch.cat([cudnn.attend(query, key, value, self.softmax_scale) for query, key, value in sequences])
        if self.prefix is not None and is_for_slices(query_SBND, key_SBGD, segments):
            return self._attend_slices(query_SBND, key_SBGD, value_SBGD, segments)
        attend = self._attend_varlen if self.varlen else self._attend_segments
        return attend(query_SBND, key_SBGD, value_SBGD, segments)

    def _attend(
        self,
        query_SBND: torch.Tensor,
        key_SBGD: torch.Tensor,
        value_SBGD: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return attention [S, B, N, D]. Without a mask, the attention is causal and the last query sees the last key.

        Args:
            attention_mask: True at masked entries, or added to the scores.
        """
        num_queries, num_keys = query_SBND.size(0), key_SBGD.size(0)
        if attention_mask is None and self.sink_kernel is not None:
            first = first_in_window(0, num_keys - num_queries, self.window)
            return self._attend_varlen(query_SBND, key_SBGD, value_SBGD, (Segment(num_queries, first, num_keys),))
        is_allowed = None
        if attention_mask is not None:
            is_allowed = ~attention_mask if attention_mask.dtype == torch.bool else attention_mask
        # Shorter rows are within the window of every query, and are computed like causal ones.
        elif self.window is not None and num_keys > self.window:
            return self._attend_windows(query_SBND, key_SBGD, value_SBGD, self.window)
        elif num_queries != num_keys:
            # torch's is_causal aligns the first query with the first key.
            is_allowed = query_SBND.new_ones(num_queries, num_keys, dtype=torch.bool).tril(num_keys - num_queries)
        query, key, value = (t.permute(1, 2, 0, 3) for t in (query_SBND, key_SBGD, value_SBGD))
        if self.softmax_offset is not None:
            out_BNSD = attend_with_sinks(query, key, value, self.softmax_offset, is_allowed, self.softmax_scale)
            return out_BNSD.permute(2, 0, 1, 3)
        if query.is_cuda and query.dtype is torch.float32:
            key, value = (for_each_query_head(tensor, query.size(1)) for tensor in (key, value))
        dropout = self.dropout if self.training else 0.0
        out_BNSD = F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=is_allowed,
            dropout_p=dropout,
            is_causal=is_allowed is None,
            scale=self.softmax_scale,
            enable_gqa=query.size(1) != key.size(1),
        )
        return out_BNSD.permute(2, 0, 1, 3)

    def _attend_windows(
        self, query_SBND: torch.Tensor, key_SBGD: torch.Tensor, value_SBGD: torch.Tensor, window: int
    ) -> torch.Tensor:
        """Return attention [S, B, N, D] with windows, in blocks of queries with the keys that they see.

        Work and memory are therefore proportional to the window. With one block, the result is bitwise identical to
        transformers.
        """
        num_queries = query_SBND.size(0)
        num_before = key_SBGD.size(0) - num_queries  # keys before the first query
        parts = []
        for start in range(0, num_queries, MAX_QUERIES):
            end = min(start + MAX_QUERIES, num_queries)
            seen = slice(first_in_window(0, num_before + start, window), num_before + end)
            mask = outside_window(end - start, seen.stop - seen.start, window, query_SBND)
            parts.append(self._attend(query_SBND[start:end], key_SBGD[seen], value_SBGD[seen], mask))
        if len(parts) == 1:
            return parts[0]  # without a copy
        return torch.cat(parts)

    def _attend_cached(
        self, query_T1ND: torch.Tensor, key_T1GD: torch.Tensor, value_T1GD: torch.Tensor, cache: Cache
    ) -> torch.Tensor:
        """Return the attention output [T, 1, N, D] of the tokens of this pass; the output of padding is undefined."""
        key_BCGD = cache.keep((self, "key"), key_T1GD.squeeze(1))
        value_BCGD = cache.keep((self, "value"), value_T1GD.squeeze(1))
        if cache.is_step:
            return self._attend_step(query_T1ND, key_BCGD, value_BCGD, cache)
        *queries, padding = query_T1ND.split(cache.lengths(len(query_T1ND)))
        parts = []
        for span, query in zip(cache.spans, queries, strict=True):
            # Up to the end of the span, whatever other rows have in the cache.
            seen = slice(first_in_window(0, span.start, self.window), span.end)
            key_S1GD = key_BCGD[span.row, seen].unsqueeze(1)
            value_S1GD = value_BCGD[span.row, seen].unsqueeze(1)
            parts.append(self._attend(query, key_S1GD, value_S1GD))
        parts.append(padding.new_zeros(*padding.shape[:3], value_T1GD.size(-1)))
        return torch.cat(parts)

    def _attend_step(
        self, query_T1ND: torch.Tensor, key_BCGD: torch.Tensor, value_BCGD: torch.Tensor, cache: Cache
    ) -> torch.Tensor:
        """Compute `_attend_cached` in one call, for passes with at most one token per row.

        Query heads that share a key head are computed as several queries of one head. Otherwise torch would repeat the
        keys.
        """
        visible_BS = cache.visible(self.window)
        # Only up to the end of the longest row, not the whole capacity.
        key, value = (kept[:, : visible_BS.size(1)].transpose(1, 2) for kept in (key_BCGD, value_BCGD))
        query_BND = cache.by_row(query_T1ND.squeeze(1))
        if self.softmax_offset is not None:
            sinks, scale = self.softmax_offset, self.softmax_scale
            out = attend_with_sinks(query_BND[:, :, None], key, value, sinks, visible_BS[:, None, None], scale)
            return cache.by_token(out.squeeze(2), len(query_T1ND)).unsqueeze(1)
        out = F.scaled_dot_product_attention(
            query_BND.unflatten(1, (key.size(1), -1)),
            key,
            value,
            attn_mask=visible_BS[:, None, None],
            scale=self.softmax_scale,
        )
        return cache.by_token(out.flatten(1, 2), len(query_T1ND)).unsqueeze(1)

    def _attend_segments(
        self,
        query_SBND: torch.Tensor,
        key_SBGD: torch.Tensor,
        value_SBGD: torch.Tensor,
        segments: Sequence[Segment],
    ) -> torch.Tensor:
        """Return attention [S, B, N, D], with one kernel call per segment.

        On a CPU, torch 2.13 has no faster function with gradients for packed rows: varlen_attn requires CUDA,
        flex_attention has no backward pass, and nested tensors do not support causal attention. With 16 sequences,
        1,700 tokens and 8 heads of size 64, forward and backward pass take 42 ms this way, and 458 ms with a mask over
        the row.
        """
        queries = query_SBND.split([segment.num_queries for segment in segments])
        keys, values = seen_by(segments, key_SBGD), seen_by(segments, value_SBGD)
        return torch.cat([self._attend(*part) for part in zip(queries, keys, values, strict=True)])

    def _attend_varlen(
        self,
        query_SBND: torch.Tensor,
        key_SBGD: torch.Tensor,
        value_SBGD: torch.Tensor,
        segments: tuple[Segment, ...],
    ) -> torch.Tensor:
        """Return attention [S, B, N, D] from one kernel call over all segments of all rows."""
        query, key, value, places = for_kernel(query_SBND, key_SBGD, value_SBGD, segments)
        if self.sink_kernel is not None:
            sinks, scale = self.softmax_offset, self.softmax_scale
            out = merged_attention.attend(self.sink_kernel, query, key, value, places, (), (), scale, sinks)
            return tokens_to_rows(out, query_SBND)
        assert self.varlen is not None
        return tokens_to_rows(self.varlen(query, key, value, *places, scale=self.softmax_scale), query_SBND)

    def _attend_slices(
        self,
        query_S1ND: torch.Tensor,
        key_S1GD: torch.Tensor,
        value_S1GD: torch.Tensor,
        segments: tuple[Segment, ...],
        own_keys: Sequence[torch.Tensor] = (),
        own_values: Sequence[torch.Tensor] = (),
    ) -> torch.Tensor:
        """Return attention [S, 1, N, D], with one kernel call per segment and without copying keys and values.

        `_attend_varlen` would copy keys that two segments share, and keep the copies until the backward pass. Together
        these copies are larger than the keys.

        Args:
            own_keys, own_values: additional keys and values, [S, 1, G, D] each; query s sees only those at index s.
        """
        assert self.prefix is not None
        query, key, value = (tensor.squeeze(1) for tensor in (query_S1ND, key_S1GD, value_S1GD))
        kernel = merged_attention.in_slices(self.prefix, slices_of(segments, query_S1ND.device))
        keys, values = ([tensor.squeeze(1) for tensor in own] for own in (own_keys, own_values))
        scale, sinks = self.softmax_scale, self.softmax_offset
        out = merged_attention.attend(kernel, query, key, value, (), keys, values, scale, sinks)
        return out.unsqueeze(1)


def outside_window(num_queries: int, num_keys: int, window: int, like: torch.Tensor) -> torch.Tensor:
    """Return a mask [queries, keys] that is added to scores: 0 for the keys that a query sees, otherwise -inf.

    The last query sees the last `window` keys. The mask has the device and dtype of `like`. Layers share it, also in
    the backward pass.
    """
    return _outside_window(num_queries, num_keys, window, like.device, like.dtype)


@lru_cache(maxsize=16)
def _outside_window(
    num_queries: int, num_keys: int, window: int, device: torch.device, dtype: torch.dtype
) -> torch.Tensor:
    own = num_keys - num_queries  # index of the first query's own key
    # For 2 queries, 4 keys and a window of 2, `own` is 2: query 0 sees keys 1 and 2, query 1 sees keys 2 and 3.
    mask = torch.zeros(num_queries, num_keys, dtype=dtype, device=device)
    is_seen = torch.ones_like(mask, dtype=torch.bool).tril(own).triu(own - window + 1)
    return mask.masked_fill(~is_seen, -torch.inf)


def for_each_query_head(keys_BGSD: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Repeat keys or values for the query heads that share them: [B, N, S, D].

    In float32 on a GPU, torch's only kernel for grouped heads stores scores of S x S. Its kernel for heads that are not
    grouped stores no scores.
    """
    repeats = num_heads // keys_BGSD.size(1)
    if repeats == 1:
        return keys_BGSD
    return keys_BGSD.repeat_interleave(repeats, dim=1)


def is_for_slices(query_SBND: torch.Tensor, key_SBGD: torch.Tensor, segments: Sequence[Segment]) -> bool:
    """Return whether to compute each segment in a separate kernel call.

    This is the case if context-parallel ranks share the row, and it has a single sequence or segments with many queries
    (`LONG`).
    """
    num_queries, num_rows = query_SBND.shape[:2]
    # Without context parallelism, segments share no keys, so a single call copies none.
    if num_rows > 1 or num_queries == key_SBGD.size(0):
        return False
    # A single sequence has two segments: its two chunks on this rank.
    return len(segments) <= 2 or num_queries >= LONG * len(segments)


@lru_cache(maxsize=16)
def slices_of(segments: tuple[Segment, ...], device: torch.device) -> tuple[merged_attention.Slice, ...]:
    """Create a `Slice` (queries and the keys that they see) per segment; the result is cached and shared by all
    layers."""
    slices, start = [], 0
    for segment in segments:
        num_keys = segment.key_end - segment.key_start
        # Starts of this segment alone, because each slice is a call of its own.
        _, *places = offsets((Segment(segment.num_queries, 0, num_keys),), 1, num_keys, device)
        queries = slice(start, start + segment.num_queries)
        slices.append(merged_attention.Slice(queries, slice(segment.key_start, segment.key_end), tuple(places)))
        start += segment.num_queries
    return tuple(slices)


def whole_row(rows_SBGD: torch.Tensor, lengths: tuple[int, ...], group: dist.ProcessGroup) -> torch.Tensor:
    """Return keys or values of the whole row, gathered from all ranks of the group.

    If `rows_SBGD` is already the whole row, it is returned unchanged.
    """
    if rows_SBGD.size(0) == sum(lengths):
        return rows_SBGD
    return gather_sequence(rows_SBGD, lengths, group)


def for_kernel(
    query_SBND: torch.Tensor, key_SBGD: torch.Tensor, value_SBGD: torch.Tensor, segments: tuple[Segment, ...]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, tuple[Any, ...]]:
    """Return queries, keys, values and starts of all segments of all rows, in the format of varlen kernels."""
    keys_T, *places = offsets(segments, query_SBND.size(1), key_SBGD.size(0), query_SBND.device)
    if keys_T is not None:
        key_SBGD, value_SBGD = key_SBGD.index_select(0, keys_T), value_SBGD.index_select(0, keys_T)
    return rows_to_tokens(query_SBND), rows_to_tokens(key_SBGD), rows_to_tokens(value_SBGD), tuple(places)


def rows_to_tokens(rows_SBND: torch.Tensor) -> torch.Tensor:
    """Concatenate rows: [B * S, N, D]."""
    return rows_SBND.transpose(0, 1).flatten(0, 1)


def tokens_to_rows(tokens_TND: torch.Tensor, like_SBND: torch.Tensor) -> torch.Tensor:
    """Invert `rows_to_tokens`: [S, B, N, D]."""
    return tokens_TND.unflatten(0, (like_SBND.size(1), -1)).transpose(0, 1)
