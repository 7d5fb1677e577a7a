"""Define the MLP of a layer in which experts are computed next to an MLP, as in Gemma 4."""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from swiftlite.bridge.rows import Row
from swiftlite.families.mlp import MixtureOfExperts, Mlp
from swiftlite.families.rank import FLOAT32, ParameterCount, Rank

_NORMS = {
    "mlp.dense_norm": "pre_feedforward_layernorm",
    "mlp.dense_output_norm": "post_feedforward_layernorm_1",
    "mlp.experts_norm": "pre_feedforward_layernorm_2",
    "mlp.experts_output_norm": "post_feedforward_layernorm_2",
    "mlp.router.input_norm": "router.scale",
}
"""Megatron names of the norms, each with its HF name. The norm of the router's input has the scale as its weight."""


@dataclass(frozen=True)
class ExpertsAndMlp:
    """A mixture of experts and an MLP that read the same state; the result is the sum of both outputs.

    Each has norms of its input and its output. The router reads the state through a further norm, divided by the square
    root of the hidden size, and multiplies the weight of each expert by a trained number.

    Attributes:
        dense: the MLP.
        mixture: the experts, without shared experts.
    """

    recompute_modules: ClassVar[tuple[str, ...]] = ("moe",)
    needs_sequence_parallel: ClassVar[str] = "experts"
    layer_arguments: ClassVar[tuple[str, ...]] = Mlp.layer_arguments
    norms_input: ClassVar[bool] = True

    dense: Mlp
    mixture: MixtureOfExperts

    @property
    def experts(self) -> int:
        return self.mixture.experts

    @property
    def topk(self) -> int:
        return self.mixture.topk

    @property
    def tensor_split(self) -> dict[str, int]:
        return self.dense.tensor_split

    @property
    def splits_experts(self) -> bool:
        return self.mixture.splits_experts

    @property
    def expert_split(self) -> dict[str, int]:
        return self.mixture.expert_split

    def mcore_config(self) -> dict[str, Any]:
        return self.dense.mcore_config() | self.mixture.mcore_config()

    def rows(self) -> list[Row]:
        hidden = self.dense.hidden
        dense = [replace(row, mcore=row.mcore.replace("mlp.", "mlp.dense.", 1)) for row in self.dense.rows()]
        rows = [*dense, *self.mixture.rows()]
        rows.append(Row("mlp.router.expert_scale", {"router.per_expert_scale": (self.experts,)}))
        for mcore, hf in _NORMS.items():
            rows.append(Row(f"{mcore}.weight", {hf if hf == "router.scale" else f"{hf}.weight": (hidden,)}))
        return rows

    def parameters(self, rank: Rank) -> ParameterCount:
        own = ParameterCount(len(_NORMS) * self.dense.hidden + self.experts)
        return own + self.dense.parameters(rank) + self.mixture.parameters(rank)

    def macs_per_token(self) -> int:
        return self.dense.macs_per_token() + self.mixture.macs_per_token()

    def input_activation_bytes(self, rank: Rank) -> int:
        """Return 0 unless the layer is recomputed: norms save the input."""
        return rank.hidden_state_bytes(self.dense.hidden) if "moe" in rank.recomputed else 0

    def activation_bytes(self, rank: Rank) -> int:
        if "moe" in rank.recomputed:
            return 0
        tokens, hidden, parts = rank.sequence_tokens, self.dense.hidden, (self.dense, self.mixture)
        norms = len(_NORMS) * rank.norm_activation_bytes(tokens, hidden)
        if not rank.copies_norm_inputs:
            norms -= 2 * rank.hidden_state_bytes(hidden)  # three norms have the same input
        weights = tokens * (2 * self.experts + 1) * FLOAT32  # before and after the division by their sum, and the sum
        return norms + weights + sum(part.input_activation_bytes(rank) + part.activation_bytes(rank) for part in parts)
