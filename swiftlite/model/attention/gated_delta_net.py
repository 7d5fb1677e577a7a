"""Gated delta net, the linear attention of Qwen3-Next and Qwen3.5, with megatron-core's interface for attention.

megatron-core's class requires the kernels of flash-linear-attention, and does not support packed rows or context
parallelism (ssm/gated_delta_net.py of 0.16.1).

Shapes: S tokens of a row, B rows, H hidden size, T tokens of all rows, concatenated, G groups of heads on this rank, N
value heads on this rank, D key channels, E value channels.
"""

from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.mappings import copy_to_tensor_model_parallel_region
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint, sharded_state_dict_default
from torch import nn

from swiftlite.families import linear_attention
from swiftlite.model.attention.cache import Cache
from swiftlite.model.attention.delta_rule import gated_delta_rule
from swiftlite.model.context_parallel import gather_sequence, shared_row, zigzag_positions
from swiftlite.model.layers.tensor_parallel import ColumnParallelLinear, RowParallelLinear

_EXACT = ("A_log", "dt_bias", "norm.weight")
"""Parameters that remain float32 in a 16-bit model. `A_log` and `dt_bias` determine a decay over thousands of tokens;
`norm.weight` is float32 in the published Qwen3.5 models.
"""


class GatedDeltaNet(MegatronModule):
    """Linear attention for dense rows (one sequence each, padded at the end) and packed rows.

    Groups of heads are split over tensor-parallel ranks. Context-parallel ranks gather the projections of their parts,
    compute whole rows, and keep the outputs of their parts.

    Args:
        sizes: the family's description of this attention: numbers and sizes of heads.
        unused: arguments that megatron-core passes for other kinds of attention.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        sizes: linear_attention.GatedDeltaNet,
        *,
        pg_collection: ProcessGroupCollection,
        **unused: Any,
    ):
        super().__init__(config=config)
        self.layer_number = layer_number
        self.sizes = sizes
        self.pg_collection = pg_collection
        is_selective = config.recompute_granularity == "selective"
        self.is_recomputed = is_selective and "core_attn" in (config.recompute_modules or ())
        self.groups = sizes.key_heads // pg_collection.tp.size()
        self.values_per_group = sizes.value_heads // sizes.key_heads

        values = sizes.value_heads * sizes.value_head_dim
        keys = sizes.key_heads * sizes.key_head_dim
        convolved = 2 * keys + values
        linear = {
            "config": config,
            "init_method": config.init_method,
            "bias": False,
            "skip_bias_add": False,
            "tp_group": pg_collection.tp,
        }
        self.in_proj_qkvz = ColumnParallelLinear(config.hidden_size, convolved + values, gather_output=False, **linear)
        self.in_proj_ba = ColumnParallelLinear(config.hidden_size, 2 * sizes.value_heads, gather_output=False, **linear)
        self.out_proj = RowParallelLinear(values, config.hidden_size, input_is_parallel=True, **linear)
        local_heads = self.groups * self.values_per_group
        local_convolved = convolved // pg_collection.tp.size()
        self.conv1d = nn.Conv1d(local_convolved, local_convolved, sizes.kernel, groups=local_convolved, bias=False)
        self.conv1d.weight = _shared(torch.empty(local_convolved, 1, sizes.kernel, dtype=config.params_dtype))
        self.A_log = _shared(torch.empty(local_heads, dtype=torch.float32))
        self.dt_bias = _shared(torch.empty(local_heads, dtype=torch.float32))
        self.norm = GatedRMSNorm(config, sizes.value_head_dim, pg_collection.tp)

    def _apply(self, fn: Any, recurse: bool = True) -> "GatedDeltaNet":
        """Apply `fn`, but keep the parameters of `_EXACT` in float32."""
        numbers = {name: self.get_parameter(name).data for name in _EXACT}
        super()._apply(fn, recurse)
        for name, data in numbers.items():
            parameter = self.get_parameter(name)
            parameter.data = data.to(parameter.device)
        return self

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | Cache | None = None,
        *,
        packed_seq_params: PackedSeqParams | None = None,
        **unused: Any,
    ) -> tuple[torch.Tensor, None]:
        """Return outputs [S, B, H], and None as the bias.

        Args:
            hidden_states: [S, B, H]; with sequence parallelism S is this rank's part, with context parallelism the row
                has megatron-core's zigzag layout.
            attention_mask: in decoding, the cache of the rows, to which the tokens of this pass are added.
            packed_seq_params: for a packed row: starts of its padded sequences in the whole row.
            unused: arguments that megatron-core passes to other kinds of attention.
        """
        qkvz_SBP, _ = self.in_proj_qkvz(hidden_states)
        ba_SBP, _ = self.in_proj_ba(hidden_states)
        if isinstance(attention_mask, Cache):
            mixed_SBE = self._forward_cached(qkvz_SBP.squeeze(1), ba_SBP.squeeze(1), attention_mask).unsqueeze(1)
        else:
            mixed_SBE = self._rows(qkvz_SBP, ba_SBP, packed_seq_params)
        output_SBH, _ = self.out_proj(mixed_SBE)
        return output_SBH, None

    def _rows(
        self, qkvz_SBP: torch.Tensor, ba_SBP: torch.Tensor, packed_seq_params: PackedSeqParams | None
    ) -> torch.Tensor:
        """Return outputs [S, B, N * E] of whole rows; with context parallelism, of this rank's part."""
        lengths, group = shared_row(qkvz_SBP.size(0), packed_seq_params, self.pg_collection.cp)
        if group.size() > 1:
            sizes = [qkvz_SBP.size(-1), ba_SBP.size(-1)]
            gathered = gather_sequence(
                torch.cat([qkvz_SBP, ba_SBP], dim=-1), lengths, group
            )  # one collective for both tensors
            qkvz_SBP, ba_SBP = gathered.split(sizes, dim=-1)
        num_rows = qkvz_SBP.size(1)
        qkvz_TP, ba_TP = (tensor.transpose(0, 1).flatten(0, 1) for tensor in (qkvz_SBP, ba_SBP))
        mixed_TE, _, _ = self._mix(qkvz_TP, ba_TP, lengths * num_rows)
        mixed_SBE = mixed_TE.unflatten(0, (num_rows, -1)).transpose(0, 1)
        if group.size() > 1:
            mixed_SBE = mixed_SBE[zigzag_positions(lengths, group.rank(), group.size(), mixed_SBE.device)]
        return mixed_SBE.contiguous()

    def _forward_cached(self, qkvz_TP: torch.Tensor, ba_TP: torch.Tensor, cache: Cache) -> torch.Tensor:
        """Return outputs [T, N * E] of the tokens of a pass; zeros for padding."""
        convolved = self.conv1d.weight.size(0)
        inputs, states = (self, "inputs"), (self, "states")
        heads = self.groups * self.values_per_group
        before = cache.state(inputs, (self.sizes.kernel - 1, convolved), qkvz_TP.dtype)
        state = cache.state(states, (heads, self.sizes.key_head_dim, self.sizes.value_head_dim), torch.float32)
        *lengths, num_padding = cache.lengths(len(qkvz_TP))
        if not lengths:
            return qkvz_TP.new_zeros(num_padding, heads * self.sizes.value_head_dim)
        tokens = slice(cache.num_tokens)
        mixed_TE, before, state = self._mix(qkvz_TP[tokens], ba_TP[tokens], lengths, before, state)
        cache.update_state(inputs, before)
        cache.update_state(states, state)
        return torch.cat([mixed_TE, mixed_TE.new_zeros(num_padding, mixed_TE.size(1))])

    def _mix(
        self,
        qkvz_TP: torch.Tensor,
        ba_TP: torch.Tensor,
        lengths: Sequence[int],
        before: torch.Tensor | None = None,
        states: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Compute the convolution and the delta rule of all sequences.

        Args:
            lengths: lengths of the sequences; their sum is T.
            before: the last inputs of the convolution from previous tokens of each sequence; None without such tokens.
            states: the state of each sequence after its previous tokens; None without such tokens.

        Returns:
            Outputs [T, N * E], the last inputs of the convolution of each sequence, and the final state of each
            sequence.
        """
        key, value, per_group = self.sizes.key_head_dim, self.sizes.value_head_dim, self.values_per_group
        qkvz_TGP = qkvz_TP.unflatten(-1, (self.groups, -1))
        mixed_TGC, gate_TGE = qkvz_TGP.split([2 * key + per_group * value, per_group * value], dim=-1)
        beta_TGn, decay_TGn = ba_TP.unflatten(-1, (self.groups, -1)).chunk(2, dim=-1)
        mixed_TC, before = causal_conv1d(mixed_TGC.flatten(1), self.conv1d.weight, lengths, before)
        mixed_TGC = F.silu(mixed_TC).unflatten(-1, (self.groups, -1))
        query_TGD, key_TGD, value_TGE = mixed_TGC.split([key, key, per_group * value], dim=-1)
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

        if self.is_recomputed and self.training:
            read_TNE, behind = tensor_parallel.checkpoint(rule, False, *parts)
        else:
            read_TNE, behind = rule(*parts)
        gated_TNE = self.norm(read_TNE, gate_TGE.unflatten(-1, (per_group, value)).flatten(1, 2))
        return gated_TNE.flatten(1), before, behind

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Return the sharded parameters, with the axis along which tensor-parallel ranks split them."""
        assert metadata is not None
        own = {"A_log": self.A_log, "dt_bias": self.dt_bias, "conv1d.weight": self.conv1d.weight}
        state = make_sharded_tensors_for_checkpoint(
            own,
            prefix,
            dict.fromkeys(own, 0),
            sharded_offsets,
            tp_group=self.pg_collection.tp,
            dp_cp_group=metadata["dp_cp_group"],
        )
        for name in ("in_proj_qkvz", "in_proj_ba", "norm", "out_proj"):
            child = self.get_submodule(name)
            state |= sharded_state_dict_default(
                child, f"{prefix}{name}.", sharded_offsets, metadata, tp_group=self.pg_collection.tp
            )
        return state


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


def causal_conv1d(
    inputs_TC: torch.Tensor, weight_C1K: torch.Tensor, lengths: Sequence[int], before: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Convolve each channel over the last K tokens; also return the last K - 1 inputs of each sequence.

    The convolution does not cross sequences.

    Example with K = 3: the sequences a b and c d e are laid out as . . a b . . c d e. The convolution has seven
    outputs. The third and the fourth mix both sequences and are dropped.

    Args:
        before: [number of sequences, K - 1, C], inputs before the first tokens; default: zeros.
    """
    reach = weight_C1K.size(-1) - 1
    if before is None:
        before = inputs_TC.new_zeros(len(lengths), reach, inputs_TC.size(1))
    parts = []
    for sequence_before, sequence in zip(before, inputs_TC.split(list(lengths)), strict=True):
        parts.append(torch.cat([sequence_before, sequence]))
    row_C = torch.cat(parts).T
    convolved_TC = F.conv1d(row_C[None], weight_C1K, groups=row_C.size(0))[0].T
    sizes = list(chain.from_iterable((length, reach) for length in lengths))
    kept = convolved_TC.split(sizes[:-1])[::2]
    return torch.cat(kept), torch.stack([part[len(part) - reach :] for part in parts])


def _unit(heads: torch.Tensor) -> torch.Tensor:
    """Normalize vectors to length 1 in float32, with the epsilon of transformers."""
    heads = heads.float()
    return heads * torch.rsqrt((heads * heads).sum(-1, keepdim=True) + 1e-6)


def _shared(tensor: torch.Tensor) -> nn.Parameter:
    """Return a parameter that is split over tensor-parallel ranks along the first axis."""
    parameter = nn.Parameter(tensor)
    set_tensor_model_parallel_attributes(parameter, is_parallel=True, dim=0, stride=1)
    return parameter
