"""Implement MTP heads in plain torch on top of a transformers trunk, and draft with them.

transformers drops MTP tensors when it loads a model. It can draft with heads (`use_mtp`) only for two of the supported
families at their published sizes. This module therefore reads the heads from the safetensors files. Modules inside a
head have the names of megatron-core. The decoder layer of a head is a copy of one of the trunk's layers. `engine.py`
verifies the drafts.

Shapes: B batch (always 1), S positions, H hidden size.
"""

from collections.abc import Sequence
from copy import deepcopy
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import DynamicCache
from transformers.cache_utils import DynamicIndexedLayer
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

from swiftlite.bridge.encoding.expert_stack import stack
from swiftlite.bridge.encoding.index import format_of
from swiftlite.bridge.rejoin import joined
from swiftlite.bridge.rows import renamed, shapes_of
from swiftlite.bridge.tensors import Checkpoint
from swiftlite.engines.transformers.draft_generator import DraftSteps
from swiftlite.families.architecture import Outside
from swiftlite.families.attention import LatentAttention
from swiftlite.families.resolved import HfModel


class MtpHead(nn.Module):
    """One MTP depth: norms, the projection of [embedding, hidden], a decoder layer, and an output norm.

    Args:
        decoder: the trunk without its output layer (`model.get_decoder()`). The head copies its norm and one of its
            layers, with the MLP of another one if no layer has both. The copy has the right kinds of attention and MLP,
            and a router's bias has the right dtype.
        sources: indices of the decoder layers whose attention and whose MLP are copied.
        has_window: whether the attention has a sliding window.
        has_indexer: whether this layer has an indexer (DSA), which requires a mask and a cache for its keys.
        output_size: number of tokens of the head's own output layer; 0 without one.
    """

    def __init__(
        self,
        decoder: Any,
        sources: tuple[int, int],
        has_window: bool = False,
        has_indexer: bool = False,
        output_size: int = 0,
    ):
        super().__init__()
        size, norm = decoder.config.hidden_size, final_norm(decoder)
        # Copies, because norms of families differ (Gemma's multiply by 1 + w). All weights are read later.
        self.enorm = deepcopy(norm)
        self.hnorm = deepcopy(norm)
        self.final_layernorm = deepcopy(norm)
        self.eh_proj = nn.Linear(2 * size, size, bias=False, device=decoder.device, dtype=decoder.dtype)
        self.output_layer = None
        if output_size:
            self.output_layer = nn.Linear(size, output_size, bias=False, device=decoder.device, dtype=decoder.dtype)
        attention, mlp = sources
        self.transformer_layer: Any = deepcopy(decoder.layers[attention])
        if is_half(self.transformer_layer):
            others = [deepcopy(decoder.layers[mlp])] if mlp != attention else []
            self.transformer_layer = HalfLayers([self.transformer_layer, *others])
        elif mlp != attention:
            self.transformer_layer.mlp = deepcopy(decoder.layers[mlp].mlp)
        if getattr(self.transformer_layer, "hidden_size_per_layer_input", 0):  # of Gemma 4, not of its heads
            self.transformer_layer.hidden_size_per_layer_input = 0
            for name in ("per_layer_input_gate", "per_layer_projection", "post_per_layer_input_norm"):
                delattr(self.transformer_layer, name)
        self.transformer_layer.self_attn.layer_idx = 0  # each head has a separate cache of one layer
        self.transformer_layer.self_attn.store_full_length_kv = False  # in Gemma 4: no other layer reads its keys
        self.make_mask = create_sliding_window_causal_mask if has_window else create_causal_mask
        self._has_indexer = has_indexer
        if has_indexer:
            self.transformer_layer.self_attn.indexer.layer_idx = 0
            # The indexer reads the mask, which transformers leaves out where a kernel can be causal without it.
            self.make_mask = partial(create_causal_mask, allow_is_causal_skip=False)

    def forward(self, embedding_BSH: torch.Tensor, hidden_BSH: torch.Tensor, **layer_kwargs: Any) -> torch.Tensor:
        """Return the state [B, S, H] before the output norm.

        Args:
            embedding_BSH: at position i of depth k (from 0), the embedding of the token at i + k + 1.
            hidden_BSH: state of the previous depth, or of the trunk.
            layer_kwargs: arguments of the decoder layer.
        """
        output = self.transformer_layer(self.projected(embedding_BSH, hidden_BSH), **layer_kwargs)
        if isinstance(output, tuple):  # GLM-5 also returns the selected tokens
            return output[0]
        return output

    def projected(self, embedding_BSH: torch.Tensor, hidden_BSH: torch.Tensor) -> torch.Tensor:
        """Return the input of the decoder layer, [B, S, H]."""
        return self.eh_proj(torch.cat((self.enorm(embedding_BSH), self.hnorm(hidden_BSH)), dim=-1))

    def new_cache(self) -> DynamicCache:
        """Return an empty cache of the head's layer."""
        cache = DynamicCache()
        if self._has_indexer:
            cache.layers.append(DynamicIndexedLayer())
        return cache


