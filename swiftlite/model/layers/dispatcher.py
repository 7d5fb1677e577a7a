"""Dispatch tokens to experts if one rank holds all experts.

Shapes: T tokens, K experts of each token, E experts, P = T * K pairs of a token and an expert, H hidden size.
"""

from typing import Any

import torch
from megatron.core.transformer.moe.token_dispatcher import MoETokenDispatcher
from torch.autograd.function import once_differentiable


class LocalTokenDispatcher(MoETokenDispatcher):
    """Sorts tokens by expert, and sums the outputs of each token's experts, without communication.

    megatron-core's dispatcher for several ranks also works on one rank, but the host waits for the GPU three times in
    every layer, in the forward pass and in recomputation (moe_utils.py:369 and 372, token_dispatcher.py:899 of 0.16.1).
    That dispatcher selects pairs with masks, so the host must read the number of pairs, and it copies the number of
    tokens of each expert to the host. Here the host knows P, because each token has exactly K experts.

    For example, with three tokens whose experts are (0, 2), (2, 1) and (0, 1), the pairs in order of experts are

        pair              0      1      2      3      4      5
        expert            0      0      1      1      2      2
        token_P           0      2      1      2      0      1

    and pair_TK, the pairs of each token, is ((0, 4), (2, 5), (1, 3)).
    """

    def dispatch_preprocess(
        self, tokens: torch.Tensor, routing_map: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return tokens [P, H] in order of their experts, and the routing weight [P] of each pair.

        Args:
            tokens: [..., H].
            routing_map: bool [T, E], K true in each row.
            probs: [T, E].
        """
        self.shape = tokens.shape
        tokens_TH = tokens.reshape(-1, self.shape[-1])
        num_tokens, num_pairs = len(tokens_TH), len(tokens_TH) * self.config.moe_router_topk
        chosen_ET = routing_map.t().to(torch.uint8).flatten()
        # Stable, so that pairs are in order of experts, and those of an expert in order of tokens.
        pair_P = chosen_ET.argsort(descending=True, stable=True)[:num_pairs]  # the true ones of E * T
        # Entry e * T + t of the transposed map belongs to token t.
        self.token_P = pair_P % num_tokens
        self.pair_TK = self.token_P.argsort(stable=True).view(num_tokens, -1)
        self.tokens_per_expert = routing_map.sum(dim=0)
        return _copy_to_experts(tokens_TH, self.token_P, self.pair_TK), probs.t().flatten().index_select(0, pair_P)

    def token_dispatch(self, hidden_states: torch.Tensor, probs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return hidden_states, probs

    def dispatch_postprocess(
        self, hidden_states: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return `hidden_states`, the number of tokens of each expert [E] (on the device), and `probs`."""
        return hidden_states, self.tokens_per_expert, probs

    def combine_preprocess(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return hidden_states

    def token_combine(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return hidden_states

    def combine_postprocess(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Return the sum of the outputs of each token's experts, in the shape of the layer's input."""
        return _sum_of_experts(hidden_states, self.token_P, self.pair_TK).view(self.shape)


def _copy_to_experts(tokens_TH: torch.Tensor, token_P: torch.Tensor, pair_TK: torch.Tensor) -> torch.Tensor:
    copies: Any = _CopyToExperts.apply(tokens_TH, token_P, pair_TK)
    return copies


def _sum_of_experts(outputs_PH: torch.Tensor, token_P: torch.Tensor, pair_TK: torch.Tensor) -> torch.Tensor:
    sums: Any = _SumOfExperts.apply(outputs_PH, token_P, pair_TK)
    return sums


def _gather_and_sum(pairs_PH: torch.Tensor, pair_TK: torch.Tensor) -> torch.Tensor:
    """Return the sum [T, H] of each token's pairs (one row per selected expert), added in order of experts.

    A scatter on a GPU would add in varying order.
    """
    return pairs_PH.index_select(0, pair_TK.flatten()).view(*pair_TK.shape, -1).sum(dim=1)


# The two functions are each other's gradient.


class _CopyToExperts(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tokens_TH: torch.Tensor, token_P: torch.Tensor, pair_TK: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(pair_TK)
        return tokens_TH.index_select(0, token_P)

    @staticmethod
    @once_differentiable
    def backward(ctx, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (pair_TK,) = ctx.saved_tensors
        return _gather_and_sum(grad_outputs[0], pair_TK), None, None


class _SumOfExperts(torch.autograd.Function):
    @staticmethod
    def forward(ctx, outputs_PH: torch.Tensor, token_P: torch.Tensor, pair_TK: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(token_P)
        return _gather_and_sum(outputs_PH, pair_TK)

    @staticmethod
    @once_differentiable
    def backward(ctx, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (token_P,) = ctx.saved_tensors
        return grad_outputs[0].index_select(0, token_P), None, None
