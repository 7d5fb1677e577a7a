"""Write the answers as rows for `sft`, mixed with original rows of the dataset."""

from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import numpy as np

from swiftlite.base.log import logger
from swiftlite.data.rows.conversation import Conversation
from swiftlite.improve.regenerate.dialogue import Dialogues, prompt_after

NumberedRow = tuple[int, dict[str, Any]]
"""The number of a row in --dataset, and a row made from it."""


@dataclass(frozen=True)
class DatasetRows:
    """The rows of dataset.jsonl.

    Attributes:
        regenerated: rows with the model's answers, each with the number of its original row.
        gold: original rows of the dataset.
        num_equal: number of conversations that were removed because an earlier conversation has the same answers.
    """

    regenerated: list[NumberedRow]
    gold: list[NumberedRow]
    num_equal: int

    @property
    def in_order(self) -> list[dict[str, Any]]:
        """All rows in the order of --dataset; a gold row precedes the answers to its prompt."""
        return [row for _, row in sorted([*self.gold, *self.regenerated], key=itemgetter(0))]


def make_rows(dialogues: Dialogues, gold: Sequence[NumberedRow], gold_fraction: float, seed: int) -> DatasetRows:
    """Return the rows of all conversations together with original (gold) rows.

    The gold rows are the share `gold_fraction` of all returned rows, or less if there are too few of them.

    Args:
        gold: the original rows from which the returned ones are drawn at random.
        seed: seed of the draw.
    """
    regenerated = _regenerated_rows(dialogues)
    num_conversations = sum(bool(dialogues.kept(*each)) for each in dialogues)
    number = round(len(regenerated) * gold_fraction / (1 - gold_fraction))
    if number > len(gold):
        logger.warning(
            "--gold_fraction %s requires %d original rows, --dataset has %d: using all",
            gold_fraction,
            number,
            len(gold),
        )
    # RandomState, because numpy guarantees its stream across versions.
    order = np.random.RandomState(seed).permutation(len(gold))[:number]
    return DatasetRows(regenerated, [gold[place] for place in order], num_conversations - len(regenerated))


def gold_rows(chats: Sequence[Conversation]) -> list[NumberedRow]:
    """Return the original rows that have an answer."""
    rows = []
    for number, chat in enumerate(chats):
        if chat.answer() is not None:
            rows.append((number, chat.as_row() | {"source": chat.source, "kind": "gold"}))
    return rows


def _regenerated_rows(dialogues: Dialogues) -> list[NumberedRow]:
    rows: dict[tuple[int, tuple[str, ...]], NumberedRow] = {}
    for number, answer in dialogues:
        kept = dialogues.kept(number, answer)
        if not kept:
            continue
        chat = dialogues.chats[number]
        said = dialogues.turns_so_far(number, answer)[: len(kept)]
        row = prompt_after(chat, kept[:-1]).with_answer(kept[-1]).as_row() | {
            "source": chat.source,
            "kind": "regenerated",
            "answer": answer + 1,
            "finish_reasons": [each.finish_reason for each in said],
            "completion_tokens": [each.completion_tokens for each in said],
        }
        rows.setdefault((number, tuple(kept)), (number, row))
    return list(rows.values())
