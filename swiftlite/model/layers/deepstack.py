"""Decoder layers of Qwen3-VL: the first layers add features of images to their outputs (deepstack).

Shapes: S tokens of this sequence-parallel rank, B rows, H hidden size.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from swiftlite.model.layers.residual import ResidualLayer
from swiftlite.model.loss.balance import RoutedTokens


@dataclass(frozen=True)
class Deepstack:
    """The features that are added to the outputs of the first decoder layers.

    Attributes:
        features_SBH: for each of these layers the features; zeros for tokens that are not of an image.
        tokens: description of the tokens for the routers.
    """

    features_SBH: Sequence[torch.Tensor]
    tokens: RoutedTokens | None


class DeepstackLayer(ResidualLayer):
    """A decoder layer that adds features to its output.

    megatron-core passes the padding mask to every layer. Routers use no mask, so the argument is used for the features.
    """

    def forward(self, *args: Any, padding_mask: Any = None, **kwargs: Any) -> tuple[Any, Any]:
        """Run the layer; return its output [S, B, H] and the context, which is unused."""
        if not isinstance(padding_mask, Deepstack):
            return super().forward(*args, padding_mask=padding_mask, **kwargs)
        result: tuple[Any, Any] = super().forward(*args, padding_mask=padding_mask.tokens, **kwargs)
        hidden_SBH, context = result
        number = self.layer_number - 1
        if number < len(padding_mask.features_SBH):
            hidden_SBH = hidden_SBH + padding_mask.features_SBH[number]
        return hidden_SBH, context
