"""Verify drafts and choose the next token, so that the output is that of the trunk alone.

With greedy decoding, the tokens are identical. At a temperature above 0, they have the same distribution: drafts are
sampled from the heads and verified by rejection sampling (algorithm 1 of arXiv 2211.17192).

Shapes: K drafts, V vocabulary.
"""

from typing import Any

import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from swiftlite.engines.engine import Sampling


def warpers(sampling: Sampling) -> LogitsProcessorList | None:
    """Return the processors of logits, in the order of `generate` in transformers; None if there are none.

    Greedy decoding has a repetition penalty, but no temperature and no filters.
    """
    chosen: list[Any] = []
    if sampling.repetition_penalty != 1:
        chosen.append(RepetitionPenaltyLogitsProcessor(float(sampling.repetition_penalty)))
    if sampling.temperature:
        chosen.append(TemperatureLogitsWarper(float(sampling.temperature)))
        if sampling.top_k:
            chosen.append(TopKLogitsWarper(sampling.top_k))
        if sampling.top_p < 1:
            chosen.append(TopPLogitsWarper(sampling.top_p))
        if sampling.min_p:
            chosen.append(MinPLogitsWarper(sampling.min_p))
    return LogitsProcessorList(chosen) if chosen else None


def processed(processor: LogitsProcessorList | None, ids_1S: torch.Tensor, logits_KV: torch.Tensor) -> torch.Tensor:
    """Apply processors to the logits of the last K positions of a text, each with the text up to its position.

    The repetition penalty of a position depends on the drafts before it.
    """
    if processor is None:
        return logits_KV
    # Logits of position i choose token i + 1: with 5 ids and 3 rows, the rows follow the first 3, 4 and 5 ids.
    first = ids_1S.shape[1] - len(logits_KV) + 1
    logits_KV, rows = logits_KV.float(), range(len(logits_KV))
    parts: list[Any] = [processor(ids_1S[:, : first + row], logits_KV[row : row + 1]) for row in rows]  # type: ignore[arg-type]
    return torch.cat(parts)


def draw(probabilities_V: torch.Tensor, generator: torch.Generator | None = None) -> torch.Tensor:
    """Sample one token [1] from probabilities, which do not have to be normalized."""
    return torch.multinomial(probabilities_V, 1, generator=generator)


def verify_greedily(drafts_K: torch.Tensor, logits_KV: torch.Tensor) -> torch.Tensor:
    """Return the correct drafts, followed by the trunk's next token.

    A draft is correct if it and all drafts before it equal the trunk's most likely tokens.

    Args:
        logits_KV: logits of the trunk, with one row more than there are drafts.
    """
    likeliest = logits_KV.argmax(dim=-1)
    num_kept = int((likeliest[:-1] == drafts_K).cumprod(0).sum())
    return likeliest[: num_kept + 1]


def verify(
    drafts_K: torch.Tensor, q_KV: torch.Tensor, p_KV: torch.Tensor, generator: torch.Generator | None = None
) -> torch.Tensor:
    """Return the accepted drafts followed by one token: [1] to [K + 1].

    A draft x is accepted with probability min(1, p(x) / q(x)). The first rejected draft is replaced by a sample from
    the positive part of p - q, and later drafts are discarded. If all K drafts are accepted, a sample from p is
    appended. The tokens therefore have the distribution p for any q. The closer q is to p, the more drafts are
    accepted.

    Args:
        q_KV: distribution that each draft was sampled from.
        p_KV: the trunk's distributions, with one row more than there are drafts.
    """
    # One number per draft, also behind a rejected one: later random numbers do not depend on the acceptance.
    luck_K = torch.rand(len(drafts_K), generator=generator, device=q_KV.device)
    place_K = torch.arange(len(drafts_K), device=q_KV.device)
    is_kept_K = luck_K * q_KV[place_K, drafts_K] < p_KV[place_K, drafts_K]
    num_kept = int(is_kept_K.cumprod(0).sum())
    rest_V = p_KV[num_kept]
    if num_kept < len(drafts_K):
        left_V = (rest_V - q_KV[num_kept]).clamp(min=0)
        # p - q is zero for equal distributions, for which only rounding can reject a draft.
        if left_V.any():
            rest_V = left_V
    return torch.cat((drafts_K[:num_kept], draw(rest_V, generator)))