class HalfLayers(nn.ModuleList):
    """The decoder layer of a head, if it consists of a layer with attention and one with an MLP, as in Nemotron-H. The
    second can be missing."""

    @property
    def self_attn(self) -> Any:
        """The attention of the first layer."""
        return self[0].mixer

    def forward(self, hidden_BSH: torch.Tensor, **layer_kwargs: Any) -> torch.Tensor:
        """Run both layers."""
        for layer in self:
            hidden_BSH = layer(hidden_BSH, **layer_kwargs)
        return hidden_BSH


def is_half(layer: Any) -> bool:
    """Return whether a decoder layer of transformers has either attention or an MLP, its `mixer`."""
    return hasattr(layer, "mixer")


def final_norm(decoder: Any) -> Any:
    """Return the final norm of a trunk of transformers, which Nemotron-H names otherwise."""
    return decoder.norm_f if hasattr(decoder, "norm_f") else decoder.norm


class ScaledOutput(nn.Module):
    """An output layer whose logits are divided by a number, and have a cap (`Outside`)."""

    def __init__(self, output_layer: Any, outside: Outside):
        super().__init__()
        self.weight = output_layer.weight
        self._output_layer, self._outside = output_layer, outside

    def forward(self, hidden_BSH: torch.Tensor) -> torch.Tensor:
        """Return logits [B, S, V]."""
        return scaled(self._output_layer(hidden_BSH), self._outside)


def scaled(logits: torch.Tensor, outside: Outside) -> torch.Tensor:
    """Return the logits of a model from the products of states and rows of the output matrix."""
    if outside.logits_divisor != 1:
        logits = logits / outside.logits_divisor
    if outside.logits_cap is not None:
        logits = torch.tanh(logits / outside.logits_cap) * outside.logits_cap
    return logits


class DraftOutput(nn.Module):
    """The trunk's output layer for the tokens that heads can draft. All other tokens have the logit -inf.

    Args:
        output_layer: output layer of the trunk.
        draft_vocab: ids of the tokens that heads can draft.
        outside: how logits are divided and capped.
    """

    def __init__(self, output_layer: Any, draft_vocab: Sequence[int], outside: Outside):
        super().__init__()
        self._outside = outside
        self._drafted = torch.tensor(draft_vocab, device=output_layer.weight.device)
        # A copy of these rows, so that only they are multiplied.
        self._rows = output_layer.weight.detach()[self._drafted]
        self._vocab_size = len(output_layer.weight)

    def forward(self, hidden_BSH: torch.Tensor) -> torch.Tensor:
        """Return logits [B, S, V]."""
        logits = scaled(F.linear(hidden_BSH, self._rows), self._outside)
        whole = logits.new_full((*logits.shape[:-1], self._vocab_size), -torch.inf)
        return whole.index_copy_(-1, self._drafted, logits)


