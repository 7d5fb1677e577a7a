"""Distribute the rows of --dataset over the rounds, so that no row is used twice."""

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np

from swiftlite.args.commands import SpeedupArgs
from swiftlite.data.dataset import load_prompts
from swiftlite.improve.speedup.held_out import read_rows, write_rows
from swiftlite.improve.speedup.plan import ANSWERS, ROWS


class RoundRows:
    """The rows of --dataset in the order in which rounds use them.

    The rows of each file are shuffled, and files alternate until their rows run out, so that a round has the same
    number of rows of each file. The rows of each round are stored in its directory, and stay as soon as one of them is
    answered. Files may therefore grow between two calls: the next round also uses the new rows.

    Args:
        directory: --output_dir.

    Raises:
        UserError: a file cannot be read, or a row is invalid.
    """

    def __init__(self, args: SpeedupArgs, directory: Path):
        self._directory = directory
        self._share = 0.0
        if args.dataset:
            self._share = 1 - args.self_prompts_share
        files = []
        for name in args.dataset:
            rows = load_prompts([name], seed=args.seed)
            # RandomState, because numpy guarantees its stream across versions.
            files.append([rows[place] for place in np.random.RandomState(args.seed).permutation(len(rows))])
        alternating = itertools.chain.from_iterable(itertools.zip_longest(*files))
        rows = [row.as_row() for row in alternating if row is not None]
        self._rows = {_key(row): row for row in rows}

    def of_round(self, number: int, prompts: int) -> list[Any]:
        """Return the rows of a round and store them in its directory.

        If the rows run out, the result has fewer rows than its share of the prompts, or none.

        Args:
            number: number of the round, from 1.
            prompts: number of prompts of the round.

        Raises:
            UserError: the file with the rows is damaged, or cannot be written.
        """
        if not self._share:
            return []
        path = self._directory / f"round-{number}" / ROWS
        if not (path.parent / ANSWERS).exists():  # a row may have been refused and corrected since
            path.unlink(missing_ok=True)
        if not path.exists():
            path.parent.mkdir(exist_ok=True)
            write_rows(path, self._unused()[: round(prompts * self._share)])
        return read_rows(path)

    def largest_round(self) -> int | None:
        """Return the maximum number of prompts of the next round.

        This is the number of unused rows if all prompts come from the dataset. If the model writes prompts too, the
        number is not limited, and None is returned.
        """
        if self._share < 1:
            return None
        return len(self._unused())

    def _unused(self) -> list[Any]:
        """Return the rows that no round has used."""
        used: set[str] = set()
        for path in self._directory.glob(f"round-*/{ROWS}"):
            used.update(map(_key, read_rows(path)))
        return [row for key, row in self._rows.items() if key not in used]


def _key(row: Any) -> str:
    return json.dumps(row, sort_keys=True)
