"""Attention with a fixed-size state instead of keys and values, with megatron-core's interface for attention.

Shapes: S tokens of a row, B rows, H hidden size, T tokens of all rows, concatenated, P outputs of a projection, I
inputs of the output projection, C channels of the convolution, K tokens in it.
"""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint, sharded_state_dict_default
from torch import nn

from swiftlite.model.attention.cache import Cache
from swiftlite.model.context_parallel import gather_sequence, shared_row, zigzag_positions
from swiftlite.model.layers.exact import KeepsPrecision
from swiftlite.model.layers.tensor_parallel import ColumnParallelLinear, RowParallelLinear


class RecurrentAttention(KeepsPrecision, MegatronModule):
    """Projections, a convolution over the last tokens, a recurrence, and the projection `out_proj`.

    It computes dense rows (one sequence each, padded at the end), packed rows, and rows in decoding. Groups of heads
    are split over tensor-parallel ranks. Context-parallel ranks gather the projections of their parts, compute whole
    rows, and keep the outputs of their parts.

    Attributes:
        exact: parameters that remain float32 in a 16-bit model, because they determine a decay over thousands of
            tokens.
        split: the module's own parameters, which tensor-parallel ranks split along the first axis.
        projections: the linear layers that read the states.
        out_proj: the output projection.
        conv1d: a module with the weight [C, 1, K] of the convolution.
    """

    split: ClassVar[tuple[str, ...]]
    projections: ClassVar[tuple[str, ...]]
    out_proj: nn.Module
    conv1d: nn.Conv1d

    def __init__(self, config: TransformerConfig, layer_number: int, pg_collection: ProcessGroupCollection):
        super().__init__(config=config)
        self.layer_number = layer_number
        self.pg_collection = pg_collection
        is_selective = config.recompute_granularity == "selective"
        self.is_recomputed = is_selective and "core_attn" in (config.recompute_modules or ())

    def _projection(self, size: int) -> ColumnParallelLinear:
        """Return a linear layer from the states to a number of channels, which ranks split."""
        return ColumnParallelLinear(self.config.hidden_size, size, gather_output=False, **self._linear)

    def _output_projection(self, size: int) -> RowParallelLinear:
        """Return the linear layer from a number of channels, which ranks split, to the states."""
        return RowParallelLinear(size, self.config.hidden_size, input_is_parallel=True, **self._linear)

    @property
    def _linear(self) -> dict[str, Any]:
        init = self.config.init_method
        plain = {"init_method": init, "bias": False, "skip_bias_add": False}
        return {"config": self.config, "tp_group": self.pg_collection.tp, **plain}

    def _convolution(self, channels: int, kernel: int, *, bias: bool = False) -> nn.Conv1d:
        """Return the convolution of each of a number of channels, which ranks split, over `kernel` tokens."""
        local, dtype = channels // self.pg_collection.tp.size(), self.config.params_dtype
        # For its parameters only: `causal_conv1d` computes the sequences of packed rows.
        conv = nn.Conv1d(local, local, kernel, groups=local, bias=bias)
        conv.weight = split_over_ranks(torch.empty(local, 1, kernel, dtype=dtype))
        if bias:
            conv.bias = split_over_ranks(torch.empty(local, dtype=dtype))
        return conv

    @property
    @abstractmethod
    def state_shape(self) -> tuple[int, int, int]:
        """Shape of the states of all heads on this rank: heads, channels of a key, outputs of a head."""

    @abstractmethod
    def mix(
        self,
        projected: Sequence[torch.Tensor],
        lengths: Sequence[int],
        before: torch.Tensor | None = None,
        states: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Compute the convolution and the recurrence of all sequences.

        Args:
            projected: outputs [T, P] of each projection.
            lengths: lengths of the sequences; their sum is T.
            before: the last inputs of the convolution from previous tokens of each sequence; None without such tokens.
            states: the state of each sequence after its previous tokens; None without such tokens.

        Returns:
            Outputs [T, I], the last inputs of the convolution of each sequence, and the final state of each sequence.
        """

    def recomputed(self, recurrence: Callable[..., Any], *tensors: torch.Tensor) -> Any:
        """Return the result of a function of tensors, which is recomputed in the backward pass if the run asks for
        it."""
        if self.is_recomputed and self.training:
            return tensor_parallel.checkpoint(recurrence, False, *tensors)
        return recurrence(*tensors)

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
        projected = [self.get_submodule(name)(hidden_states)[0] for name in self.projections]
        if isinstance(attention_mask, Cache):
            mixed_SBI = self._cached([each.squeeze(1) for each in projected], attention_mask).unsqueeze(1)
        else:
            mixed_SBI = self._rows(projected, packed_seq_params)
        output_SBH, _ = self.out_proj(mixed_SBI)
        return output_SBH, None

    def _rows(self, projected: Sequence[torch.Tensor], packed_seq_params: PackedSeqParams | None) -> torch.Tensor:
        """Return outputs [S, B, I] of whole rows; with context parallelism, of this rank's part."""
        lengths, group = shared_row(projected[0].size(0), packed_seq_params, self.pg_collection.cp)
        if group.size() > 1:
            sizes = [each.size(-1) for each in projected]
            gathered = gather_sequence(torch.cat([*projected], dim=-1), lengths, group)  # one collective for all
            projected = gathered.split(sizes, dim=-1)
        num_rows = projected[0].size(1)
        # Rows are concatenated, so several padded rows are computed like the sequences of a packed one.
        mixed_TI, _, _ = self.mix([each.transpose(0, 1).flatten(0, 1) for each in projected], lengths * num_rows)
        mixed_SBI = mixed_TI.unflatten(0, (num_rows, -1)).transpose(0, 1)
        if group.size() > 1:
            mixed_SBI = mixed_SBI[zigzag_positions(lengths, group.rank(), group.size(), mixed_SBI.device)]
        return mixed_SBI.contiguous()

    def _cached(self, projected: Sequence[torch.Tensor], cache: Cache) -> torch.Tensor:
        """Return outputs [T, I] of the tokens of a pass; zeros for padding."""
        convolved, _, kernel = self.conv1d.weight.shape
        inputs, states = (self, "inputs"), (self, "states")
        before = cache.state(inputs, (kernel - 1, convolved), projected[0].dtype)
        # In float32 in any model: the state sums up over all tokens of a row.
        state = cache.state(states, self.state_shape, torch.float32)
        *lengths, num_padding = cache.lengths(len(projected[0]))
        if not lengths:
            heads, _, size = self.state_shape
            return projected[0].new_zeros(num_padding, heads * size)
        mixed_TI, before, state = self.mix([each[: cache.num_tokens] for each in projected], lengths, before, state)
        cache.update_state(inputs, before)
        cache.update_state(states, state)
        return torch.cat([mixed_TI, mixed_TI.new_zeros(num_padding, mixed_TI.size(1))])

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Return the sharded parameters, with the axis along which tensor-parallel ranks split them."""
        assert metadata is not None
        missing = {name for name, _ in self.named_parameters(recurse=False)} - {*self.split}
        assert not missing, f"parameters that a checkpoint would not contain: {missing}"
        own = {name: self.get_parameter(name) for name in self.split}
        state = make_sharded_tensors_for_checkpoint(
            own,
            prefix,
            dict.fromkeys(own, 0),
            sharded_offsets,
            tp_group=self.pg_collection.tp,
            dp_cp_group=metadata["dp_cp_group"],
        )
        # Without children whose weights are in `split`, such as `conv1d`; the others describe their own.
        others = [name for name, child in self.named_children() if f"{name}.weight" not in own]
        for name in others:
            child = self.get_submodule(name)
            state |= sharded_state_dict_default(
                child, f"{prefix}{name}.", sharded_offsets, metadata, tp_group=self.pg_collection.tp
            )
        return state


def causal_conv1d(
    inputs_TC: torch.Tensor,
    weight_C1K: torch.Tensor,
    lengths: Sequence[int],
    before: torch.Tensor | None,
    bias_C: torch.Tensor | None = None,
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
    convolved_TC = F.conv1d(row_C[None], weight_C1K, bias_C, groups=row_C.size(0))[0].T
    sizes = list(chain.from_iterable((length, reach) for length in lengths))
    kept = convolved_TC.split(sizes[:-1])[::2]
    return torch.cat(kept), torch.stack([part[len(part) - reach :] for part in parts])


def split_over_ranks(tensor: torch.Tensor) -> nn.Parameter:
    """Return a parameter that is split over tensor-parallel ranks along the first axis."""
    parameter = nn.Parameter(tensor)
    set_tensor_model_parallel_attributes(parameter, is_parallel=True, dim=0, stride=1)
    return parameter
