"""Compute how many draft tokens an engine would accept, from one pass over a greedy continuation.

Greedy verification accepts a draft token if it equals the trunk's next token. An engine drafts after accepted tokens,
which are the tokens of the trunk's greedy continuation. One pass over this continuation therefore computes every draft
token that the engine would draft. Going through the row step by step gives the counts of the engine without running it.
"""

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from itertools import zip_longest
from typing import NamedTuple

import torch


@dataclass(frozen=True)
class SourceCounts:
    """Counts of the steps whose drafts came from the text (n-grams) instead of the heads."""

    drafts: int = 0
    drafted: int = 0
    accepted: int = 0

    def __add__(self, other: "SourceCounts") -> "SourceCounts":
        return SourceCounts(self.drafts + other.drafts, self.drafted + other.drafted, self.accepted + other.accepted)

    def __neg__(self) -> "SourceCounts":
        return SourceCounts(-self.drafts, -self.drafted, -self.accepted)


@dataclass(frozen=True)
class DraftCounts:
    """Counts of speculative decoding: steps, draft tokens, and accepted tokens at each draft position.

    Attributes:
        accepted_per_position: 0 at further positions.
        ngram: the part of them that n-grams drafted, if the engine reports it.
    """

    drafts: int
    drafted: int
    accepted_per_position: tuple[int, ...]
    ngram: SourceCounts = SourceCounts()

    @property
    def accepted(self) -> int:
        return sum(self.accepted_per_position)

    def __add__(self, other: "DraftCounts") -> "DraftCounts":
        pairs = zip_longest(self.accepted_per_position, other.accepted_per_position, fillvalue=0)
        return DraftCounts(
            self.drafts + other.drafts,
            self.drafted + other.drafted,
            tuple(mine + its for mine, its in pairs),
            self.ngram + other.ngram,
        )

    def since(self, before: "DraftCounts") -> "DraftCounts":
        """Return these counts minus the earlier counts `before`."""
        accepted = tuple(-number for number in before.accepted_per_position)
        return self + DraftCounts(-before.drafts, -before.drafted, accepted, -before.ngram)

    def to_json(self) -> dict[str, object]:
        """Return the counts in the format of acceptance.json; rates are 0 if no token was drafted."""
        steps = max(self.drafts, 1)
        counts: dict[str, object] = {
            "drafts": self.drafts,
            "drafted": self.drafted,
            "accepted": self.accepted,
            "acceptance_rate": self.accepted / max(self.drafted, 1),
            "acceptance_per_position": [count / steps for count in self.accepted_per_position],
            "mean_accepted_length": 1 + self.accepted / steps,
        }
        if self.ngram.drafts:
            counts["ngram"] = asdict(self.ngram)
        return counts


class DraftStep(NamedTuple):
    """One step of an engine over a row.

    Attributes:
        place: index in the row of the token for which the first draft token is drafted.
        drafts: draft tokens of this step up to the first rejected token. Later draft tokens are unknown.
        accepted: number of draft tokens that equal the actual tokens.
    """

    place: int
    drafts: list[int]
    accepted: int


def draft_steps(drafts_KS: torch.Tensor, tokens_S: torch.Tensor, first: int) -> Iterator[DraftStep]:
    """Yield the steps of an engine over one greedy row.

    Args:
        drafts_KS: drafts_KS[k, s] is the prediction of depth k + 1 at position s, for the token at s + k + 2.
        tokens_S: prompt and greedy continuation.
        first: index of the first generated token. It is generated from the prompt, without a draft.
    """
    heads = drafts_KS.tolist()
    tokens = tokens_S.tolist()
    newest = first  # index of the engine's newest token
    while newest + 1 < len(tokens):
        place = newest + 1
        # The inputs of the heads are the trunk's state before the newest token, and the newest token.
        drafted = [head[newest - 1] for head in heads]
        coming = tokens[place : place + len(heads)]
        accepted = 0
        while accepted < len(coming) and drafted[accepted] == coming[accepted]:
            accepted += 1
        yield DraftStep(place, drafted[: min(accepted + 1, len(coming))], accepted)
        newest = place + accepted


def count_steps(steps: Iterable[DraftStep], depth: int) -> DraftCounts:
    """Return the counts of an engine that drafts `depth` tokens in each of these steps."""
    accepted = [0] * depth
    num_steps = 0
    for step in steps:
        num_steps += 1
        for position in range(step.accepted):
            accepted[position] += 1
    return DraftCounts(num_steps, num_steps * depth, tuple(accepted))


def replay(agrees_KS: torch.Tensor, counted_KS: torch.Tensor) -> DraftCounts:
    """Count the steps of an engine that generates the given rows and accepts drafts that equal the trunk's prediction.

    If the trunk generated the answers of the rows greedily, these are exactly the counts of an engine that generates
    them.

    Args:
        agrees_KS: agrees_KS[k, s] is whether depth k + 1 and the trunk predict the same token at s + k + 2.
        counted_KS: whether the token at s + k + 2 is a label; consecutive labels are an answer.
    """
    depth, length = agrees_KS.shape
    kept_KS = (agrees_KS & counted_KS).tolist()
    accepted, steps = [0] * depth, 0
    counted = [False, *counted_KS[0].tolist(), False]
    for begin in (s for s in range(length) if counted[s + 1] and not counted[s]):
        end = counted.index(False, begin + 1) - 1
        position = begin + 1  # the first token of an answer follows from the prompt without a draft
        while position < end:
            steps += 1
            hits = 0
            while hits < depth and kept_KS[hits][position]:
                accepted[hits] += 1
                hits += 1
            position += hits + 1
    return DraftCounts(steps, steps * depth, tuple(accepted))
