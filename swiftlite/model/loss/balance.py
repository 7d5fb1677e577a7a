"""Load-balancing losses of routers: their definition, and the description of a router's tokens.

A router assigns k of E experts to each token. For n tokens, n_i of which are assigned to expert i, and the tokens'
scores p_i for this expert, the load-balancing loss is

    L = E * sum_i( n_i / (k * n) * mean(p_i) )

The loss is computed over the tokens of a micro-batch (`aux_loss`; Switch Transformer, arXiv 2101.03961) or over each
sequence (`seq_aux_loss`; DeepSeek-V3, arXiv 2412.19437, equations 17 to 20). The papers assume equal lengths. Here
losses are weighted by tokens, like the next-token loss: a micro-batch or sequence with n of the T tokens in the global
batch has the weight n / T. The loss of a step is

    loss = next-token and MTP losses + moe_aux_loss_coeff * sum over routers of sum( n / T * L )

For example, sequences of 6 and 2 tokens with L of 1.0 and 2.0 give 6/8 * 1.0 + 2/8 * 2.0 = 1.25, whether or not they
are in one micro-batch.

Padding does not count. At MTP depth k, a sequence has k tokens less, because its last k positions have no input token.
An unrolled layer is one router, whose steps are weighted by `Heads.weights`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from swiftlite.base.heads import Heads


@dataclass(frozen=True)
class Balance:
    """Normalization of the load-balancing losses of a global batch.

    Attributes:
        tokens: number of tokens of the trunk and of each MTP depth in the global batch.
        divisor: the number of targets of the next-token loss. All gradients are divided by it at the end of the step.
    """

    tokens: Sequence[int]
    divisor: int


@dataclass(frozen=True)
class RoutedTokens:
    """The tokens of one call of a router on this rank.

    megatron-core's layers pass this object to routers in the argument for a padding mask. The object belongs to one
    micro-batch, so it stays correct when a pipeline interleaves micro-batches and when layers are recomputed.

    Attributes:
        sequence_SB: int64; index of the token's sequence in the micro-batch, -1 for padding.
        num_sequences: number of sequences of the micro-batch on all ranks that share it.
        load_weight: weight of a token's load: 1, or `Heads.weights` in later steps of an unrolled layer.
        mean_weight: weight of a token in the mean over the global batch; 0 without a load-balancing loss.
        divisor: number of targets of the next-token loss in the global batch, as in `Balance`.
    """

    sequence_SB: torch.Tensor
    num_sequences: int
    load_weight: float = 1.0
    mean_weight: float = 0.0
    divisor: int = 0

    @property
    def sequence_T(self) -> torch.Tensor:
        """`sequence_SB` in the order of the routers' tokens, [T]."""
        return self.sequence_SB.flatten()


def routed_tokens(
    sequence_KSB: Sequence[torch.Tensor], num_sequences: int, heads: Heads, balance: Balance | None
) -> list[RoutedTokens]:
    """Describe the tokens of a micro-batch to the routers of the trunk and of each MTP depth.

    Args:
        sequence_KSB: `RoutedTokens.sequence_SB` of the trunk and of each depth.
        num_sequences: number of sequences of the micro-batch on all ranks that share it.
        balance: normalization for the global batch; without it routers have no load-balancing loss.
    """
    step_weights: Sequence[float] = (1.0,) * heads.layers
    if heads.unroll > 1:
        step_weights = heads.weights
    described = []
    for depth, (sequence_SB, weight) in enumerate(zip(sequence_KSB, (1.0, *step_weights), strict=True)):
        # Relative to the first step, which thus counts like a layer that is not unrolled.
        load_weight = weight / step_weights[0] if depth else 1.0
        tokens = RoutedTokens(sequence_SB, num_sequences, load_weight)
        if balance is not None and balance.tokens[depth]:
            tokens = replace(tokens, mean_weight=weight / balance.tokens[depth], divisor=balance.divisor)
        described.append(tokens)
    return described


def tokens_times_loss(
    scores_TE: torch.Tensor,
    chosen_TE: torch.Tensor,
    group_T: torch.Tensor,
    num_groups: int,
    ranks: torch.distributed.ProcessGroup,
) -> torch.Tensor:
    """Return this rank's part, a scalar, of `sum(n * L)` over groups.

    L is the load-balancing loss of a group (formula in the module docstring), and n the group's number of tokens.

    Args:
        scores_TE: score of each expert (E) for each token (T); they sum to 1.
        chosen_TE: bool, the experts of each token.
        group_T: group from 0 to `num_groups` - 1, or -1 for tokens that do not count.
        ranks: ranks that the tokens are split over.
    """
    num_experts = scores_TE.size(1)
    row_T = group_T + 1  # row 0 is for tokens that do not count
    count_GE = scores_TE.new_zeros(1 + num_groups, num_experts, dtype=torch.float32)
    count_GE.index_add_(0, row_T, chosen_TE.float())
    # The load is one of all ranks' tokens; only the scores, which have the gradient, stay local.
    torch.distributed.all_reduce(count_GE, group=ranks)
    count_GE[0] = 0
    # E * n_i / (k * n): 1 for each expert if the load is balanced.
    load_GE = num_experts * count_GE / count_GE.sum(dim=1, keepdim=True).clamp(min=1)
    return (load_GE[row_T] * scores_TE).sum()
