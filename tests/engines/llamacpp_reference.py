"""Compute the tokens and draft counts of llama.cpp's server for each request, without its code.

llama.cpp pairs the state of the previous token with every token, also with the first token of a prompt. The reference
also follows faults of llama.cpp b11549 (docs/en/upstream.md), which change only drafts:

- The state before the first token of a prompt is not reset: it is zeros in the first request of a slot, and the state
  of the last token but one of the previous request in later ones.
- Architectures with recurrent layers cannot remove rejected tokens. After a rejected draft, they restore an earlier
  state, compute the accepted tokens again together with the next one, and do not draft in this step. The head's key at
  the first of these tokens is computed from the state of the last rejected draft.

A third one is in `norm_as_llamacpp`.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from transformers.activations import ACT2FN

from tests.engines.reference import Reference


class HalfGelu(torch.nn.Module):
    """GELU as ggml computes it on a CPU: it reads the result from a table by the input in float16, also in float32."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        read = torch.nn.functional.gelu(inputs.half().float(), approximate="tanh").half().float()
        return torch.where(inputs.abs() < 10, read, inputs.clamp(min=0))


@contextmanager
def half_gelu() -> Iterator[None]:
    """Let models of transformers that are built have `HalfGelu`."""
    functions: Any = ACT2FN
    before = dict.__getitem__(functions, "gelu_pytorch_tanh")
    functions["gelu_pytorch_tanh"] = HalfGelu
    try:
        yield
    finally:
        functions["gelu_pytorch_tanh"] = before


class _LayerNorm(torch.nn.Module):
    def __init__(self, weight_H: torch.Tensor):
        super().__init__()
        self.weight_H = weight_H

    def forward(self, state_BSH: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.layer_norm(state_BSH, self.weight_H.shape, self.weight_H, None, 1e-5)


def norm_as_llamacpp(reference: Reference) -> None:
    """Let the output norm of the head subtract the mean, as that of Nemotron-H in llama.cpp."""
    head: Any = reference.heads[0]
    head["output_norm"] = _LayerNorm(head["output_norm"].weight)


@dataclass(frozen=True)
class Request:
    """The result of one request."""

    tokens: list[int]
    drafted: int
    accepted: int


def requests(
    reference: Reference,
    prompts: list[list[int]],
    max_new_tokens: int,
    num_tokens: int,
    num_text_tokens: int = 0,
    *,
    computes_again: bool,
) -> list[Request]:
    """Return the results of prompts that are sent one after the other to a server with one slot.

    Args:
        num_tokens: number of tokens that the heads draft.
        num_text_tokens: number of tokens that are drafted after two tokens that occurred before.
        computes_again: whether rejected tokens cannot be removed.
    """
    rows = reference.greedy_rows(prompts, max_new_tokens + num_tokens + 1)
    first = None
    results = []
    for prompt, row in zip(prompts, rows, strict=True):
        states, _ = reference.trunk_states(torch.tensor([prompt + row]))
        if first is None:
            first = torch.zeros_like(states[:, :1])
        slot = Slot(reference, torch.cat((first, states), dim=1).detach(), computes_again)
        results.append(slot.answer(prompt, row, max_new_tokens, num_tokens, num_text_tokens))
        last = len(prompt) + max_new_tokens - 2
        first = states[:, last : last + 1].detach()
    return results


def from_text(tokens: list[int], number: int, match: int = 2) -> list[int]:
    """Return what followed the last tokens at their most recent earlier occurrence.

    llama.cpp searches neither in the newest token nor at the first one, and makes no proposal shorter than the match.
    """
    known = tokens[:-1]
    if not number or len(known) <= match + number + 1:
        return []
    for begin in range(len(known) - match - 1, 0, -1):
        if known[begin : begin + match] == tokens[-match:]:
            drafts = known[begin + match :][:number]
            return drafts if len(drafts) >= match else []
    return []


@dataclass
class Slot:
    """The state of a request.

    Attributes:
        before_BSH: for each token of prompt and answer, the state that the head reads with it.
    """

    reference: Reference
    before_BSH: torch.Tensor
    computes_again: bool

    def answer(
        self, prompt: list[int], row: list[int], max_new_tokens: int, num_tokens: int, num_text_tokens: int
    ) -> Request:
        done, drafted, accepted = 1, 0, 0
        while done < max_new_tokens:
            tokens = prompt + row[:done]
            # The verified step also gives the token after the drafts, so the last token needs no draft.
            most = max_new_tokens - done - 1
            drafts = from_text(tokens, num_text_tokens)[:most] or self.draft(tokens, min(num_tokens, most))
            hits = 0
            while hits < len(drafts) and drafts[hits] == row[done + hits]:
                hits += 1
            drafted += len(drafts)
            accepted += hits
            done += hits + 1
            if hits < len(drafts) and self.computes_again:
                rejected, _ = self.reference.trunk_states(torch.tensor([tokens + drafts]))
                self.before_BSH[:, len(tokens) - 1] = rejected[:, -1].detach()
                done += 1
        return Request(row[:max_new_tokens], drafted, accepted)

    @torch.no_grad()
    def draft(self, tokens: list[int], num_tokens: int) -> list[int]:
        ids = list(tokens)
        read = self.before_BSH[:, : len(ids)]
        for _ in range(num_tokens):
            own, after = self.reference.head_states(0, read, torch.tensor([ids]))
            ids.append(int(self.reference.trunk.lm_head(after[0, -1]).argmax()))
            read = torch.cat((read, own[:, -1:]), dim=1)
        return ids[len(tokens) :]
