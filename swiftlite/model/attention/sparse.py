"""DeepSeek sparse attention (DSA): latent attention whose queries see only the keys that an indexer selects.

Attention is computed for blocks of queries with a mask over the keys before them. The mask of a block is created from
the selected keys, in the forward pass and again in the backward pass, in which the block is recomputed. A layer with an
indexer therefore stores `topk` numbers for each token, and never a matrix of S x S. The number of operations is that of
attention to all keys.

Sequences of at most `topk` tokens, in which an indexer selects all of them, are computed as without an indexer.

Shapes: S sequence, B batch, H hidden size, N heads on this tensor-parallel rank, D channels of their queries and keys,
V of their values, K keys of whole rows; Q queries of a block.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

from swiftlite.families import indexer as families
from swiftlite.model.attention.attention import MAX_QUERIES, CoreAttention
from swiftlite.model.attention.cache import Cache
from swiftlite.model.attention.draft_attention import Draft
from swiftlite.model.attention.indexer import Index, Indexer, Place, Teacher, loss_of, select, visible
from swiftlite.model.attention.mla import MLASelfAttention
from swiftlite.model.context_parallel import causal_segments, gather_sequence, shared_row
from swiftlite.model.loss.balance import RoutedTokens


@dataclass
class Selections:
    """The selections of the layers in one forward pass, which later layers use.

    megatron-core's layers pass this object to attention in the argument for a mask. Recomputed layers read it again in
    the backward pass.

    Attributes:
        cache: in decoding, the KV cache of the rows.
        tokens: the tokens of the pass, for the loss of indexers; None: no loss is computed.
        by_layer: result of `select` for each layer (from 1) with an indexer.
        are_shared: whether layers use selections of earlier layers.
        losses: losses of indexers in a trunk that is computed without gradients; None: they are attached to the output
            of the attention.
    """

    cache: Cache | None = None
    tokens: RoutedTokens | None = None
    by_layer: dict[int, list[torch.Tensor | None]] = field(default_factory=dict)
    are_shared: bool = False
    losses: list[torch.Tensor] | None = None

    def before(self, layer: int) -> list[torch.Tensor | None]:
        """Return the selection of the last layer before `layer`."""
        return self.by_layer[max(number for number in self.by_layer if number < layer)]

    def attach_losses(self, hidden_SBH: torch.Tensor) -> torch.Tensor:
        """Return the states unchanged; their backward pass also adds the gradients of `losses`."""
        for loss in self.losses or ():
            hidden_SBH = MoEAuxLossAutoScaler.apply(hidden_SBH, loss)
        return hidden_SBH


def in_place_of_mask(
    layers: Iterable[Any], cache: Cache | None, tokens: RoutedTokens | None, *, is_frozen: bool = False
) -> Cache | Selections | None:
    """Return what layers get in place of a mask: `Selections` if any of them is sparse, otherwise the cache.

    Args:
        is_frozen: whether the layers are computed without gradients.
    """
    sparse = [layer.self_attention for layer in layers if isinstance(layer.self_attention, SparseAttention)]
    if not sparse:
        return cache
    are_shared = any(attention.indexer is None for attention in sparse)
    return Selections(cache, tokens, are_shared=are_shared, losses=[] if is_frozen else None)


@dataclass
class _Pass:
    """One call of a `SparseAttention`, which its core attention gets in place of a mask.

    Attributes:
        hidden_SBH, latent_SBL, rotary_emb: inputs of the indexer on this sequence-parallel rank.
    """

    module: "SparseAttention"
    selections: Selections
    hidden_SBH: torch.Tensor
    latent_SBL: torch.Tensor
    rotary_emb: torch.Tensor

    @property
    def learns(self) -> bool:
        """Whether the loss of the indexer is computed."""
        indexer, tokens = self.module.indexer, self.selections.tokens
        has_gradients = torch.is_grad_enabled() or self.selections.losses is not None
        has_loss = indexer is not None and indexer.is_trained and self.module.training and has_gradients
        return has_loss and tokens is not None and tokens.mean_weight > 0

    def attend(
        self,
        core: CoreAttention,
        dense: Callable[[Cache | None], torch.Tensor],
        query_SBND: torch.Tensor,
        key_KBND: torch.Tensor,
        value_KBNV: torch.Tensor,
        packed: PackedSeqParams | None,
    ) -> torch.Tensor:
        """Return the attention [S, B, N * V].

        Args:
            core: the core attention.
            dense: computes the attention to all keys, with this cache.
            query_SBND, key_KBND, value_KBNV: as for `CoreAttention`, with an axis B also in a packed row.
        """
        module, kept = self.module, self.selections.cache
        lengths, group = shared_row(query_SBND.size(0), packed, module.pg_collection.cp)
        if kept is None:
            places, longest = places_of(lengths, group, query_SBND.size(1)), max(lengths)
        else:
            places = cached_places(kept)
            longest = max((place.num_keys for place in places), default=0)
            # The cache has rows first, and places count keys along the first axis.
            key_KBND, value_KBNV = (
                kept.keep((core, name), new.squeeze(1)).transpose(0, 1)
                for name, new in (("key", key_KBND), ("value", value_KBNV))
            )
        # Of whole sequences, so that all context-parallel ranks agree.
        selects = longest > module.topk and not (module.config.indexer_is_alone and module.training)
        selected: list[torch.Tensor | None] = [None] * len(places)
        index = None
        # In decoding always: its keys must be in the cache when a row becomes longer than `topk`.
        if module.indexer is not None and (selects or kept is not None or self.learns):
            index = self._index(module.indexer, lengths, group)
        if selects and index is not None:
            selected = select(index, places, module.topk)
            # Only then, because it has `topk` numbers for each token.
            if self.selections.are_shared:
                self.selections.by_layer[module.layer_number] = selected
        elif selects:
            selected = self.selections.before(module.layer_number)
        if any(of_place is not None for of_place in selected):
            out = _Attend.apply(query_SBND, key_KBND, value_KBNV, places, selected, core.softmax_scale).flatten(2)
        else:
            out = dense(kept)
        if index is None or not self.learns:
            return out
        teacher = Teacher(query_SBND.detach(), key_KBND.detach(), core.softmax_scale, module.tp_group)
        return self._with_loss(out, index, teacher, places, selected)

    def _index(self, indexer: Indexer, lengths: tuple[int, ...], group: dist.ProcessGroup) -> Index:
        """Compute the indexer for the tokens of this context-parallel rank, with the keys of whole rows."""
        # Detached, as in DeepSeek-V3.2: the loss of the indexer trains the indexer only.
        hidden_SBH, latent_SBL = (
            self._on_all_sequence_ranks(tensor.detach()) for tensor in (self.hidden_SBH, self.latent_SBL)
        )
        with torch.set_grad_enabled(self.learns):
            index = indexer(hidden_SBH, latent_SBL, self.rotary_emb)
            key_KBC, kept = index.key, self.selections.cache
            if kept is not None:
                key_KBC = kept.keep((indexer, "key"), key_KBC.squeeze(1)).transpose(0, 1)
            elif group.size() > 1:
                key_KBC = gather_sequence(key_KBC, lengths, group)
        return Index(index.query, key_KBC, index.weight)

    def _on_all_sequence_ranks(self, tensor: torch.Tensor) -> torch.Tensor:
        if not self.module.config.sequence_parallel:
            return tensor
        return gather_from_sequence_parallel_region(tensor, group=self.module.tp_group)

    @torch.enable_grad()  # also in a trunk that is computed without gradients
    def _with_loss(
        self,
        out: torch.Tensor,
        index: Index,
        teacher: Teacher,
        places: Sequence[Place],
        selected: Sequence[torch.Tensor | None],
    ) -> torch.Tensor:
        """Return `out` unchanged, with the loss of the indexer attached, or added to `Selections.losses`."""
        indexer, tokens = self.module.indexer, self.selections.tokens
        assert indexer is not None
        assert tokens is not None
        sequence_SB = self._on_all_sequence_ranks(tokens.sequence_SB)
        weight_SB = (sequence_SB >= 0).float() * tokens.mean_weight
        mean = loss_of(indexer, index, teacher, places, selected, weight_SB)
        indexer.mean_loss = mean.detach() + (0 if indexer.mean_loss is None else indexer.mean_loss)
        # Times the divisor, by which megatron-core divides all gradients at the end of the step.
        loss = self.module.config.indexer_loss_coeff * tokens.divisor * mean
        if self.selections.losses is None:
            return MoEAuxLossAutoScaler.apply(out, loss)
        # In a frozen trunk, `out` has no gradient, and a loss that is attached to it would have none either.
        self.selections.losses.append(loss)
        return out


def places_of(lengths: tuple[int, ...], group: dist.ProcessGroup, num_rows: int) -> list[Place]:
    """Return the places of this rank's queries in whole rows.

    Args:
        lengths: lengths of the sequences of a whole row.
        group: the context-parallel ranks that share the row.
    """
    places = []
    for row in range(num_rows):
        start = 0
        for segment in causal_segments(lengths, group.rank(), group.size()):
            end = start + segment.num_queries
            places.append(Place(slice(start, end), row, slice(segment.key_start, segment.key_end), row))
            start = end
    return places


def cached_places(kept: Cache) -> list[Place]:
    """Return the places of the tokens of a pass in a cache [C, B, ...]."""
    places, start = [], 0
    for span in kept.spans:
        places.append(Place(slice(start, start + len(span)), 0, slice(0, span.end), span.row))
        start += len(span)
    return places


class SparseAttention(MLASelfAttention):
    """Latent attention with an indexer, or with the selection of an earlier layer.

    Later steps of an unrolled head do not select keys; the caller ensures that their sequences have at most `topk`
    tokens.

    Args:
        args, kwargs: arguments of `MLASelfAttention`.
        sizes: the indexer.
    """

    def __init__(self, *args: Any, sizes: families.Indexer, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.topk = sizes.topk
        self.indexer = None if sizes.is_shared else Indexer(sizes, self.config)
        self._pass: _Pass | None = None  # of the current call

    def forward(
        self, hidden_states: torch.Tensor, attention_mask: Any, *, rotary_pos_emb: torch.Tensor, **kwargs: Any
    ) -> tuple[Any, Any]:
        """Return outputs [S, B, H], and None as the bias.

        Args:
            attention_mask: `Selections`, or what `MLASelfAttention` gets.
            rotary_pos_emb, kwargs: as for `MLASelfAttention`.
        """
        selections = attention_mask
        if not isinstance(selections, Selections):
            selections = Selections(attention_mask)
        if isinstance(selections.cache, Draft):
            return super().forward(hidden_states, selections.cache, rotary_pos_emb=rotary_pos_emb, **kwargs)
        # Also as an attribute, because `get_query_key_value_tensors` does not get the mask.
        self._pass = _Pass(self, selections, hidden_states, hidden_states, rotary_pos_emb)
        try:
            return super().forward(hidden_states, self._pass, rotary_pos_emb=rotary_pos_emb, **kwargs)
        finally:
            self._pass = None

    def _reads_rows(self, attention_mask: Any) -> bool:
        if isinstance(attention_mask, _Pass):
            attention_mask = attention_mask.selections.cache
        return super()._reads_rows(attention_mask)

    def get_query_key_value_tensors(
        self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Compute the result of `MLASelfAttention`, and keep the latent of queries for the indexer."""
        tensors = super().get_query_key_value_tensors(hidden_states, *args, **kwargs)
        if self._pass is not None:
            latent = tensors[3]
            self._pass.latent_SBL = latent if latent.dim() == hidden_states.dim() else latent.unsqueeze(1)
        return tensors

    def _checkpointed_attention_forward(self, query: Any, key: Any, value: Any, attention_mask: Any, **kwargs: Any):
        """Compute core attention. It recomputes what it does not store, except for attention to all keys."""
        if isinstance(attention_mask, _Pass):
            return self.core_attention(query, key, value, attention_mask, **kwargs)
        return super()._checkpointed_attention_forward(query, key, value, attention_mask, **kwargs)


