"""DeepSeek's multi-latent attention: queries, keys and values are up-projected from two small latents.

megatron-core's class computes wrong gradients with tensor parallelism, rotates channels only in adjacent pairs, and
supports only megatron-core's rotary frequencies. This module replaces the part of that class that computes queries,
keys and values from hidden states.

Shapes: T tokens ([S, B], or [S] in a packed row), H hidden size, N heads on this tensor-parallel rank, D query and key
channels of a head, of which R are rotary, V value channels.
"""

from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import tensor_parallel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_tensor_model_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.multi_latent_attention import MLASelfAttention as McoreMLASelfAttention
from megatron.core.transformer.multi_latent_attention import MLASelfAttentionSubmodules
from megatron.core.transformer.transformer_config import MLATransformerConfig as McoreMLATransformerConfig

from swiftlite.model.attention.cache import Cache
from swiftlite.model.attention.draft_attention import Draft
from swiftlite.model.attention.rope import rope_config, rotation
from swiftlite.model.context_parallel import gather_sequence, shared_row


@dataclass
class MLATransformerConfig(McoreMLATransformerConfig):
    """megatron-core's config with additional settings of rotary embeddings.

    Of megatron-core's fields for rotary embeddings, `rotary_scaling_factor` and `mscale_all_dim` determine the softmax
    scale and are set from `hf_rope`; the others are not used.

    Args:
        hf_rope: the keys of config.json for the frequencies, as for `RotaryEmbedding`, for a head of
            `qk_pos_emb_head_dim` channels.
        rope_interleave: whether channels 2i and 2i + 1 are rotated together, as in DeepSeek's models; otherwise i and i
            + R / 2.
        indexer_loss_coeff: weight of the loss of indexers (`indexer.py`); 0: they are not trained.
        indexer_is_alone: whether only indexers are trained. In training, attention is then to all tokens.
    """

    hf_rope: dict[str, Any] = field(default_factory=dict)
    rope_interleave: bool = True
    indexer_loss_coeff: float = 0.0
    indexer_is_alone: bool = False

    def __post_init__(self):
        # megatron-core's defaults are those of a specific model.
        rope_parameters = rope_config(self.hf_rope).rope_parameters or {}
        self.rope_type = "rope"
        self.rotary_scaling_factor = rope_parameters.get("factor") or 1.0
        self.mscale_all_dim = rope_parameters.get("mscale_all_dim") or 0.0
        super().__post_init__()
        # finalize_model_grads.py:354 sums gradients of parameters named q_layernorm over tensor-parallel ranks, because
        # usually each rank applies this norm to different heads. Here every rank has the whole query latent, so the sum
        # would be a multiple of the gradient.
        assert not self.qk_layernorm, "multi-latent attention always has its norms; qk_layernorm doubles a gradient"


@cache
def latent_norm(norm: Any) -> type:
    """Return a class for the norm of a latent, with epsilon 1e-6 instead of `rms_norm_eps`, as in transformers."""

    def init(self: torch.nn.Module, config: McoreMLATransformerConfig, hidden_size: int, eps: float = 1e-6) -> None:
        norm.__init__(self, config, hidden_size, eps=1e-6)

    return type(f"Latent{norm.__name__}", (norm,), {"__init__": init})