def load_heads(model: HfModel, decoder: Any) -> nn.ModuleList:
    """Load the checkpoint's MTP heads, on the device and in the dtype of the decoder."""
    heads = nn.ModuleList()
    outside = model.family.outside(model.config)
    output_size = outside.vocab if outside.heads_have_output_layers else 0
    with Checkpoint(model.directory, format_of(model.config)) as checkpoint:
        for index in range(model.heads.layers):
            frame = model.family.mtp.frame_rows(model.config, index)
            # In the order of megatron-core: [hidden, embedding] of MiMo becomes [embedding, hidden].
            state = {row.mcore.removeprefix(f"mtp.layers.{index}."): joined(row, checkpoint.read) for row in frame}
            if outside.heads_share_final_norm:
                # Files of ERNIE have no output norm of heads; in training, it is the trunk's.
                state["final_layernorm.weight"] = final_norm(decoder).weight
            layer = read_layer(model, checkpoint, model.family.mtp.block(model.config, index))
            head = MtpHead(decoder, **layer_options(model), output_size=output_size)
            head.load_state_dict(state | layer, strict=True)
            heads.append(head)
    return heads.requires_grad_(False).eval()


def layer_options(model: HfModel) -> dict[str, Any]:
    """Return the arguments of `MtpHead` for the decoder layer of the family's heads."""
    architecture = model.family.architecture(model.config)
    attention = architecture.mtp_block.attention
    return {
        "sources": architecture.mtp_sources,
        "has_window": attention.window is not None,
        "has_indexer": isinstance(attention, LatentAttention) and attention.indexer is not None,
    }


def read_layer(model: HfModel, checkpoint: Checkpoint, prefix: str) -> dict[str, torch.Tensor]:
    """Read the decoder layer of a head, with the names of an `MtpHead`.

    Args:
        prefix: prefix of the layer's names in the files.
    """
    tensors = {
        f"transformer_layer.{renamed(name, model.family.memory_names)}": checkpoint.read(prefix + name)
        for name in shapes_of(model.family.block_rows(model.config))
    }
    return stack(tensors)


