"""Compute the distribution of three tokens after a prompt, for a model with a small vocabulary."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

PROMPT = [1, 4, 2]
TEMPERATURE = 0.7
"""Sampling temperature. With it, random heads are neither always correct nor always wrong."""


def joint_distribution(directory: Path, top_p: float, temperature: float = TEMPERATURE) -> torch.Tensor:
    """Return the distribution of the first three tokens after PROMPT, from the trunk alone and without a cache."""
    model: Any = AutoModelForCausalLM.from_pretrained(directory).eval()

    def following(rows: list[list[int]]) -> torch.Tensor:
        with torch.no_grad():
            p = (model(torch.tensor(rows)).logits[:, -1] / temperature).softmax(-1)
        ordered, places = p.sort(descending=True)
        is_out = ordered.cumsum(-1) - ordered >= top_p
        p = p.masked_fill(is_out.gather(-1, places.argsort()), 0)
        return p / p.sum(-1, keepdim=True)

    tokens = range(6)
    first = following([PROMPT])[0]
    second = following([[*PROMPT, a] for a in tokens])
    third = following([[*PROMPT, a, b] for a in tokens for b in tokens]).view(6, 6, 6)
    return first[:, None, None] * second[:, :, None] * third