class MLASelfAttention(McoreMLASelfAttention):
    """megatron-core's latent attention with down-projections that tensor-parallel ranks split by columns.

    It supports padded rows [S, B, H], and packed rows [S, 1, H] with `packed_seq_params`. With sequence parallelism, S
    is this rank's part; with context parallelism, the row has megatron-core's zigzag layout. megatron-core's inference
    cache is not supported. Cosines and sines are arguments, as in all other kinds of attention.

    Args:
        args, kwargs: arguments of megatron-core's class.
    """

    config: MLATransformerConfig

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: Any,  # as for core attention
        *,
        rotary_pos_emb: torch.Tensor,
        **kwargs: Any,
    ) -> tuple[Any, Any]:
        """Return outputs [S, B, H], and None as the bias.

        megatron-core's method does not accept rotary embeddings, because each of its layers computes them. It passes
        two of its arguments unchanged to `get_query_key_value_tensors`: position ids and the states of cross attention.
        Here, cosines and sines are passed as the position ids, and the context-parallel ranks as the states of cross
        attention.

        Args:
            rotary_pos_emb: output of `RotaryEmbedding` for this rank's part of the row.
            kwargs: further arguments of megatron-core's layers.
        """
        group = self.pg_collection.cp if self._reads_rows(attention_mask) else None
        result: Any = super().forward(
            hidden_states,
            attention_mask,
            key_value_states=group,
            position_ids=rotary_pos_emb,
            **kwargs,
        )
        return result

    def _reads_rows(self, attention_mask: Any) -> bool:
        """Return whether queries see the keys of the whole row.

        The result is False for decoding with a cache, and for later steps of a draft, where each query sees different
        keys.
        """
        if isinstance(attention_mask, Draft):
            return attention_mask.is_empty and attention_mask.cache is None
        return not isinstance(attention_mask, Cache)

    def get_query_key_value_tensors(
        self,
        hidden_states: torch.Tensor,
        cp_group: dist.ProcessGroup | None,  # key_value_states in megatron-core, see `forward`
        rotary_pos_emb: torch.Tensor,  # position_ids in megatron-core
        packed_seq_params: PackedSeqParams | None = None,
        **inference: None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return query [T, N, D], key [K, N, D] and value [K, N, V] of all sequence-parallel ranks, then the latent of
        queries and the latent of keys and values.

        Args:
            cp_group: the ranks that share keys and values; K is then the number of tokens of whole rows. None: this
                rank has whole rows, and K is T.
        """
        assert not any(inference.values())
        config = self.config

        query_latent = hidden_states
        if config.q_lora_rank is not None:
            query_latent = self._scatter(self._whole(self.linear_q_down_proj(hidden_states)[0]))
        compressed = self._whole(self.linear_kv_down_proj(hidden_states)[0])
        latent, key_pos = self._gather(compressed, cp_group, rotary_pos_emb, packed_seq_params)
        latent = self._scatter(latent)
        if packed_seq_params is not None:
            query_latent, latent, key_pos = (tensor.squeeze(1) for tensor in (query_latent, latent, key_pos))
            rotary_pos_emb = rotary_pos_emb.squeeze(2)
        if config.q_lora_rank is not None:
            query_latent = self.q_layernorm(query_latent)  # pyright: ignore[reportCallIssue]
        latent = self.kv_layernorm(latent)  # pyright: ignore[reportCallIssue]

        def unfold(query_latent: torch.Tensor, latent: torch.Tensor, key_pos: torch.Tensor):
            up_proj = self.linear_q_proj if config.q_lora_rank is None else self.linear_q_up_proj
            query, query_pos = self._split_heads(up_proj(query_latent)[0], config.qk_pos_emb_head_dim)
            key, value = self._split_heads(self.linear_kv_up_proj(latent)[0], config.v_head_dim)
            query_pos = self._rotate(query_pos, rotary_pos_emb)
            keys_pos = key_pos[..., None, :].expand(*key.shape[:-1], -1)
            return torch.cat([query, query_pos], dim=-1), torch.cat([key, keys_pos], dim=-1), value.contiguous()

        if self.recompute_up_proj:
            # None instead of False without FP8, because random.py:635 compares with None.
            precision = config.fp8 or config.fp4
            self.qkv_up_checkpoint = tensor_parallel.CheckpointWithoutOutput(fp8=precision)  # type: ignore[arg-type]
            query, key, value = self.qkv_up_checkpoint.checkpoint(unfold, query_latent, latent, key_pos)
        else:
            query, key, value = unfold(query_latent, latent, key_pos)
        return query, key, value, query_latent, latent

    def _resolve_qk_norm_config(self, submodules: MLASelfAttentionSubmodules) -> dict[str, Any]:
        """Return the spec's submodules by name, without the checks of the overridden method.

        Since 0.19, the overridden method of megatron-core rejects unused norms. It also rejects norms of latents unless
        `qk_layernorm` is set, which must not be set here (see `MLATransformerConfig`).
        """
        return vars(submodules)

    def _whole(self, columns: torch.Tensor) -> torch.Tensor:
        """Gather the output columns of a down-projection from tensor-parallel ranks."""
        return gather_from_tensor_model_parallel_region(columns, group=self.tp_group)

    def _gather(
        self,
        compressed: torch.Tensor,
        cp_group: dist.ProcessGroup | None,
        rotary_pos_emb: torch.Tensor,
        packed_seq_params: PackedSeqParams | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the latent of keys and values before its norm, and the rotated rotary part of the key.

        With context parallelism, both are gathered for the whole row, and every rank up-projects the heads of the whole
        row. With the sizes of DeepSeek-V3, this requires three matrix products of 34 MFLOP for each token of another
        rank. If heads were gathered instead, a rank would receive 82 KB per token in each of forward and backward pass,
        instead of 1.1 KB. According to `plan/cost/speed.py`, gathering latents takes half the time of gathering heads
        on H100s over NVLink and less than half between machines. On A100s it takes the same time, and on H20s over
        NVLink, which have few FLOPs per byte, three times as long.
        """
        sizes = [self.config.kv_lora_rank, self.config.qk_pos_emb_head_dim]
        latent, key_pos = compressed.split(sizes, dim=-1)
        # Each rank has the gradient through its heads, so gradients are summed over ranks; the up-projections already
        # sum theirs. A non-contiguous gradient would silently not be summed (mappings.py:20).
        key_pos = copy_to_tensor_model_parallel_region(key_pos, group=self.tp_group)
        if key_pos.requires_grad:
            key_pos.register_hook(torch.Tensor.contiguous)
        key_pos = self._rotate(key_pos[..., None, :], rotary_pos_emb).squeeze(-2)
        if cp_group is None:
            return latent, key_pos
        lengths, group = shared_row(compressed.size(0), packed_seq_params, cp_group)
        if group.size() == 1:
            return latent, key_pos
        gathered = gather_sequence(torch.cat([latent, key_pos], dim=-1), lengths, group)
        latent, key_pos = gathered.split(sizes, dim=-1)
        return latent, key_pos

    def _scatter(self, latent: torch.Tensor) -> torch.Tensor:
        """Return this sequence-parallel rank's part of a latent, because the next layer gathers the sequence."""
        if not self.config.sequence_parallel:
            return latent
        return scatter_to_sequence_parallel_region(latent, group=self.tp_group)

    def _split_heads(self, channels: torch.Tensor, last: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Split [T, N * (qk_head_dim + last)] into [T, N, qk_head_dim] and [T, N, last]."""
        heads = channels.unflatten(-1, (self.num_attention_heads_per_partition, -1))
        first, second = heads.split([self.config.qk_head_dim, last], dim=-1)
        return first, second

    def _rotate(self, pos: torch.Tensor, rotary_emb: torch.Tensor) -> torch.Tensor:
        """Rotate channels of queries or keys. Interleaved channels are first reordered into halves."""
        if self.config.rope_interleave:
            pos = pos.unflatten(-1, (-1, 2)).transpose(-2, -1).flatten(-2)
        return rotation(self.config)(pos, rotary_emb)
