"""The hidden states that a pipeline stage sends to the next: as named tensors, and as the single tensor that is sent.

Shapes: S sequence (of this context- and sequence-parallel rank), B batch, H hidden size, D MTP depth, F features.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class StageStates:
    """The hidden states of one micro-batch between two pipeline stages, [S, B, H] each.

    For example, with the layout `Et*2|t*2|m|L` and two MTP depths that read the trunk's state before its final norm,
    stages hold and send the following (the final norm is on the stage of the last decoder layer):

        stage   holds                           sends                               on the wire
        0       embedding, 2 layers             trunk                               [S, B, H]
        1       2 layers, final norm            prenorm, trunk                      [2S, B, H]
        2       MTP layers                      trunk, depth 1, depth 2             [3S, B, H]
        3       output layer                    nothing: it returns the losses

    If the heads read the state after the norm, stage 1 sends only this state, [S, B, H]. Features, such as the input
    of layer 1, are before all other states, from the stage of their layer to the stage of the heads.
    `plan.layout.states_sent` counts the states that each stage sends.

    Attributes:
        trunk_SBH: the trunk's state; on the stage of the final norm and later stages, the state after the norm.
        prenorm_SBH: the trunk's state before the final norm, from the stage of the norm to the stage of heads that read
            this state; None on other stages.
        heads_SBH: the state of each MTP depth after its output norm; empty before the heads.
        features_SBH: inputs of decoder layers that the drafter reads (`Heads.features`), of all layers so far; empty
            after the drafter.
        shared_SBH: what later decoder layers read in addition to the trunk's state (`Sharing`); empty in most models.
    """

    trunk_SBH: torch.Tensor
    prenorm_SBH: torch.Tensor | None = None
    heads_SBH: Sequence[torch.Tensor] = ()
    features_SBH: Sequence[torch.Tensor] = ()
    shared_SBH: Sequence[torch.Tensor] = ()

    def head_input(self, reads_state: bool = True) -> torch.Tensor:
        """Return what the first MTP depth reads, as one tensor: the trunk's state [S, B, H], then the features.

        Args:
            reads_state: whether the drafter reads the trunk's state if there are features (`Heads.reads_state`).
        """
        state_SBH = self.trunk_SBH if self.prenorm_SBH is None else self.prenorm_SBH
        if not self.features_SBH:
            return state_SBH
        states_SBH = [state_SBH, *self.features_SBH] if reads_state else self.features_SBH
        return torch.cat([*states_SBH], dim=-1)

    def to_wire(self) -> torch.Tensor:
        """Concatenate the states along the sequence: from [S, B, H] for one state to [(1 + D)S, B, H].

        The result is always a copy, because megatron-core frees the tensor after sending it.
        """
        states_SBH = [self.trunk_SBH, *self.heads_SBH]
        if self.prenorm_SBH is not None:
            states_SBH.insert(0, self.prenorm_SBH)
        return torch.cat([*self.features_SBH, *self.shared_SBH, *states_SBH])

    @classmethod
    def from_wire(
        cls,
        wire_SBH: Any,
        *,
        has_prenorm: bool = False,
        num_heads: int = 0,
        num_features: int = 0,
        num_shared: int = 0,
    ) -> "StageStates":
        """Split the tensor that `to_wire` concatenated into named states.

        Args:
            has_prenorm: whether the tensor comes from the stage of the final norm and contains the state before the
                norm, for heads on this or a later stage.
            num_heads: number of heads' states in the tensor: D after the stage of the heads, 0 before it.
            num_features: number of features in the tensor.
            num_shared: number of blocks of shared states (`Sharing.num_blocks`) in the tensor.
        """
        num_states = num_features + num_shared + has_prenorm + 1 + num_heads
        states_SBH = [wire_SBH]
        if num_states > 1:
            states_SBH = list(wire_SBH.chunk(num_states))
        features_SBH, states_SBH = states_SBH[:num_features], states_SBH[num_features:]
        shared_SBH, states_SBH = states_SBH[:num_shared], states_SBH[num_shared:]
        prenorm_SBH = states_SBH.pop(0) if has_prenorm else None
        trunk_SBH, *heads_SBH = states_SBH
        return cls(trunk_SBH, prenorm_SBH, heads_SBH, features_SBH, shared_SBH)