class _SparseCore(CoreAttention):
    """Core attention that computes the calls of a `SparseAttention`."""

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any, **kwargs: Any
    ) -> torch.Tensor:
        """Compute attention, as `CoreAttention`.

        Args:
            attention_mask: the call, or what `CoreAttention` gets.
            kwargs: further arguments of `CoreAttention`.
        """
        of_core = super().forward
        if not isinstance(attention_mask, _Pass):
            return of_core(query, key, value, attention_mask, **kwargs)
        module, packed = attention_mask.module, kwargs.get("packed_seq_params")
        dense: Callable[..., torch.Tensor] = partial(of_core, query, key, value, packed_seq_params=packed)
        if module.checkpoint_core_attention and module.training:
            dense = partial(module._checkpointed_attention_forward, query, key, value, packed_seq_params=packed)
        if packed is None:
            return attention_mask.attend(self, dense, query, key, value, packed)
        query, key, value = (tensor.unsqueeze(1) for tensor in (query, key, value))
        out = attention_mask.attend(self, dense, query, key, value, packed)
        # `dense` has removed the axis B itself.
        return out if out.dim() == 2 else out.squeeze(1)


@cache
def sparse_core(core: type[CoreAttention]) -> type:
    """Return a class of core attention for a `SparseAttention`."""
    return type(f"Sparse{core.__name__}", (_SparseCore, core), {})


