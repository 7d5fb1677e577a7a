"""The layer of an EAGLE-3 drafter (`families/eagle3.py`): an unrolled MTP layer with another input.

Shapes: S sequence, B batch, H hidden size, F features.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import nn

from swiftlite.model.copied_config import with_settings
from swiftlite.model.mtp import UnrolledLayer
from swiftlite.runtime.compat import MTP_INNER_LAYER


class Eagle3Layer(UnrolledLayer):
    """The first step reads features that `fc` maps to one state; later steps read states of this layer.

    The input of the decoder layer is [embedding; state], [S, B, 2H]. Its norm is a `PairNorm`, and the output of its
    attention is added to the state (`add_to_state`).

    Args:
        config: config of the trunk.
        args, kwargs: further arguments of megatron-core's MTP layer. Norms and projection of `submodules` do nothing.
        settings: settings of the decoder layer that replace those of `config`, because it is a layer of Llama.
        num_features: F.
        norm: class of the norms of features; None: features are not normalized.
    """

    def __init__(
        self,
        config: TransformerConfig,
        *args: Any,
        settings: Mapping[str, Any],
        num_features: int,
        norm: type | None,
        **kwargs: Any,
    ):
        config = with_settings(config, **settings)
        super().__init__(config, *args, **kwargs)
        hidden = config.hidden_size
        self.fc = nn.Linear(num_features * hidden, hidden, bias=False, dtype=config.params_dtype)
        # Every tensor-parallel rank has the whole matrix. With sequence parallelism, each computes a part of the row,
        # and megatron-core sums the gradients.
        self.fc.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        self.fc_norm = nn.ModuleList()
        if norm is not None:
            self.fc_norm += [norm(config, hidden, config.layernorm_epsilon) for _ in range(num_features)]

    @property
    def _tp_group(self) -> dist.ProcessGroup:
        return getattr(self, MTP_INNER_LAYER).self_attention.linear_proj.tp_group

    def _steps(self, hidden_SBH: torch.Tensor, *decoder_inputs_SBH: torch.Tensor, **options: Any) -> torch.Tensor:
        """Return the states of all steps.

        Args:
            hidden_SBH: features, [S, B, F * H].
            decoder_inputs_SBH, options: as for `UnrolledLayer`.
        """
        if self.fc_norm:
            parts_SBH = hidden_SBH.chunk(len(self.fc_norm), dim=-1)
            parts_SBH = [norm(part_SBH) for norm, part_SBH in zip(self.fc_norm, parts_SBH, strict=True)]
            hidden_SBH = torch.cat(parts_SBH, dim=-1)
        return super()._steps(self.fc(hidden_SBH), *decoder_inputs_SBH, **options)

    def _concat_embeddings(self, hidden_states: torch.Tensor, decoder_input: torch.Tensor) -> torch.Tensor:
        """Return the input of the decoder layer. megatron-core's method also projects it."""
        return torch.cat((decoder_input, hidden_states), dim=-1)


class PairNorm(nn.Module):
    """Normalizes the halves of [embedding; state] separately.

    Args:
        norm: class of both norms.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float, *, norm: type):
        super().__init__()
        self.embedding_norm, self.state_norm = norm(config, hidden_size, eps), norm(config, hidden_size, eps)

    def forward(self, pair: torch.Tensor) -> torch.Tensor:
        """Normalize [..., 2 * hidden_size]."""
        embedding, state = pair.chunk(2, dim=-1)
        return torch.cat((self.embedding_norm(embedding), self.state_norm(state)), dim=-1)


def add_to_state(training: bool, fused: bool) -> Callable[..., torch.Tensor]:
    """Return a function like megatron-core's `get_bias_dropout_add`, without bias and dropout, whose residual is the
    state of [embedding; state].
    """

    def add(output_with_bias: tuple[torch.Tensor, None], residual: torch.Tensor, dropout: float) -> torch.Tensor:
        return residual.chunk(2, dim=-1)[1] + output_with_bias[0]

    return add
