"""Distribute the rows of --dataset over the rounds, so that no row is used twice."""

import itertools
from collections.abc import Sequence

import numpy as np

from swiftlite.args.commands import SpeedupArgs
from swiftlite.data.dataset import load_prompts
from swiftlite.data.rows.conversation import Conversation


class DatasetRows:
    """The rows of --dataset in the order in which rounds use them.

    The rows of each file are shuffled, and files alternate until their rows run out, so that a round has the same
    number of rows of each file.

    Raises:
        UserError: a file cannot be read, or a row is invalid.
    """

    def __init__(self, args: SpeedupArgs):
        self._share = 0.0
        if args.dataset:
            self._share = 1 - args.self_prompts_share
        files = []
        for name in args.dataset:
            rows = load_prompts([name], seed=args.seed)
            # RandomState, because numpy guarantees its stream across versions.
            files.append([rows[place] for place in np.random.RandomState(args.seed).permutation(len(rows))])
        alternating = itertools.chain.from_iterable(itertools.zip_longest(*files))
        self._rows = [row for row in alternating if row is not None]

    def of_round(self, rounds: Sequence[int]) -> list[Conversation]:
        """Return the dataset rows for the last round in `rounds`.

        If the rows run out, the result has fewer rows or none.

        Args:
            rounds: number of prompts of each round so far, including the last one.
        """
        counts = [round(prompts * self._share) for prompts in rounds]
        start = sum(counts[:-1])
        return self._rows[start : start + counts[-1]]

    def largest_round(self, rounds: Sequence[int]) -> int | None:
        """Return the maximum number of prompts of the next round.

        This is the number of remaining dataset rows if all prompts come from the dataset. If the model writes prompts
        too, the number is not limited, and None is returned.

        Args:
            rounds: number of prompts of each previous round.
        """
        if self._share < 1:
            return None
        return max(0, len(self._rows) - sum(rounds))
