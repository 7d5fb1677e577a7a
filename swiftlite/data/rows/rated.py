"""Parse rows with one answer and a label (good or bad), and pair each prompt with the answer of another row.

The format of ms-swift is any format of `conversation.py` with the additional field `label`. The format of TRL has the
fields `prompt`, `completion` and `label`; the first two are texts or lists of messages.
"""

from collections.abc import Hashable, Sequence
from dataclasses import replace
from hashlib import sha256
from itertools import chain
from typing import Any

import numpy as np

from swiftlite.args.data_fields import TruncationStrategy
from swiftlite.base.errors import UserError
from swiftlite.data.changed_samples import ChangedSamples
from swiftlite.data.image_inputs import image_identity, with_images_of
from swiftlite.data.rows.conversation import NO_IMAGES, Conversation, RowError, parse_row, shown
from swiftlite.data.rows.pair import SHARED, check_answer_is_text
from swiftlite.data.sample import IGNORED, Sample, make_sample, truncate

FORMATS = '{"query": "...", "response": "...", "label": true}, or prompt, completion and label'


def parse_rated(
    row: object, *, system: str | None = None, source: str = "", no_images: str | None = NO_IMAGES
) -> Conversation:
    """Return the conversation that ends with the answer.

    The label is stored in `trains_heads`, because heads are trained only on good answers.

    Args:
        row: a JSON object or table row in one of the formats in the module docstring.
        system: system prompt for rows without one.
        source: `file:line`, stored in the result.
        no_images: why rows with images are refused; None accepts them.

    Raises:
        RowError: a field is invalid, or the answer has an image.
    """
    if not isinstance(row, dict):
        return parse_row(row, system=system, source=source, no_images=no_images)  # its error names the missing turns
    for name in ("chosen", "rejected", "rejected_response", "rejected_messages"):
        if row.get(name):
            raise RowError(name, "makes this row a pair", f"use --loss_type sigmoid for pairs; here rows are {FORMATS}")
    label = _label_of(row.get("label"))
    rest = {name: value for name, value in row.items() if name != "label"}
    if "completion" in rest:
        rest = _from_completion(rest)
    conversation = parse_row(rest, system=system, source=source, no_images=no_images)
    check_answer_is_text(conversation, "completion" if "completion" in row else "response")
    return replace(conversation.with_last_turn_alone(), trains_heads=label)


def _label_of(value: object) -> bool:
    """Return the label as a bool.

    In text tables such as .csv, a label is a word, with which pandas writes "True" or "False".
    """
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.strip().lower() in ("true", "false"):
        return value.strip().lower() == "true"
    problem = f"is {shown(value)}, not true or false"
    if value is None or value == "":
        problem = "is missing"
    raise RowError("label", problem, f"rows are {FORMATS}")


def _from_completion(row: dict[str, Any]) -> dict[str, Any]:
    """Convert a row in the format of TRL (`prompt`, `completion`) to a row that `parse_row` accepts."""
    prompt, completion = row.get("prompt"), row["completion"]
    shared = {name: row[name] for name in SHARED if row.get(name)}
    for name, value in (("prompt", prompt), ("completion", completion)):
        if not value or not isinstance(value, str | list):
            raise RowError(name, "is missing, or neither a text nor a list of messages", f"rows are {FORMATS}")
    if isinstance(prompt, str) and isinstance(completion, str):
        return {"query": prompt, "response": completion, **shared}
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    if isinstance(completion, str):
        completion = [{"role": "assistant", "content": completion}]
    assert isinstance(prompt, list)
    assert isinstance(completion, list)
    return {"messages": [*prompt, *completion], **shared}


def mismatch(samples: Sequence[Sample], max_length: int, strategy: TruncationStrategy, seed: int) -> ChangedSamples:
    """Return the samples, each with a companion. It consists of the prompt of the sample and the answer of another
    sample.

    The pairing is drawn at random with the seed. Using the next row instead would pair every good answer with a bad one
    in files that alternate between good and bad answers.

    Args:
        max_length: maximum length of the companion in tokens.
        strategy: `left` truncates the start of the companion, any other value its end. The end is also truncated if
            the companion has images, because the start could cut one.

    Raises:
        UserError: all samples have the same prompt.
    """
    questions = [_question_of(sample) for sample in samples]
    if len(set(questions)) < 2:
        raise UserError(
            "--loss_type kto requires rows with different questions; all rows have the same one",
            "add rows with --dataset or --val_dataset",
        )
    partners = others(questions, seed)

    def with_companion(number: int, sample: Sample) -> Sample:
        end = "left" if strategy == "left" and not image_identity(sample) else "right"
        mismatched = truncate(_join(sample, samples[partners[number]]), max_length, end)
        mismatched = with_images_of(mismatched, sample)
        companion = replace(mismatched, trains_heads=False)
        return replace(sample, companion=companion)

    return ChangedSamples(samples, with_companion)


def others(questions: Sequence[Hashable], seed: int) -> np.ndarray:
    """Return for each row the index of a row with another question, drawn at random with the seed.

    Rows are listed group by group, where a group has the same question. The largest group is first; the order is
    otherwise random. Each row gets the row that is later in this list by the size of the largest group, so that no row
    gets a row of its own group and each row is used once. If one question has more than half of the rows, some rows of
    other questions are used several times.

    Example: questions `a a b c`, drawn in the order `1 0 3 2`: the groups are `1 0`, `3`, `2`, the largest has 2 rows,
    so rows 1, 0, 3, 2 get rows 3, 2, 1, 0.

    Args:
        questions: question of each row; at least two must differ.
    """
    # RandomState, because numpy guarantees its stream across versions, so a resumed run pairs the same rows.
    groups: dict[Hashable, list[int]] = {}
    for row in np.random.RandomState(seed).permutation(len(questions)).tolist():
        groups.setdefault(questions[row], []).append(row)
    largest = max(groups, key=lambda question: len(groups[question]))
    rows = np.array([*groups.pop(largest), *chain.from_iterable(groups.values())])
    num_largest = len(rows) - sum(map(len, groups.values()))
    num_rest = len(rows) - num_largest
    places = np.arange(len(rows))
    if num_largest <= num_rest:
        partners = (places + num_largest) % len(rows)
    else:
        partners = np.where(places < num_largest, num_largest + places % num_rest, places - num_largest)
    found = np.empty(len(rows), np.int64)
    found[rows] = rows[partners]
    return found


def _start_of_answer(sample: Sample) -> int:
    return int(np.argmax(sample.labels != IGNORED))


def _question_of(sample: Sample) -> bytes:
    """Return a hash that is equal for samples with the same question: its tokens and its images."""
    tokens = sample.input_ids[: _start_of_answer(sample)].tobytes()
    return sha256(len(tokens).to_bytes(8, "little") + tokens + image_identity(sample)).digest()


def _join(asked: Sample, answered: Sample) -> Sample:
    """Join the question of the sample `asked` with the answer of the sample `answered`."""
    end, start = _start_of_answer(asked), _start_of_answer(answered)
    ids = np.concatenate([asked.input_ids[:end], answered.input_ids[start:]])
    weights = np.concatenate([asked.loss_scale[:end], answered.loss_scale[start:]])
    return make_sample(ids, weights, asked.source, asked.channel)
