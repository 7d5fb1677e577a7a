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
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import nn
from transformers import DynamicCache, LogitsProcessorList
from transformers.cache_utils import DynamicIndexedLayer
from transformers.generation.candidate_generator import CandidateGenerator
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

from swiftlite.base.drafting import Drafting
from swiftlite.bridge.encoding.expert_stack import stack
from swiftlite.bridge.encoding.index import format_of
from swiftlite.bridge.rejoin import joined
from swiftlite.bridge.rows import renamed, shapes_of
from swiftlite.bridge.tensors import Checkpoint
from swiftlite.engines.transformers.image_inputs import ImageInputs
from swiftlite.engines.transformers.verification import draw
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
        self.transformer_layer.self_attn.layer_idx = 0  # each head has a separate cache of one layer
        self.transformer_layer.self_attn.store_full_length_kv = False  # in Gemma 4: no other layer reads its keys
        self.make_mask = create_sliding_window_causal_mask if has_window else create_causal_mask
        self._has_indexer = has_indexer
        if has_indexer:
            self.transformer_layer.self_attn.indexer.layer_idx = 0
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


class MtpCandidateGenerator(CandidateGenerator):
    """Draft with MTP heads through the interface of transformers' assisted generation.

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

    Args:
        decoder: the trunk without its output layer, whose states are passed to `get_candidates`.
        output_layer: output layer of the trunk, used by all heads without one of their own, or a `DraftOutput` made
            from it.
        heads: the MTP heads, loaded by `load_heads`.
        num_tokens: tokens to draft per round.
        drafting: inputs of the heads, `MtpLayout.drafting` of the family.
        logits_processor: applied to the heads' logits; None drafts the most likely token.
        generator: random number generator; None is torch's default.
        confidence: drafting stops after a draft token with a smaller probability; this token is still proposed. With 0,
            `num_tokens` tokens are always drafted.
        images: images of the prompt, whose features the heads read in place of placeholder tokens; None without images.
        embedding_multiplier: factor of the embeddings that heads read, if it is not in the embedding's module.
        is_greedy: whether the most likely token is drafted also with a `logits_processor`.
    """

    requires_model_outputs = True
    model_kwargs_overrides: ClassVar[dict[str, Any]] = {"output_hidden_states": True}

    def __init__(
        self,
        decoder: Any,
        output_layer: nn.Module,
        heads: nn.ModuleList,
        num_tokens: int,
        drafting: Drafting,
        logits_processor: LogitsProcessorList | None = None,
        generator: torch.Generator | None = None,
        confidence: float = 0.0,
        images: ImageInputs | None = None,
        embedding_multiplier: float = 1.0,
        is_greedy: bool = False,
    ):
        self._images = images
        self._embedding_multiplier = embedding_multiplier
        self._decoder = decoder
        self._drafting = drafting
        self._output_layer = output_layer
        self._heads: list[Any] = list(heads)[:num_tokens]
        self._num_tokens = num_tokens
        self._logits_processor = logits_processor
        self._is_greedy = is_greedy or logits_processor is None
        self._generator = generator
        self._confidence = confidence
        self._reset()

    def _reset(self) -> None:
        self._caches = [head.new_cache() for head in self._heads]
        self._waiting: list[list[torch.Tensor]] = [[] for _ in self._heads]

    @torch.no_grad()
    def get_candidates(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        input_ids: torch.Tensor,
        model_kwargs: dict[str, Any] | None = None,
        model_outputs: Any = None,
        is_first_iteration: bool = False,
        n_last_matches: int = 0,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Append the drafts to `input_ids` [1, S].

        Args:
            model_outputs: outputs of the trunk's last pass; `hidden_states[-1]` [1, positions of that pass, H] are the
                states that `Drafting` selects. Only the states of accepted tokens are used; the states after them
                belong to rejected drafts.
            is_first_iteration: whether the sequence is new to the trunk; then nothing is drafted.

        Returns:
            The ids with the drafts, and the logits [1, drafts, V] from which the drafts were sampled. The logits are
                None if the most likely tokens were drafted; verification then treats drafts as certain.
        """
        if is_first_iteration:
            self._reset()
            return input_ids, None
        end = input_ids.shape[1] - 1  # the trunk has processed positions 0 .. end - 1; the token at `end` is the newest
        begins = [cache.get_seq_length() for cache in self._caches]
        ids = input_ids
        drawn_from: list[torch.Tensor] = []
        is_sure = True
        hidden = model_outputs.hidden_states[-1][:, : end - begins[0]]
        for depth, head in enumerate(self._heads):
            fed = torch.cat((*self._waiting[depth], hidden), dim=1)
            # Positions that the previous depth keeps and this one does not, see above.
            kept = begins[depth]
            if is_sure:
                kept = max(end - depth, 0)
            kept_before = max(end - depth + 1, 0)
            if depth > 0:
                self._waiting[depth] = [fed[:, kept - begins[depth] : kept_before - begins[depth]]]
            if not is_sure:
                break
            before, hidden = self._run(head, self._caches[depth], fed, ids, begins[depth] + depth + 1)
            ids, is_sure = self._append_draft(head, ids, hidden, drawn_from)
            if self._drafting.chains_before_norm:
                hidden = before
        for _ in range(len(self._heads), self._num_tokens):
            if not is_sure:
                break
            own = hidden
            if self._drafting.recycles_before_norm:
                own = before
            last = self._heads[-1]
            before, hidden = self._run(last, self._caches[-1], own[:, -1:], ids, ids.shape[1] - 1)
            ids, is_sure = self._append_draft(last, ids, hidden, drawn_from)
        for depth, cache in enumerate(self._caches):
            surplus = cache.get_seq_length() - max(end - depth, 0)
            if surplus > 0:
                cache.crop(-surplus)
        if not drawn_from:
            return ids, None
        return ids, torch.stack(drawn_from, dim=1)

    def _run(
        self, head: Any, cache: DynamicCache, hidden: torch.Tensor, ids: torch.Tensor, start: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run a head, and return its states before and after the output norm.

        The output layer uses the states after the norm. `Drafting` states which ones the next depth uses.

        Args:
            ids: the row with the drafts so far, [1, S].
            start: position in the row of the first token that the head reads; it reads all later tokens, too.
        """
        embedding = self._decoder.get_input_embeddings()(ids[:, start:]) * self._embedding_multiplier
        begin = cache.get_seq_length()
        position_ids = torch.arange(begin, begin + embedding.shape[1], device=ids.device)[None]
        rotary_positions = position_ids
        if self._images is not None:
            embedding = self._images.put_into(embedding, start)
            rotary_positions = self._images.positions(begin, embedding.shape[1])
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

    def _append_draft(
        self, head: Any, ids: torch.Tensor, hidden: torch.Tensor, drawn_from: list[torch.Tensor]
    ) -> tuple[torch.Tensor, bool]:
        """Return the ids with another draft token of `head` appended, and whether drafting may continue.

        Args:
            drawn_from: the logits [1, V] of the draft are appended to this list if the draft is sampled.
        """
        logits = self._logits(head, ids, hidden)
        if self._logits_processor is not None:
            logits = self._logits_processor(ids, logits.float())  # pyright: ignore[reportArgumentType]
        if self._is_greedy:
            draft = logits.argmax(dim=-1)
        else:
            drawn_from.append(logits)
            draft = draw(logits[0].softmax(dim=-1), self._generator)
        ids = torch.cat((ids, draft[None]), dim=1)
        if self._confidence == 0:
            return ids, True  # does not synchronize with a GPU
        return ids, bool(logits[0].float().softmax(dim=-1)[draft] >= self._confidence)

    def _logits(self, head: Any, ids: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """Return the logits [1, V] of the token after `ids`, from the last state."""
        output_layer = head.output_layer or self._output_layer
        return output_layer(hidden[:, -1])
