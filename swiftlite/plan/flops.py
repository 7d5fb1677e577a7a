"""Floating-point operations of training, from config.json and real lengths. Arithmetic, no torch.

Counted is what a step asks for: each multiply-add of a matrix or of attention as two operations; attention for the
pairs of tokens that see each other, n * (n + 1) / 2 of a sequence of n; of the experts those that the router chooses;
the vocabulary for tokens that are learned (`model.loss` computes no other logits). Not counted: padding, recomputation,
and what is no matrix product (norms, rotary angles, softmax, optimizer).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from swiftlite.heads import Heads
from swiftlite.plan.memory import ModelSizes, Setup


@dataclass(frozen=True)
class Flops:
    """Operations of a forward and backward pass, over all ranks of a replica.

    Attributes:
        linear: per token, without the vocabulary.
        square: per token of a sequence squared.
        targets: per token that is learned, by the trunk and by each MTP depth.
    """

    linear: float
    square: float
    targets: tuple[float, ...]

    @property
    def per_token(self) -> float:
        """Per token where all are learned; with `square`, what `data.schedule` levels."""
        return self.linear + sum(self.targets)

    def step(self, num_tokens: int, squares: int, num_targets: Sequence[int]) -> float:
        """Of a step.

        Args:
            num_tokens: sum of the lengths of its sequences.
            squares: sum of their squares.
            num_targets: labels of the trunk and of each MTP depth that are not ignored.
        """
        vocabulary = sum(each * number for each, number in zip(self.targets, num_targets, strict=True))
        return self.linear * num_tokens + self.square * squares + vocabulary


def training_flops(hf_config: Mapping[str, Any], heads: Heads = Heads(), *, heads_only: bool = False) -> Flops:
    """Of trunk, MTP layers, and the output layer of each.

    A backward pass is twice the forward pass: gradients of inputs and of weights. With `heads_only` the trunk has none,
    its loss neither, and the output layer none of its weights.

    Args:
        hf_config: config.json.

    Raises:
        UserError: a model_type that is not known.
    """
    sizes = ModelSizes(hf_config, Setup())
    depth, num_layers, vocabulary = heads.drafts, sizes.num_layers, 2 * sizes.vocab * sizes.hidden
    trunk = sum(_layer(sizes, sizes.is_moe(layer)) for layer in range(num_layers))
    mtp = (_layer(sizes, sizes.is_moe(num_layers - 1)) + 4 * sizes.hidden**2) * depth  # and its projection
    # Scores and values: 2 * (keys + values) per pair and head, of n * (n + 1) / 2 pairs.
    pairs = sizes.heads * (sizes.key_size + sizes.value_size)
    of_trunk, of_head = (1, 2) if heads_only else (3, 3)
    square = pairs * (of_trunk * num_layers + 3 * depth)
    return Flops(
        linear=of_trunk * trunk + 3 * mtp + square,
        square=square,
        targets=(of_trunk * vocabulary, *[of_head * vocabulary] * depth),
    )


def _layer(sizes: ModelSizes, is_moe: bool) -> int:
    """Of a decoder layer's matrices, per token, forward."""
    if is_moe:
        mlp = sizes.experts * sizes.hidden + sizes.topk * sizes.mlp(sizes.expert_ffn) + sizes.mlp(sizes.shared_ffn)
    else:
        mlp = sizes.mlp(sizes.ffn)
    return 2 * (sizes.attention_matrices() + mlp)
