"""The layer of Mamba-2 in Nemotron-H.

megatron-core's class requires the kernels of mamba-ssm (ssm/mamba_mixer.py of 0.16.1).

Shapes: T tokens of all rows, concatenated, P outputs of the projection, G groups of heads on this rank, N heads on this
rank, D channels of B and C, E channels of a head.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import nn

from swiftlite.families import mamba
from swiftlite.families.rank import Rank
from swiftlite.model.attention.recurrent import RecurrentAttention, causal_conv1d, split_over_ranks
from swiftlite.model.attention.state_space import state_space_scan


class Mamba2(RecurrentAttention):
    """The Mamba-2 of a layer.

    Time steps are computed in float32, as in the kernels of engines. They have no lower limit, as in engines and
    megatron-core; transformers limits them to `time_step_min`, except in decoding.

    Args:
        sizes: the family's description of this layer: numbers and sizes of heads.
    """

    exact = ("A_log", "D", "dt_bias")
    split = ("A_log", "D", "dt_bias", "conv1d.weight", "conv1d.bias", "norm.weight")
    projections = ("in_proj_zxbcdt",)

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        sizes: mamba.Mamba2,
        *,
        pg_collection: ProcessGroupCollection,
        **unused: Any,
    ):
        super().__init__(config, layer_number, pg_collection)
        self.sizes = sizes
        self.groups = sizes.groups // pg_collection.tp.size()
        self.heads_per_group = sizes.heads // sizes.groups
        # Over all ranks: the linear layers divide them.
        inner, of_groups = sizes.widths(Rank())
        self.in_proj_zxbcdt = self._projection(2 * (inner + of_groups) + sizes.heads)
        self.out_proj = self._output_projection(inner)
        self.conv1d = self._convolution(inner + 2 * of_groups, sizes.kernel, bias=True)
        heads = self.groups * self.heads_per_group
        self.A_log = split_over_ranks(torch.empty(heads, dtype=torch.float32))
        self.D = split_over_ranks(torch.empty(heads, dtype=torch.float32))
        self.dt_bias = split_over_ranks(torch.empty(heads, dtype=torch.float32))
        self.norm = GatedGroupNorm(config, self.groups, heads * sizes.head_dim)

    @property
    def state_shape(self) -> tuple[int, int, int]:
        return self.groups * self.heads_per_group, self.sizes.state, self.sizes.head_dim

    def mix(
        self,
        projected: Sequence[torch.Tensor],
        lengths: Sequence[int],
        before: torch.Tensor | None = None,
        states: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Compute the convolution and the state space model of all sequences, as `RecurrentAttention.mix`."""
        (zxbcdt_TP,) = projected
        size, heads = self.sizes.head_dim, self.heads_per_group
        channels, state = heads * size, self.sizes.state
        # Ordered by group, so that ranks hold whole groups (`families/mamba.py`).
        zxbcdt_TGP = zxbcdt_TP.unflatten(-1, (self.groups, -1))
        gate_TGI, mixed_TGC, step_TGn = zxbcdt_TGP.split([channels, channels + 2 * state, heads], dim=-1)
        conv = self.conv1d
        mixed_TC, before = causal_conv1d(mixed_TGC.flatten(1), conv.weight, lengths, before, conv.bias)
        mixed_TGC = F.silu(mixed_TC).unflatten(-1, (self.groups, -1))
        input_TGI, write_TGD, read_TGD = mixed_TGC.split([channels, state, state], dim=-1)
        input_TNE = input_TGI.unflatten(-1, (heads, size)).flatten(1, 2)
        step_TN = F.softplus(step_TGn.flatten(1).float() + self.dt_bias)

        def scan(*parts: torch.Tensor) -> Any:
            return state_space_scan(*parts, lengths, states)  # pyright: ignore[reportCallIssue]

        read_TNE, behind = self.recomputed(scan, input_TNE, step_TN, -self.A_log.exp(), write_TGD, read_TGD)
        read_TNE = read_TNE + self.D[:, None] * input_TNE
        gated_TI = self.norm(read_TNE.flatten(1), gate_TGI.flatten(1))
        return gated_TI, before, behind


class GatedGroupNorm(nn.Module):
    """RMSNorm of each group of channels after their product with SiLU of a gate, with the order of operations of
    transformers.

    Args:
        groups: number of groups on this rank.
        size: number of channels on this rank.
    """

    def __init__(self, config: TransformerConfig, groups: int, size: int):
        super().__init__()
        self.eps = config.layernorm_epsilon
        self.groups = groups
        self.weight = split_over_ranks(torch.empty(size, dtype=config.params_dtype))

    def forward(self, read_TI: torch.Tensor, gate_TI: torch.Tensor) -> torch.Tensor:
        """Return the normed product of a float32 tensor and the activated gate, in the dtype of the gate."""
        gated_TGC = (read_TI * F.silu(gate_TI.float())).unflatten(-1, (self.groups, -1))
        normed_TGC = gated_TGC * torch.rsqrt(gated_TGC.pow(2).mean(-1, keepdim=True) + self.eps)
        return (self.weight * normed_TGC.flatten(1)).to(gate_TI.dtype)
