"""Implement an MTP head with features (`families/mtp_features.py`) in plain torch on top of a transformers trunk.

Shapes: B batch (always 1), S positions, H hidden size, F features.
"""

from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import nn

from swiftlite.bridge.encoding.index import format_of
from swiftlite.bridge.rejoin import joined
from swiftlite.bridge.tensors import Checkpoint
from swiftlite.engines.transformers.mtp_heads import MtpHead, layer_options, read_layer
from swiftlite.families.mtp_features import BLOCK
from swiftlite.families.resolved import HfModel


class FeatureHead(MtpHead):
    """An `MtpHead` whose first draft also reads features, which `fused` adds to the trunk's state.

    Args:
        decoder: the trunk without its output layer.
        num_features: F.
        options: arguments of `MtpHead` for the decoder layer.
    """

    def __init__(self, decoder: Any, num_features: int, **options: Any):
        super().__init__(decoder, **options)
        size, place = decoder.config.hidden_size, {"device": decoder.device, "dtype": decoder.dtype}
        self.hnorm: Any = nn.ModuleList(deepcopy(decoder.norm) for _ in range(1 + num_features))
        self.eh_proj: Any = nn.ModuleDict()
        for name, num_inputs in (("embedding", 1), ("first", 1 + num_features), ("later", 1)):
            self.eh_proj[name] = nn.Linear(num_inputs * size, size, bias=False, **place)

    def fused(self, states_BSH: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the trunk's state and the features as one tensor, [B, S, (1 + F) * H]."""
        return torch.cat([*states_BSH], dim=-1)

    def projected(self, embedding_BSH: torch.Tensor, hidden_BSH: torch.Tensor) -> torch.Tensor:
        """Return the input of the decoder layer.

        Args:
            hidden_BSH: result of `fused`, or the previous state of this head, [B, S, H].
        """
        parts_BSH = hidden_BSH.split(embedding_BSH.size(-1), dim=-1)
        normed_BSH = [norm(part_BSH) for norm, part_BSH in zip(self.hnorm, parts_BSH, strict=False)]
        of_states = self.eh_proj["first" if len(parts_BSH) > 1 else "later"]
        return self.eh_proj["embedding"](self.enorm(embedding_BSH)) + of_states(torch.cat(normed_BSH, dim=-1))


def load_feature_head(model: HfModel, decoder: Any) -> FeatureHead:
    """Load the head of a checkpoint."""
    head = FeatureHead(decoder, len(model.heads.features), **layer_options(model))
    rows = model.family.head_rows(model.config, 0)
    outside_of_layer = [row for row in rows if not next(iter(row.hf)).startswith(BLOCK)]
    with Checkpoint(model.directory, format_of(model.config)) as checkpoint:
        state = {row.mcore.removeprefix("mtp.layers.0."): joined(row, checkpoint.read) for row in outside_of_layer}
        head.load_state_dict(state | read_layer(model, checkpoint, BLOCK), strict=True)
    return head
