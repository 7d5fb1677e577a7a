"""Compute the distribution of three tokens after a prompt, for a model with a small vocabulary."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

PROMPT = [1, 4, 2]
TEMPERATURE = 0.7
"""Sampling temperature. With it, random heads are neither always correct nor always wrong."""


def joint_distribution(
    directory: Path,
    top_p: float,
    temperature: float = TEMPERATURE,
    num_tokens: int = 6,
    end: int | None = None,
    prompt: Sequence[int] = PROMPT,
) -> torch.Tensor:
    """Return the distribution of the first three tokens after a prompt, from the trunk alone and without a cache.

    Args:
        num_tokens: size of the vocabulary.
        end: token that ends an answer, which then counts as a repetition of this token.
    """
    model: Any = AutoModelForCausalLM.from_pretrained(directory).eval()

    def following(rows: list[list[int]]) -> torch.Tensor:
        with torch.no_grad():
            p = (model(torch.tensor(rows)).logits[:, -1] / temperature).softmax(-1)
        ordered, places = p.sort(descending=True)
        is_out = ordered.cumsum(-1) - ordered >= top_p
        p = p.masked_fill(is_out.gather(-1, places.argsort()), 0)
        return p / p.sum(-1, keepdim=True)

    tokens = range(num_tokens)
    first = following([[*prompt]])[0]
    second = following([[*prompt, a] for a in tokens])
    third = following([[*prompt, a, b] for a in tokens for b in tokens]).view(num_tokens, num_tokens, num_tokens)
    if end is not None:
        repeated = torch.nn.functional.one_hot(torch.tensor(end), num_tokens).float()
        second[end] = third[:, end] = third[end] = repeated
    return first[:, None, None] * second[:, :, None] * third
