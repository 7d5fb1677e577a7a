"""Floating-point operations of training, from config.json and real lengths. Arithmetic, no torch.

Counted is what the model asks for: each multiply-add of a matrix or of attention as two operations; attention for the
pairs of tokens that see each other, len * (len + 1) / 2 of a sequence; of the experts those that the router chooses.
Not counted: padding, recomputation, and what is not a matrix product (norms, rotary angles, softmax, optimizer).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from swiftlite.args.memory import ModelSizes, Setup


@dataclass(frozen=True)
class Flops:
    """Operations of a forward and backward pass over all ranks; also what levels work in `data.schedule`.

    Attributes:
        linear: per token.
        square: per token of a sequence squared.
    """

    linear: float
    square: float

    def __add__(self, other: "Flops") -> "Flops":
        return Flops(self.linear + other.linear, self.square + other.square)

    def __mul__(self, times: float) -> "Flops":
        return Flops(self.linear * times, self.square * times)

    def step(self, num_tokens: int, squares: int) -> float:
        """Of a step.

        Args:
            num_tokens: sum of its sequences' lengths.
            squares: sum of their squares.
        """
        return self.linear * num_tokens + self.square * squares


def training_flops(hf_config: Mapping[str, Any], mtp_num_layers: int = 0, *, heads_only: bool = False) -> Flops:
    """Trunk, MTP layers and the output layer of each, forward and backward.

    A backward pass is twice the forward pass: gradients of inputs and of weights. With `heads_only` the trunk has none,
    nor a loss of its own, and the output layer none of its weights.

    Args:
        hf_config: config.json.

    Raises:
        UserError: a model_type that is not known.
    """
    sizes = ModelSizes(hf_config, Setup())
    trunk = sum((_layer(sizes, sizes.is_moe(layer)) for layer in range(sizes.num_layers)), Flops(0, 0))
    head = Flops(4 * sizes.hidden**2, 0) + _layer(sizes, sizes.is_moe(sizes.num_layers - 1))
    vocabulary = Flops(2 * sizes.vocab * sizes.hidden, 0)
    if heads_only:
        return trunk + (head * 3 + vocabulary * 2) * mtp_num_layers
    return (trunk + vocabulary + (head + vocabulary) * mtp_num_layers) * 3


def _layer(sizes: ModelSizes, is_moe: bool) -> Flops:
    """A forward pass of a decoder layer."""
    if is_moe:
        active = sizes.topk * sizes.mlp(sizes.expert_ffn) + sizes.mlp(sizes.shared_ffn)
        mlp = sizes.experts * sizes.hidden + active
    else:
        mlp = sizes.mlp(sizes.ffn)
    # Scores and values: 2 * (key + value) per pair and head, of len * (len + 1) / 2 pairs.
    pairs = sizes.heads * (sizes.key_size + sizes.value_size)
    return Flops(2 * (sizes.attention_matrices() + mlp) + pairs, pairs)
