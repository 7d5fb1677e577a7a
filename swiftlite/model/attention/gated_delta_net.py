"""Gated delta net, the linear attention of Qwen3-Next and Qwen3.5, with megatron-core's interface for attention.

megatron-core's class requires the kernels of flash-linear-attention, and does not support packed rows or context
parallelism (ssm/gated_delta_net.py of 0.16.1).

Shapes: S tokens of a row, B rows, H hidden size, T tokens of all rows, concatenated, G groups of heads on this rank, N
value heads on this rank, D key channels, E value channels.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.mappings import copy_to_tensor_model_parallel_region
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import nn

from swiftlite.families import linear_attention
from swiftlite.model.attention.delta_rule import gated_delta_rule
from swiftlite.model.attention.recurrent import RecurrentAttention, causal_conv1d, split_over_ranks


class GatedDeltaNet(RecurrentAttention):
    """The gated delta net of a layer.

    Args:
        sizes: the family's description of this attention: numbers and sizes of heads.
    """

    exact = ("A_log", "dt_bias", "norm.weight")  # norm.weight is float32 in the published Qwen3.5 models
    split = ("A_log", "dt_bias", "conv1d.weight")
    projections = ("in_proj_qkvz", "in_proj_ba")

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        sizes: linear_attention.GatedDeltaNet,
        *,
        pg_collection: ProcessGroupCollection,
        **unused: Any,
    ):
        super().__init__(config, layer_number, pg_collection)
        self.sizes = sizes
        self.groups = sizes.key_heads // pg_collection.tp.size()
        self.values_per_group = sizes.value_heads // sizes.key_heads

        values = sizes.value_heads * sizes.value_head_dim
        keys = sizes.key_heads * sizes.key_head_dim
        convolved = 2 * keys + values
        self.in_proj_qkvz = self._projection(convolved + values)
        self.in_proj_ba = self._projection(2 * sizes.value_heads)
        self.out_proj = self._output_projection(values)
        self.conv1d = self._convolution(convolved, sizes.kernel)
        local_heads = self.groups * self.values_per_group
        self.A_log = split_over_ranks(torch.empty(local_heads, dtype=torch.float32))
        self.dt_bias = split_over_ranks(torch.empty(local_heads, dtype=torch.float32))
        self.norm = GatedRMSNorm(config, sizes.value_head_dim, pg_collection.tp)

    @property
    def state_shape(self) -> tuple[int, int, int]:
        return self.groups * self.values_per_group, self.sizes.key_head_dim, self.sizes.value_head_dim

    def mix(
        self,
        projected: Sequence[torch.Tensor],
        lengths: Sequence[int],
        before: torch.Tensor | None = None,
        states: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Compute the convolution and the delta rule of all sequences, as `RecurrentAttention.mix`."""
        qkvz_TP, ba_TP = projected
        key, value, per_group = self.sizes.key_head_dim, self.sizes.value_head_dim, self.values_per_group
        qkvz_TGP = qkvz_TP.unflatten(-1, (self.groups, -1))
        mixed_TGC, gate_TGE = qkvz_TGP.split([2 * key + per_group * value, per_group * value], dim=-1)
        beta_TGn, decay_TGn = ba_TP.unflatten(-1, (self.groups, -1)).chunk(2, dim=-1)
        mixed_TC, before = causal_conv1d(mixed_TGC.flatten(1), self.conv1d.weight, lengths, before)
        mixed_TGC = F.silu(mixed_TC).unflatten(-1, (self.groups, -1))
        query_TGD, key_TGD, value_TGE = mixed_TGC.split([key, key, per_group * value], dim=-1)
        # In float32, because decays are summed over the tokens of a chunk.
        log_decay_TN = -self.A_log.exp() * F.softplus(decay_TGn.flatten(1).float() + self.dt_bias)
        parts = (
            (_unit(query_TGD) * key**-0.5).repeat_interleave(per_group, dim=1),
            _unit(key_TGD).repeat_interleave(per_group, dim=1),
            value_TGE.unflatten(-1, (per_group, value)).flatten(1, 2),
            log_decay_TN,
            beta_TGn.flatten(1).sigmoid(),
        )

        def rule(*parts: torch.Tensor) -> Any:
            return gated_delta_rule(*parts, lengths, states)  # pyright: ignore[reportCallIssue]

        read_TNE, behind = self.recomputed(rule, *parts)
        gated_TNE = self.norm(read_TNE, gate_TGE.unflatten(-1, (per_group, value)).flatten(1, 2))
        return gated_TNE.flatten(1), before, behind


class GatedRMSNorm(nn.Module):
    """RMSNorm of each value head, multiplied by SiLU of a gate, with the same order of operations as in transformers.

    The weight is stored in float32 and rounded to 16 bits for each use, because transformers and engines round it when
    they load a 16-bit model.
    """

    def __init__(self, config: TransformerConfig, size: int, tp_group: Any):
        super().__init__()
        self.eps = config.layernorm_epsilon
        self.tp_group = tp_group
        self.weight = nn.Parameter(torch.ones(size, dtype=torch.float32))

    def forward(self, read: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """Normalize `read` and multiply by the gate, both [T, N, E]; the result has the dtype of `read`."""
        # Tensor-parallel ranks apply the same weight to different heads, so its gradient is summed over ranks.
        weight = copy_to_tensor_model_parallel_region(self.weight, group=self.tp_group).to(read.dtype)
        read_fp32 = read.float()
        variance = read_fp32.pow(2).mean(-1, keepdim=True)
        normed = weight * (read_fp32 * torch.rsqrt(variance + self.eps)).to(read.dtype)
        return (normed * F.silu(gate.float())).to(read.dtype)


def _unit(heads: torch.Tensor) -> torch.Tensor:
    """Normalize vectors to length 1 in float32, with the epsilon of transformers."""
    heads = heads.float()
    return heads * torch.rsqrt((heads * heads).sum(-1, keepdim=True) + 1e-6)
