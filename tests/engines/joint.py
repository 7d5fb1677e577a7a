"""Compute the distribution of three tokens after a prompt, for a model with a small vocabulary."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

PROMPT = [1, 4, 2]
TEMPERATURE = 0.7
"""Sampling temperature. With it, random heads are neither always correct nor always wrong."""


def filtered(
    logits_NV: torch.Tensor,
    texts: Sequence[Sequence[int]],
    temperature: float = 1.0,
    top_p: float = 1.0,
    top_k: int = 0,
    min_p: float = 0.0,
    repetition_penalty: float = 1.0,
) -> torch.Tensor:
    """Return the distributions from which an engine samples the token after each of these texts."""
    logits_NV = logits_NV.clone()
    for logits_V, text in zip(logits_NV, texts, strict=True):
        for token in set(text):
            logits_V[token] *= repetition_penalty if logits_V[token] < 0 else 1 / repetition_penalty
    p = (logits_NV / temperature).softmax(-1)
    ordered, places = p.sort(descending=True)
    ordered[:, top_k or p.shape[1] :] = 0
    ordered = ordered / ordered.sum(-1, keepdim=True)
    ordered = ordered.masked_fill(ordered.cumsum(-1) - ordered >= top_p, 0)
    ordered = ordered.masked_fill(ordered < min_p * ordered[:, :1], 0)
    p = ordered.gather(-1, places.argsort())
    return p / p.sum(-1, keepdim=True)


def joint_distribution(
    directory: Path,
    top_p: float = 1.0,
    temperature: float = TEMPERATURE,
    num_tokens: int = 6,
    end: int | None = None,
    prompt: Sequence[int] = PROMPT,
    **filters: Any,
) -> torch.Tensor:
    """Return the distribution of the first three tokens after a prompt, from the trunk alone and without a cache.

    Args:
        num_tokens: size of the vocabulary.
        end: token that ends an answer, which then counts as a repetition of this token.
        filters: further arguments of `filtered`.
    """
    model: Any = AutoModelForCausalLM.from_pretrained(directory).eval()

    def following(rows: list[list[int]]) -> torch.Tensor:
        with torch.no_grad():
            logits = model(torch.tensor(rows)).logits[:, -1]
        return filtered(logits, rows, temperature, top_p, **filters)

    tokens = range(num_tokens)
    first = following([[*prompt]])[0]
    second = following([[*prompt, a] for a in tokens])
    third = following([[*prompt, a, b] for a in tokens for b in tokens]).view(num_tokens, num_tokens, num_tokens)
    if end is not None:
        repeated = torch.nn.functional.one_hot(torch.tensor(end), num_tokens).float()
        second[end] = third[:, end] = third[end] = repeated
    return first[:, None, None] * second[:, :, None] * third
