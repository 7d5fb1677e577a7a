"""The experts of one rank, each a gated MLP, computed one after the other."""

from typing import Any

import torch
from megatron.core.transformer.moe.experts import SequentialMLP as McoreSequentialMLP
from megatron.core.transformer.transformer_config import TransformerConfig


class SequentialMLP(McoreSequentialMLP):
    """megatron-core's, with an expert's weight applied to what comes out of it, as transformers does.

    The stock class scales the state between the expert's two matrices: the same number, rounded differently, and in
    bfloat16 enough for some tokens to go to another expert one layer on.

    Its parameters say that their gradients are summed over the ranks that hold the same expert (`allreduce` False).
    megatron-core says so where experts are shared out. Where they are not, but their matrices are cut another way than
    all others, it would sum over the other matrices' ranks: half of the gradient at TP 2 and ETP 1, in silence
    (tensor_parallel/layers.py:886 of 0.16.1).
    """

    def __init__(self, num_local_experts: int, config: TransformerConfig, *args: Any, **kwargs: Any):
        super().__init__(num_local_experts, config, *args, **kwargs)
        if config.expert_tensor_parallel_size != config.tensor_model_parallel_size:
            for parameter in self.parameters():
                parameter.allreduce = False  # type: ignore[attr-defined]

    def forward(
        self, permuted_local_hidden_states: torch.Tensor, tokens_per_expert: torch.Tensor, permuted_probs: torch.Tensor
    ) -> tuple[torch.Tensor, None]:
        """Outputs [T, H] for tokens [T, H] that stand in order of their experts.

        Args:
            tokens_per_expert: how many of the tokens are each expert's.
            permuted_probs: [T], the weight of each token's expert.
        """
        counts = tokens_per_expert.tolist()
        groups = zip(permuted_local_hidden_states.split(counts), permuted_probs.split(counts), strict=True)
        outputs = [
            (expert(hidden_TH)[0] * probs_T[:, None]).to(hidden_TH.dtype)
            for expert, (hidden_TH, probs_T) in zip(self.local_experts, groups, strict=True)
        ]
        return torch.cat(outputs), None
