"""Self-attention with rotary embeddings that are computed once for all layers.

Shapes: S positions of a row, B batch, H hidden size, N query heads and G key-value heads of a tensor-parallel rank, D
size of a query or key head, V size of a value head.
"""

from dataclasses import replace
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.attention import SelfAttention as McoreSelfAttention
from megatron.core.transformer.attention import SelfAttentionSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

from swiftlite.model.attention.joint_norm import JointRMSNorm
from swiftlite.model.attention.rope import fused_norm_and_rotate, rotation
from swiftlite.model.copied_config import with_settings
from swiftlite.model.layers.norm import DeferredRMSNorm


class SelfAttention(McoreSelfAttention):
    """megatron-core's attention with precomputed cosines and sines.

    megatron-core's class computes cosines and sines twice in every layer, and all layers have the heads of one config.

    Args:
        config: config of the model.
        submodules: as for megatron-core's class.
        sizes: arguments of TransformerConfig with the number and size of this layer's heads, which replace those of
            `config`. `kv_channels` is V.
        query_size: D. If it differs from V, megatron-core's class computes neither the size of the projection nor
            queries, keys and values.
        keys_are_values: whether values are keys before their norm, so that the projection has no values of its own.
        value_norm: whether each head's value is normalized.
        has_joint_norms: whether the queries of all heads are normalized together, and the keys.
        input_size: size of the inputs of queries, keys and values; None: H.
        value_scale: factor of values.
        is_rotary: whether queries and keys have rotary embeddings.
        rope: the channels of this layer in `rotary_pos_emb`, if layers have different rotary embeddings.
        rope_interleave: whether channels 2i and 2i + 1 are rotated together; otherwise i and i + R / 2.
        head_gate: class of the projection to one gate per head, whose sigmoid multiplies the head's output; None
            without such gates.
        args, kwargs: arguments of megatron-core's class.
    """

    def __init__(
        self,
        config: TransformerConfig,
        submodules: SelfAttentionSubmodules,
        *args: Any,
        sizes: dict[str, int],
        query_size: int,
        keys_are_values: bool = False,
        value_norm: bool = False,
        has_joint_norms: bool = False,
        input_size: int | None = None,
        value_scale: float = 1.0,
        is_rotary: bool = True,
        rope: slice = slice(None),
        rope_interleave: bool = False,
        head_gate: type | None = None,
        **kwargs: Any,
    ):
        config = _with_sizes(config, sizes)
        heads, groups, value_size = (sizes[name] for name in ("num_attention_heads", "num_query_groups", "kv_channels"))
        num_outputs = None
        if query_size != value_size or keys_are_values:
            num_outputs = heads * query_size + groups * (query_size + value_size * (not keys_are_values))
        if num_outputs or input_size:
            submodules = replace(submodules, linear_qkv=with_channels(submodules.linear_qkv, input_size, num_outputs))
        super().__init__(config, submodules, *args, **kwargs)
        self.query_size, self.value_size, self.value_scale = query_size, value_size, value_scale
        self.keys_are_values, self.value_norm = keys_are_values, value_norm
        if has_joint_norms:
            # Not in the spec, because from 0.17 on megatron-core refuses norms there without `qk_layernorm`, with which
            # it would sum their gradients over tensor-parallel ranks.
            eps = self.config.layernorm_epsilon
            self.q_layernorm = JointRMSNorm(self.config, query_size, heads, eps)
            self.k_layernorm = JointRMSNorm(self.config, query_size, groups, eps)
        self.linear_gate = None
        if head_gate is not None:
            self.linear_gate = self._gate_projection(head_gate)
            # megatron-core's gates are one per channel, and part of `linear_qkv`, which is already built here. With
            # this argument, `forward` applies the gates that `get_query_key_value_tensors` returns.
            self.config = with_settings(self.config, attention_output_gate=True)
        self.is_rotary, self.rope, self.rope_interleave = is_rotary, rope, rope_interleave

    def _gate_projection(self, column: type) -> torch.nn.Module:
        return column(
            self.config.hidden_size,
            self.config.num_attention_heads,
            config=self.config,
            init_method=self.config.init_method,
            gather_output=False,
            bias=False,
            skip_bias_add=False,
            is_expert=False,
            tp_group=self.pg_collection.tp,
        )

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: Any,  # as for CoreAttention
        *,
        rotary_pos_emb: torch.Tensor,
        **kwargs: Any,
    ) -> tuple[Any, Any]:
        """Return outputs [S, B, H], and None as the bias.

        megatron-core's method passes the states of cross attention unchanged to `get_query_key_value_tensors`. There is
        no cross attention here, so this argument is used for rotary embeddings.

        Args:
            rotary_pos_emb: output of `RotaryEmbedding` for this rank's part of the row.
            kwargs: further arguments of megatron-core's layers.
        """
        result: Any = super().forward(hidden_states, attention_mask, key_value_states=rotary_pos_emb, **kwargs)
        return result

    def get_query_key_value_tensors(
        self,
        hidden_states: torch.Tensor,
        rotary_pos_emb: torch.Tensor,  # key_value_states in megatron-core, see `forward`
        **kwargs: Any,
    ) -> tuple[torch.Tensor, ...]:
        """Return query [S, B, N, D], key [S, B, G, D] and value [S, B, G, V] of the whole sequence, and gates if there
        are any: one per channel, or one per head, [S, B, N]."""
        if self.linear_gate is not None:
            kwargs["output_gate"] = False
        made: Any
        if self.query_size == self.value_size and not self.keys_are_values:
            made = super().get_query_key_value_tensors(hidden_states, None, **kwargs)  # always split by default
        else:
            made = self._query_key_value(hidden_states)
        query, key, *others = made
        if self.value_norm:
            others[0] = F.rms_norm(others[0], (self.value_size,), eps=self.config.layernorm_epsilon)
        if self.value_scale != 1:
            others[0] = others[0] * self.value_scale
        if self.linear_gate is not None:
            others.append(self.linear_gate(hidden_states)[0])
        if not self.is_rotary:
            return query, key, *others
        rotary_pos_emb = rotary_pos_emb[..., self.rope]
        query = self._rotated(query, self.q_layernorm, rotary_pos_emb)
        return query, self._rotated(key, self.k_layernorm, rotary_pos_emb), *others

    def _rotated(self, heads_SBND: torch.Tensor, norm: Any, rotary_emb: torch.Tensor) -> torch.Tensor:
        if isinstance(norm, DeferredRMSNorm):
            return fused_norm_and_rotate(heads_SBND, norm.weight, rotary_emb, norm.eps, norm.is_zero_centered)
        return rotation(self.config, self.rope_interleave)(heads_SBND, rotary_emb)

    def _query_key_value(self, hidden_SBH: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return query [S, B, N, D], key [S, B, G, D] and value [S, B, G, V] if D and V differ, or keys are values."""
        linear_qkv: Any = self.linear_qkv
        mixed, _ = linear_qkv(hidden_SBH)
        num_groups = self.num_query_groups_per_partition
        queries = self.num_attention_heads_per_partition // num_groups * self.query_size
        by_group = mixed.unflatten(-1, (num_groups, -1))
        values = [] if self.keys_are_values else [self.value_size]
        # As in megatron-core's `linear_qkv`, the queries of a group are followed by its key and its value.
        query, key, *own = by_group.split([queries, self.query_size, *values], dim=-1)
        query, value = query.flatten(2).unflatten(-1, (-1, self.query_size)), own[0] if own else key
        normed = [
            heads if norm is None else norm(heads)  # None from 0.17 on, if there is no norm
            for norm, heads in ((self.q_layernorm, query), (self.k_layernorm, key))
        ]
        return *normed, value

    def _apply_output_gate(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """Multiply the attention output x [S, B, N * D] by the sigmoid of the gate, in the model's precision, as in
        transformers and vLLM."""
        if self.linear_gate is not None:
            heads = x.unflatten(-1, (gate.size(-1), -1))
            return (heads * gate.sigmoid().view(*heads.shape[:-1], 1)).flatten(-2)
        return x * gate.reshape(x.shape).sigmoid()


def _with_sizes(config: TransformerConfig, sizes: dict[str, int]) -> TransformerConfig:
    """Return the config with other sizes; the config itself if it already has them."""
    if all(getattr(config, name) == size for name, size in sizes.items()):
        return config
    return with_settings(config, **sizes)


@cache
def with_channels(linear: Any, own_inputs: int | None, own_outputs: int | None = None) -> type:
    """Return a class of linear layers with other numbers of channels than it is called with; None: the same number."""

    def build(self: Any, num_inputs: int, num_outputs: int, *args: Any, **options: Any) -> None:
        linear.__init__(self, own_inputs or num_inputs, own_outputs or num_outputs, *args, **options)

    return type(linear.__name__, (linear,), {"__init__": build, "__module__": linear.__module__})
