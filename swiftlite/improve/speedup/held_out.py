"""Divide the answers of a round into rows for training and held-out rows."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from swiftlite.base.errors import UserError
from swiftlite.base.log import logger
from swiftlite.data.near_duplicates import resembling
from swiftlite.data.user_turn import CHANNEL
from swiftlite.improve.resumable import write_result

NUM_HELD_OUT = 48
MIN_HELD_OUT = 16
"""Minimum number of held-out rows. `bench` sends up to this number of concurrent requests, each with a different
held-out prompt."""
MIN_ROWS = 3 * MIN_HELD_OUT


def divide(rows: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """Return the rows for training and the held-out rows, which are spread evenly over all rows.

    A tenth of the rows is held out, but at least MIN_HELD_OUT and at most NUM_HELD_OUT rows: with few answers, heads
    improve more by another training row than the measurement by another held-out row.

    Raises:
        UserError: there are too few rows.
    """
    number = min(max(MIN_HELD_OUT, len(rows) // 10), NUM_HELD_OUT)
    if len(rows) < MIN_ROWS:
        problem = f"only {len(rows)} answers are usable, at least {MIN_ROWS} are required"
        hint = "with another --output_dir, give more prompts with --dataset, or use an instruct model"
        raise UserError(problem, hint)
    chosen = {place * len(rows) // number for place in range(number)}
    training = [row for place, row in enumerate(rows) if place not in chosen]
    return training, [rows[place] for place in sorted(chosen)]


def without_similar(rows: Sequence[Any], held_out: Sequence[Any]) -> list[Any]:
    """Return the rows whose first question differs from the first question of every held-out row.

    Questions that the model wrote must also not resemble a held-out question. Questions in rows of a dataset may
    resemble one, because such rows often share an instruction.

    Raises:
        UserError: no row is left.
    """
    of_held_out = [_question(row) for row in held_out]
    questions = [_question(row) for row in rows]
    similar = resembling(questions, of_held_out)
    different = []
    for place, row in enumerate(rows):
        is_own = row.get("channel") == CHANNEL
        if questions[place] not in of_held_out and not (is_own and place in similar):
            different.append(row)
    if len(different) < len(rows):
        logger.info(
            "%d of %d rows are too similar to held-out ones and not trained", len(rows) - len(different), len(rows)
        )
    if not different:
        raise UserError("every row is too similar to a held-out one", "give other prompts with --dataset")
    return different


def read_rows(path: Path) -> list[Any]:
    """Return the rows of a file that swiftlite wrote.

    Raises:
        UserError: the file is missing or damaged.
    """
    try:
        # Not splitlines(): a text may contain other line separators, such as U+2028.
        with path.open(encoding="utf-8") as file:
            return [json.loads(line) for line in file]
    except (OSError, ValueError):
        raise UserError(f"{path} is damaged", "delete it and run the same command again") from None


def write_rows(path: Path, rows: Sequence[Any]) -> None:
    write_result(path, b"".join(json.dumps(row).encode() + b"\n" for row in rows))


def _question(row: Any) -> str:
    return next(message["content"] for message in row["messages"] if message["role"] == "user")
