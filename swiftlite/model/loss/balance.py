"""What routers are told of the tokens they route: which are real, to which sequence each belongs, how much they weigh.

The load-balancing loss of a router, over n tokens of which n_i chose expert i with scores p (E experts, k a token):

    L = E * sum_i( n_i / (k * n) * mean(p_i) )

It is taken over the tokens of a micro-batch (`aux_loss`; Switch Transformer, arXiv 2101.03961) or over each sequence
(`seq_aux_loss`; DeepSeek-V3, arXiv 2412.19437, equations 17 to 20). The papers do not say how those of different
lengths add up; theirs are all as long. Here they count by their tokens, as the next-token loss does: a micro-batch or
sequence of n tokens, of T in the whole global batch, with n / T. So in a step

    loss = next-token and MTP losses + moe_aux_loss_coeff * sum over routers of sum( n / T * L )

For example, sequences of 6 and 2 tokens with L of 1.0 and 2.0 give 6/8 * 1.0 + 2/8 * 2.0 = 1.25, whether or not they
are in one micro-batch.

Padding is no token. MTP depth k has as many tokens less in a sequence as it looks ahead: at the last k positions it is
fed what is not there. A layer that is unrolled is one router, whose steps weigh `Heads.weights`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from swiftlite.heads import Heads


@dataclass(frozen=True)
class Balance:
    """What the load-balancing losses of a global batch are divided and multiplied by.

    Attributes:
        tokens: of the trunk and of each MTP depth, in the whole global batch.
        divisor: what all gradients are divided by at the end of the step; it is the next-token loss's, not this one's.
    """

    tokens: Sequence[int]
    divisor: int


@dataclass(frozen=True)
class RoutedTokens:
    """The tokens that a router is given at one time, on this rank.

    megatron-core's layers hand it on in the place of a padding mask. It goes with the micro-batch, so it is right
    however a pipeline interleaves micro-batches, and where layers are computed again.

    Attributes:
        sequence_SB: int64; which sequence of the micro-batch a token belongs to, -1 for none: there is padding.
        num_sequences: of the micro-batch, on all its ranks.
        load_weight: how much a token counts as load: 1, in the later steps of an unrolled layer by `Heads.weights`.
        mean_weight: weight of a token in the mean over the global batch; 0 where there is no loss.
        divisor: see `Balance`.
    """

    sequence_SB: torch.Tensor
    num_sequences: int
    load_weight: float = 1.0
    mean_weight: float = 0.0
    divisor: int = 0

    @property
    def sequence_T(self) -> torch.Tensor:
        """In the order in which routers have tokens."""
        return self.sequence_SB.flatten()


def routed_tokens(
    sequence_KSB: Sequence[torch.Tensor], num_sequences: int, heads: Heads, balance: Balance | None
) -> list[RoutedTokens]:
    """Describe the tokens of a micro-batch to the routers of the trunk and of each MTP depth.

    Args:
        sequence_KSB: `RoutedTokens.sequence_SB` of the trunk and of each depth.
        num_sequences: of the micro-batch, on all its ranks.
        balance: of the global batch; without it no router has a load-balancing loss.
    """
    step_weights = heads.weights if heads.unroll > 1 else (1.0,) * heads.layers
    described = []
    for depth, (sequence_SB, weight) in enumerate(zip(sequence_KSB, (1.0, *step_weights), strict=True)):
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
    """This rank's part of `sum(n * L)` over groups of tokens, a scalar: of each token, its scores times the load.

    Args:
        scores_TE: of each token (T) and expert (E); they add up to 1.
        chosen_TE: bool, the experts of each token.
        group_T: from 0 to `num_groups` - 1, or -1 for tokens that do not count.
        ranks: those that share the tokens.
    """
    num_experts = scores_TE.size(1)
    row_T = group_T + 1  # row 0 of the counts is for what does not count
    count_GE = scores_TE.new_zeros(1 + num_groups, num_experts, dtype=torch.float32)
    count_GE.index_add_(0, row_T, chosen_TE.float())
    torch.distributed.all_reduce(count_GE, group=ranks)
    count_GE[0] = 0
    # 1 for each expert where the load is level: E * n_i / (k * n).
    load_GE = num_experts * count_GE / count_GE.sum(dim=1, keepdim=True).clamp(min=1)
    return (load_GE[row_T] * scores_TE).sum()