class MtpSteps(DraftSteps):
    """Draft with MTP heads, or with drafters that have the interface of an `MtpHead`. For arguments, see `DraftSteps`.

    Depth k (from 0) at position i receives the state of depth k - 1 at i, the token at i + k + 1 and, through its KV
    cache, all earlier positions. The depth predicts the token at i + k + 2. Rotary positions equal the trunk's
    positions.

    Example with two heads, after the trunk has processed t0 .. t3 and chosen t4; d marks a draft:

        position              0   1   2   3
        inputs of depth 0    h0  h1  h2  h3    the trunk's states
                             t1  t2  t3  t4    from position 3 it drafts d5
        inputs of depth 1    s0  s1  s2  s3    depth 0's states
                             t2  t3  t4  d5    from position 3 it drafts d6

    Position 3 of depth 1 depends on a draft, so it is removed from the KV cache of depth 1. Depth 0 keeps position 3,
    so s3 is not computed again; it is stored as the input of depth 1 in the next round. In general, depth k removes its
    last k positions, and one input state is stored for it. If d5 is accepted and t6 follows, the next round is

        depth 0 at 4, 5 receives h4 t5, h5 t6 and drafts d7
        depth 1 at 3, 4, 5 receives s3 t5, s4 t6, s5 d7 and drafts d8

    If an earlier draft is below the confidence threshold, the following depths are skipped. A skipped depth keeps its
    KV cache, and the states of the depth before it are stored as its inputs for the next round.

    If more tokens are drafted than there are heads, the last head drafts the rest. Each time, this head reads its own
    previous state instead of the state of the previous depth, one position further. With one head, this is the
    algorithm of vLLM.
    """

    def reset(self) -> None:
        """Forget the sequence."""
        super().reset()
        self._waiting: list[list[torch.Tensor]] = [[] for _ in self._heads]
        self._end, self._next_depth = 0, len(self._heads)

    def begin(self, ids: torch.Tensor, states: torch.Tensor) -> None:
        """Begin a round."""
        self._finish_round()
        self._end = ids.shape[1] - 1  # the newest token's position, which the trunk has not processed
        # Taken once per round: a depth that drafts several times lengthens its cache.
        self._begins = [cache.get_seq_length() for cache in self._caches]
        self._next_depth = 0
        # Depth 0 has all positions before `_begins[0]` in its cache; states after `_end` belong to rejected drafts.
        self._next_states = states[:, : self._end - self._begins[0]]

    def logits(self, number: int, ids: torch.Tensor) -> torch.Tensor:
        """Return the logits [1, V] of a draft."""
        if number < len(self._heads):
            return self._run_depth(number, ids)
        return self._run_last(ids)

    def _finish_round(self) -> None:
        """Keep what the next round needs: inputs of the first skipped depth, and keys of known tokens."""
        depth = self._next_depth
        if depth < len(self._heads):
            fed = torch.cat((*self._waiting[depth], self._next_states), dim=1)
            self._waiting[depth] = [fed[:, : max(self._end - depth + 1, 0) - self._begins[depth]]]
        for depth, cache in enumerate(self._caches):
            # Depth k keeps the positions before `_end` - k, whose tokens are all known.
            surplus = cache.get_seq_length() - max(self._end - depth, 0)
            if surplus > 0:
                cache.crop(-surplus)

    def _run_depth(self, depth: int, ids: torch.Tensor) -> torch.Tensor:
        """Run a head that has not run in this round, and return its logits."""
        begin = self._begins[depth]
        fed = torch.cat((*self._waiting[depth], self._next_states), dim=1)
        if depth > 0:
            # Positions that the previous depth keeps and this one does not, see above.
            kept, kept_before = max(self._end - depth, 0), max(self._end - depth + 1, 0)
            self._waiting[depth] = [fed[:, kept - begin : kept_before - begin]]
        head = self._heads[depth]
        before, after = self._run(head, self._caches[depth], fed, ids, begin + depth + 1)
        self._next_depth += 1
        self._next_states = before if self._drafting.chains_before_norm else after
        self._own_states = before if self._drafting.recycles_before_norm else after
        return self._output(head, after)

    def _run_last(self, ids: torch.Tensor) -> torch.Tensor:
        """Run the last head on its own state, and return its logits."""
        head = self._heads[-1]
        before, after = self._run(head, self._caches[-1], self._own_states[:, -1:], ids, ids.shape[1] - 1)
        self._own_states = before if self._drafting.recycles_before_norm else after
        return self._output(head, after)

    def _run(
        self, head: Any, cache: DynamicCache, hidden: torch.Tensor, ids: torch.Tensor, start: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run a head, and return its states before and after the output norm.

        The output layer uses the states after the norm. `Drafting` states which ones the next depth uses.

        Args:
            ids: the row with the drafts so far, [1, S].
            start: position in the row of the first token that the head reads; it reads all later tokens, too.
        """
        embedding = self._embeddings(ids[:, start:])
        begin = cache.get_seq_length()
        # The cache has all earlier positions of the row, because rows have no padding here.
        position_ids = torch.arange(begin, begin + embedding.shape[1], device=ids.device)[None]
        # The mask needs indices in the row, and rotary embeddings the positions behind images.
        rotary_positions = position_ids
        if self._images is not None:
            embedding = self._images.put_into(embedding, start)
            rotary_positions = self._images.positions(begin, embedding.shape[1])
        # As in training (model/mtp.py) and in vLLM's draft classes of these families.
        if self._drafting.zeroes_first_embedding:
            embedding = embedding.masked_fill((position_ids == 0)[..., None], 0)
        mask = head.make_mask(
            config=self._decoder.config,
            inputs_embeds=embedding,
            attention_mask=None,
            past_key_values=cache,
            position_ids=position_ids,
        )
        before = head(
            embedding,
            hidden,
            attention_mask=mask,
            position_ids=position_ids,
            past_key_values=cache,
            use_cache=True,
            position_embeddings=self._rotary_emb(head, hidden, rotary_positions),
        )
        return before, head.final_layernorm(before)

    def _rotary_emb(self, head: Any, hidden: torch.Tensor, positions: torch.Tensor) -> Any:
        """Return cosines and sines. In some models, layers have different rotary embeddings, by their type."""
        if not hasattr(self._decoder, "rotary_emb"):  # no layer has one
            return None
        if not hasattr(self._decoder.rotary_emb, "layer_types"):
            return self._decoder.rotary_emb(hidden, positions)
        layer, attention = head.transformer_layer, head.transformer_layer.self_attn
        kinds = (getattr(attention, "layer_type", None), getattr(attention, "attention_type", None))  # OLMo 3: second
        kind = kinds[0] or kinds[1] or layer.attention_type  # of Step-3.5
        return self._decoder.rotary_emb(hidden, positions, kind)
