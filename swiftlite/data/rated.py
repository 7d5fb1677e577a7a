"""One row with one answer that is good or bad, and each answer set behind another row's question.

Formats: any of `conversation.py` with `label` beside it, as in ms-swift; `prompt` and `completion`, texts or lists of
messages, with `label`, as in TRL.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from swiftlite.args.fields import TruncationStrategy
from swiftlite.data.conversation import Conversation, RowError, parse_row
from swiftlite.data.pair import SHARED
from swiftlite.data.sample import IGNORED, Sample, make_sample, truncate
from swiftlite.errors import UserError

FORMATS = '{"query": "...", "response": "...", "label": true}, or prompt, completion and label'


def parse_rated(row: object, *, system: str | None = None, source: str = "") -> Conversation:
    """The conversation that ends with the answer; `desirable` is its label.

    Args:
        row, system, source: as for `parse_row`.

    Raises:
        RowError: naming the field.
    """
    if not isinstance(row, dict):
        return parse_row(row, system=system, source=source)  # which says what it is
    for name in ("chosen", "rejected", "rejected_response", "rejected_messages"):
        if row.get(name):
            raise RowError(
                name, "makes this row a pair", f"--loss_type sigmoid learns from pairs; here rows are {FORMATS}"
            )
    label = row.get("label")
    if not isinstance(label, bool):
        problem = "is missing" if label is None else f"is {str(label)[:50]!r}, neither true nor false"
        raise RowError("label", problem, f"rows are {FORMATS}")
    rest = {name: value for name, value in row.items() if name != "label"}
    if "completion" in rest:
        rest = _from_completion(rest)
    conversation = parse_row(rest, system=system, source=source)
    return replace(conversation.with_last_turn_alone(), desirable=label)


def _from_completion(row: dict[str, Any]) -> dict[str, Any]:
    """The row as `parse_row` knows it, of a row as TRL has it."""
    prompt, completion = row.get("prompt"), row["completion"]
    shared = {name: row[name] for name in SHARED if row.get(name)}
    for name, value in (("prompt", prompt), ("completion", completion)):
        if not value or not isinstance(value, str | list):
            raise RowError(name, "is missing, or neither a text nor a list of messages", f"rows are {FORMATS}")
    if isinstance(prompt, str) and isinstance(completion, str):
        return {"query": prompt, "response": completion, **shared}
    before = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    answer = [{"role": "assistant", "content": completion}] if isinstance(completion, str) else completion
    assert isinstance(before, list)
    return {"messages": [*before, *answer], **shared}


def mismatch(samples: Sequence[Sample], max_length: int, strategy: TruncationStrategy) -> list[Sample]:
    """The samples, each with its question before the answer of the sample in front of it, the last one's for the first.

    TRL's KTOTrainer takes the same, of the rows of a batch. An answer to the same question would be no mismatch: there
    the one in front of that is taken, and so on.

    Args:
        max_length: of the result, in tokens.
        strategy: `left` cuts its beginning, all else its end.

    Raises:
        UserError: there are no two questions.
    """
    questions = [_question_of(sample).tobytes() for sample in samples]
    if len(set(questions)) < 2:
        raise UserError(
            "--loss_type kto compares with answers to other questions, and all rows have the same one",
            "give more rows, with --dataset or --val_dataset",
        )
    found = []
    for number, sample in enumerate(samples):
        other = number - 1
        while questions[other] == questions[number]:
            other -= 1
        joined = _join(sample, samples[other])
        found.append(
            replace(sample, mismatched=truncate(joined, max_length, "left" if strategy == "left" else "right"))
        )
    return found


def _start_of_answer(sample: Sample) -> int:
    return int(np.argmax(sample.labels != IGNORED))


def _question_of(sample: Sample) -> np.ndarray:
    return sample.input_ids[: _start_of_answer(sample)]


def _join(asked: Sample, answered: Sample) -> Sample:
    """The question of one sample before the answer of the other."""
    end, start = _start_of_answer(asked), _start_of_answer(answered)
    ids = np.concatenate([asked.input_ids[:end], answered.input_ids[start:]])
    weights = np.concatenate([asked.loss_scale[:end], answered.loss_scale[start:]])
    return make_sample(ids, weights, asked.source, asked.channel)
