"""The module of DFlash and DSpark drafters (`families/dflash.py`).

Shapes: S sequence (of this context- and sequence-parallel rank), B batch, H hidden size, F features, K queries of a
block, R rotary channels, V vocabulary, r rank of the Markov head.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from megatron.core.fp4_utils import get_fp4_context
from megatron.core.fp8_utils import get_fp8_context
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import nn

from swiftlite.model.attention.block_attention import Context, joined
from swiftlite.model.attention.cache import Cache
from swiftlite.model.copied_config import with_settings
from swiftlite.model.drafter import DrafterLayer, DraftInputs
from swiftlite.model.layers.recompute import checkpoint
from swiftlite.model.layers.tensor_parallel import ColumnParallelLinear
from swiftlite.runtime.device import on_device


class DFlashLayer(DrafterLayer):
    """The whole drafter, with decoder layers of its own.

    Args:
        config: config of the trunk.
        layer_number: 1.
        layers: specs of the decoder layers, whose core attention is `BlockAttention`.
        settings: settings of the decoder layers that replace those of `config`.
        norm: class of the norms of the context and of the output.
        num_features: F.
        mask_token: the token in place of unknown tokens.
        samples_from_anchor: whether the anchor's own state predicts the first draft.
        vocab: V.
        markov_rank: r; 0 without a Markov head.
        options: further arguments of megatron-core's MTP layer.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        *,
        layers: Sequence[ModuleSpec],
        settings: Mapping[str, Any],
        norm: type,
        num_features: int,
        mask_token: int,
        samples_from_anchor: bool,
        vocab: int,
        markov_rank: int,
        **options: Any,
    ):
        # Attention gets keys of the context in place of a mask, so it must not be recomputed separately.
        recomputed = [name for name in config.recompute_modules or () if name != "core_attn"]
        config = with_settings(config, recompute_modules=recomputed, **settings)
        super().__init__(config, layer_number)
        hidden = config.hidden_size
        self.mask_token = mask_token
        self.fc = nn.Linear(num_features * hidden, hidden, bias=False, dtype=config.params_dtype)
        # Every tensor-parallel rank has the whole matrix. With sequence parallelism, each computes a part of the row,
        # and megatron-core sums the gradients.
        self.fc.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        self.hidden_norm = norm(config, hidden, config.layernorm_epsilon)
        self.build_layers(layers)
        for layer in self.decoder_layers:
            layer.self_attention.k_layernorm.weight.requires_grad_(False)  # see `families/dflash.py`
        self.final_layernorm = norm(config, hidden, config.layernorm_epsilon)
        self.samples_from_anchor = samples_from_anchor
        self.markov_embedding = self.markov_output = None
        if markov_rank:
            self._add_markov_head(vocab, markov_rank)

    def _add_markov_head(self, vocab: int, rank: int) -> None:
        config, num_ranks = self.config, self.tp_group.size()
        self.markov_embedding = nn.Embedding(vocab, rank, dtype=config.params_dtype)  # whole on every rank, as `fc`
        self.markov_embedding.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        assert config.init_method is not None
        self.markov_output = ColumnParallelLinear(
            rank,
            -(-vocab // num_ranks) * num_ranks,
            config=with_settings(config, sequence_parallel=False),  # its inputs are whole rows (`whole_sequence`)
            init_method=config.init_method,
            bias=False,
            gather_output=False,
            tp_group=self.tp_group,
        )

    @property
    def can_leave_out(self) -> bool:
        """Whether queries at some positions can be left out: sequence parallelism and FP8 require certain numbers."""
        return not (self.config.sequence_parallel or self.config.fp8 or self.config.fp4)

    @classmethod
    def draft(cls, layers: Sequence[Any], inputs: DraftInputs) -> list[torch.Tensor]:
        """Return the states [S, B, H] of all drafts of the only layer. With a Markov head, the row of W1 for the token
        before each draft follows: [S, B, H + r]."""
        (layer,) = layers
        num_drafts = len(inputs.tokens)
        num_queries = num_drafts + (not layer.samples_from_anchor)
        num_parts = layer.tp_group.size() if layer.config.sequence_parallel else 1
        drafted, runs = None, None
        if layer.can_leave_out and (positions := inputs.drafted()) is not None:
            drafted, runs = on_device(positions, inputs.hidden_SBH.device), _runs(positions)

        def chosen(row: torch.Tensor) -> torch.Tensor:
            return row if drafted is None else row.index_select(0, drafted)

        # The anchor is one position after s. Rotary embeddings are [2, S, ...].
        rotary_embs = [chosen(inputs.rotary(1 + query).transpose(0, 1)) for query in range(num_queries)]
        forward = partial(
            layer,
            num_queries=num_queries,
            runs=runs,
            context_rotary=inputs.rotary(0),
            rotary=joined(rotary_embs, num_parts).transpose(0, 1),
            num_parts=num_parts,
            packed_seq_params=inputs.packed_seq_params,
            cache=inputs.cache,
        )
        mask_SBH = chosen(inputs.embed_token(layer.mask_token))
        queries_SBH = torch.cat([chosen(inputs.embed(0)), *[mask_SBH] * (num_queries - 1)])
        if layer.config.recompute_granularity == "full" and layer.training:
            forward = partial(checkpoint, layer.config, layer.tp_group, forward)
        # The rows of this rank are one after the other.
        states_SBH = list(forward(inputs.hidden_SBH, queries_SBH).chunk(num_queries))[-num_drafts:]
        if drafted is not None:
            whole_SBH = torch.zeros_like(inputs.hidden_SBH[..., : states_SBH[0].size(-1)])
            states_SBH = [whole_SBH.index_copy(0, drafted, part) for part in states_SBH]
        if layer.markov_embedding is None:
            return states_SBH
        before_SBr = [layer.markov_embedding(inputs.ids(draft)) for draft in range(num_drafts)]
        return [torch.cat(pair, dim=-1) for pair in zip(states_SBH, before_SBr, strict=True)]

    def forward(
        self,
        features_SBH: torch.Tensor,
        queries_SBH: torch.Tensor,
        *,
        context_rotary: torch.Tensor,
        rotary: torch.Tensor,
        num_queries: int,
        runs: tuple[tuple[int, int], ...] | None,
        num_parts: int,
        packed_seq_params: PackedSeqParams | None,
        cache: Cache | None,
    ) -> torch.Tensor:
        """Return the states of all queries, [K * S, B, H], after the output norm.

        Args:
            features_SBH: features, [S, B, F * H].
            queries_SBH: embeddings of the anchor and of the mask token, [K * S, B, H], or only at the positions of
                `runs`.
            context_rotary, rotary: rotary embeddings of the context and of the queries, [2, ..., 1, 1, R].
            num_queries, runs, num_parts, cache: as for `Context`.
        """
        context_SBH = self.hidden_norm(self.fc(features_SBH))
        for layer in self.decoder_layers:
            with get_fp8_context(self.config), get_fp4_context(self.config):
                of_context = layer.self_attention.get_query_key_value_tensors(context_SBH, context_rotary)
                _, key_SBGD, value_SBGD = of_context
                queries_SBH, _ = layer(
                    hidden_states=queries_SBH,
                    attention_mask=Context(key_SBGD, value_SBGD, num_queries, num_parts, cache, runs),
                    rotary_pos_emb=rotary,
                    packed_seq_params=packed_seq_params,
                )
        return self.final_layernorm(queries_SBH)


def _runs(positions: torch.Tensor) -> tuple[tuple[int, int], ...]:
    """Return (start, end) of the runs of consecutive positions, ascending."""
    (breaks,) = (positions.diff() != 1).nonzero(as_tuple=True)
    starts = [0, *(breaks + 1).tolist()]
    ends = [*starts[1:], len(positions)]
    return tuple((int(positions[start]), int(positions[end - 1]) + 1) for start, end in zip(starts, ends, strict=True))