class _Attend(torch.autograd.Function):
    """Attention [S, B, N, V] of queries to selected keys, which stores only its inputs."""

    @staticmethod
    def forward(
        ctx,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        places: Sequence[Place],
        selected: Sequence[torch.Tensor | None],
        scale: float,
    ) -> torch.Tensor:
        ctx.save_for_backward(query, key, value)
        ctx.of_call = places, selected, scale
        out = query.new_zeros(*query.shape[:3], value.size(-1))
        for block, own in _blocks(places, selected):
            out[block.queries, block.query_row] = _attend_block(_parts(block, query, key, value), block, own, scale)
        return out

    @staticmethod
    def backward(ctx, *grad_outputs: torch.Tensor) -> tuple[Any, ...]:
        (grad,) = grad_outputs
        (query, key, value), (places, selected, scale) = ctx.saved_tensors, ctx.of_call
        grad_query = torch.zeros_like(query)
        # Many blocks add to the gradient of a key.
        grad_key, grad_value = (torch.zeros_like(tensor, dtype=torch.float32) for tensor in (key, value))
        for block, own in _blocks(places, selected):
            # Leaves of their own, so that the graph of a block ends here and is freed before the next block.
            parts = [part.detach().requires_grad_() for part in _parts(block, query, key, value)]
            with torch.enable_grad():
                out = _attend_block(parts, block, own, scale)
            of_query, of_key, of_value = torch.autograd.grad(out, parts, grad[block.queries, block.query_row])
            grad_query[block.queries, block.query_row] = of_query
            grad_key[block.keys, block.key_row] += of_key
            grad_value[block.keys, block.key_row] += of_value
        return grad_query, grad_key.to(key.dtype), grad_value.to(value.dtype), None, None, None


