"""Core attention without Transformer Engine, behind megatron-core's own interface.

It calls torch's scaled_dot_product_attention exactly as transformers does, which is why logits agree bit for bit; the
stock megatron-core class differs by 2e-6 in float32 and 0.05 in bfloat16, and allocates scores of S x S.

Shapes: S sequence, B batch, N query heads, G key-value heads, D head size; N and G are per tensor-parallel rank.
"""

import math

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig


class CoreAttention(MegatronModule):
    """Causal attention for rows of one sequence each, padded at the end.

    The constructor takes what megatron-core's SelfAttention passes (transformer/attention.py of 0.16.1).
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        k_channels: int | None = None,
        v_channels: int | None = None,
    ):
        super().__init__(config=config)
        self.dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        k_channels = k_channels or config.kv_channels
        assert k_channels is not None
        self.softmax_scale = softmax_scale if softmax_scale is not None else 1.0 / math.sqrt(k_channels)

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
        """Attend; a missing mask means causal, which is all that rows padded at the end need.

        Args:
            attention_mask: megatron-core's convention, [B or 1, 1, S, S], True where attention is forbidden.

        Returns:
            [S, B, N * D]
        """
        assert attention_bias is None
        assert packed_seq_params is None
        query, key, value = (t.permute(1, 2, 0, 3) for t in (query_SBND, key_SBGD, value_SBGD))
        out_BNSD = F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=None if attention_mask is None else ~attention_mask,
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=attention_mask is None,
            scale=self.softmax_scale,
            enable_gqa=query.size(1) != key.size(1),
        )
        return out_BNSD.permute(2, 0, 1, 3).flatten(2)
