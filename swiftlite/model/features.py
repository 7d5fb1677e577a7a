"""Collect the inputs of decoder layers that a drafter reads (`Heads.features`), on one pipeline stage.

Shapes: S sequence (of this context- and sequence-parallel rank), B batch, H hidden size, F features.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Features:
    """The features on one (virtual) pipeline stage.

    Attributes:
        num_received: number of features of earlier stages, which arrive with the trunk's state (`StageStates`).
        layers: indices, among the decoder layers of the stage, of the layers whose inputs are features.
        num_states: number of the trunk's states that arrive: after the final norm two, if heads read the one before it.
    """

    num_received: int = 0
    layers: Sequence[int] = ()
    num_states: int = 1

    @classmethod
    def of_stage(cls, features: Sequence[int], first_layer: int, num_layers: int, num_states: int = 1) -> "Features":
        """Return the features on a stage with `num_layers` decoder layers from number `first_layer` on.

        Args:
            features: numbers of the layers whose inputs are features, ascending.
        """
        own = [layer - first_layer for layer in features if first_layer <= layer < first_layer + num_layers]
        return cls(sum(layer < first_layer for layer in features), own, num_states)

    @contextmanager
    def collected(self, decoder: Any) -> Iterator[list[torch.Tensor]]:
        """Yield the features [S, B, H] of all layers up to this stage. The list is complete when the decoder has run.

        Features that arrived with the decoder's input are removed from it. Features have no gradient: they are for
        drafters of frozen trunks.
        """
        found_SBH: list[torch.Tensor] = []
        if self.num_received:
            length = len(decoder.input_tensor) // (self.num_received + self.num_states)
            features_SBH, decoder.input_tensor = decoder.input_tensor.tensor_split([self.num_received * length])
            found_SBH += features_SBH.detach().chunk(self.num_received)

        def see_input(layer: torch.nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
            # A separate tensor: recomputation can replace the data of the layer's input by this rank's part of it.
            found_SBH.append(kwargs["hidden_states"].detach())

        hooks = [decoder.layers[layer].register_forward_pre_hook(see_input, with_kwargs=True) for layer in self.layers]
        try:
            yield found_SBH
        finally:
            for hook in hooks:
                hook.remove()