def _blocks(
    places: Sequence[Place], selected: Sequence[torch.Tensor | None]
) -> Iterable[tuple[Place, torch.Tensor | None]]:
    """Yield blocks of at most MAX_QUERIES queries with the keys that are selected for them."""
    for place, of_place in zip(places, selected, strict=True):
        first = place.queries.start
        for block in place.blocks(MAX_QUERIES):
            own = slice(block.queries.start - first, block.queries.stop - first)
            yield block, None if of_place is None else of_place[own]


def _parts(block: Place, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> list[torch.Tensor]:
    """Return the queries, keys and values of a block."""
    keys = [tensor[block.keys, block.key_row] for tensor in (key, value)]
    return [query[block.queries, block.query_row], *keys]


def _attend_block(
    parts: Sequence[torch.Tensor], block: Place, selected: torch.Tensor | None, scale: float
) -> torch.Tensor:
    """Return the attention [Q, N, V] of a block.

    Args:
        parts: result of `_parts`.
        selected: the keys that are selected for the queries; None: all keys before them.
    """
    query, key, value = (tensor.transpose(0, 1)[None] for tensor in parts)
    is_causal = selected is None and block.num_queries == block.num_keys
    mask = None if is_causal else visible(block, selected, query.device)
    out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=is_causal, scale=scale)
    return out[0].transpose(0, 1)
