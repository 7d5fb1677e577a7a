"""Read files into encoded training and held-out samples, and count all rows: kept, bad, too long, not sampled.

The result depends only on files, options and seed, and not on ranks or the number of processes. Ranks can compare the
`digest` of their results.
"""

import operator
from collections.abc import Collection, Sequence
from dataclasses import asdict, astuple, dataclass, field
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

from swiftlite.data.encoder import Encoded, Encoder, encode_all, special_token_note
from swiftlite.data.packing.mixture import Mixture, interleave
from swiftlite.data.rows.conversation import NO_IMAGES, BadRow, Conversation, parse_row
from swiftlite.data.rows.sources import RowParser, find_rows, read_rows
from swiftlite.data.sample import Sample, digest
from swiftlite.errors import UserError
from swiftlite.log import logger

SHOWN_ROWS = 5


@dataclass
class Counts:
    """Counts of rows: `rows == kept + dropped_bad + dropped_too_long + not_sampled`."""

    rows: int = 0
    kept: int = 0
    dropped_bad: int = 0
    dropped_too_long: int = 0
    not_sampled: int = 0
    truncated: int = 0
    """Kept rows that were truncated to --max_length."""
    tokens: int = 0
    """Tokens of the kept rows."""
    trained_tokens: int = 0
    """Tokens of the kept rows that are trained (have a label)."""
    images: int = 0
    """Images of the kept rows, before truncation."""

    def __add__(self, other: "Counts") -> "Counts":
        return Counts(*map(operator.add, astuple(self), astuple(other)))

    def __str__(self) -> str:
        parts = [f"{self.kept} of {self.rows} rows kept"]
        for name in ("dropped_bad", "dropped_too_long", "not_sampled", "truncated"):
            number = getattr(self, name)
            if number:
                parts.append(f"{number} {name.replace('_', ' ')}")
        parts.append(f"{self.tokens} tokens, {self.trained_tokens} trained")
        if self.images:
            parts.append(f"{self.images} images")
        return ", ".join(parts)


@dataclass
class DataReport:
    """Counts of rows and remarks about the data, for the log and the run report."""

    files: dict[str, Counts] = field(default_factory=dict)
    """Counts by file, as the user specified it, including `#N`."""
    train_samples: int = 0
    val_samples: int = 0
    bad_rows: list[str] = field(default_factory=list)
    """`file:line: field: problem` of each bad row that was dropped because --max_bad_rows allows it."""
    notes: list[str] = field(default_factory=list)
    """Notes about options that the data could not satisfy."""

    @property
    def total(self) -> Counts:
        return sum(self.files.values(), start=Counts())

    def as_dict(self) -> dict[str, Any]:
        return {"total": asdict(self.total), **asdict(self)}

    def log(self) -> None:
        """Log one line per file, for each of the first bad rows, and for each note."""
        for spec, counts in self.files.items():
            logger.info("%s: %s", spec, counts)
        for bad in self.bad_rows[:SHOWN_ROWS]:
            logger.warning("dropped: %s", bad)
        for note in self.notes:
            logger.warning("%s", note)


@dataclass(frozen=True)
class Data:
    """Encoded samples, and counts of all rows.

    Attributes:
        train: training samples, in the order of the files.
        val: held-out samples.
        val_conversations: the turns of each held-out row; `.prompt()` is the prompt and `.answer()` the reference
            answer.
        report: counts of rows and remarks about the data.
        digest: sha256 over the training and held-out samples.
        has_images: whether any kept row has images.
    """

    train: Sequence[Sample]
    val: list[Sample]
    val_conversations: list[Conversation]
    report: DataReport
    digest: str
    has_images: bool = False


def load_train_val(
    encoder: Encoder,
    dataset: Sequence[str],
    val_dataset: Sequence[str] = (),
    *,
    split_dataset_ratio: float = 0.0,
    max_bad_rows: int = 0,
    system: str | None = None,
    num_proc: int = 1,
    seed: int = 42,
    interleave_prob: Sequence[float] = (),
    offered: Collection[str] | None = None,
) -> Data:
    """Read, encode and split the data of a run.

    Args:
        dataset: training files, `FILE` or `FILE#N` (N rows drawn at random); empty to read only held-out files.
        val_dataset: held-out files; with them no rows of `dataset` are held out.
        split_dataset_ratio: share of the kept rows of `dataset` that is held out; at least one row if there are two or
            more. 0 holds out no row.
        max_bad_rows: maximum number of bad rows over all files; bad rows are dropped.
        system: system prompt for rows without one.
        num_proc: number of processes that tokenize; does not change the result.
        seed: seed for the sample of `#N`, for the held-out rows, and for `interleave_prob`.
        interleave_prob: weight of each file of `dataset`; empty: all rows of all files. Held-out rows are not affected.
        offered: names of the command's options; errors only name these options. Default: the options of `megatron sft`.

    Raises:
        UserError: a file cannot be read, there are more bad rows than allowed, or no row is left.
    """
    report = DataReport()
    train_rows = _read(dataset, report, system, seed, parse=encoder.parse)
    val_rows = _read(val_dataset, report, system, seed, parse=encoder.parse)
    conversations = train_rows.conversations + val_rows.conversations
    encoded = list(encode_all(encoder, conversations, num_proc))
    bad_rows = train_rows.bad_rows + val_rows.bad_rows + [row.bad for row in encoded if row.bad]
    some_are_good = any(row.bad is None for row in encoded)  # otherwise the error is that no row is left
    _check_bad_rows(bad_rows, max_bad_rows, some_are_good and _is_offered("max_bad_rows", offered))
    report.bad_rows = [str(bad) for bad in bad_rows]
    if encoder.truncation_strategy == "error":
        _check_lengths(encoded, encoder.max_length)

    report.notes += _special_token_notes(encoded)
    train_encoded = encoded[: len(train_rows.conversations)]
    val_encoded = encoded[len(train_rows.conversations) :]
    train = []
    if dataset:
        train = _kept(train_rows, train_encoded, "--dataset", encoder, offered)
    if val_dataset:
        val_flag = "--val_dataset" if _is_offered("val_dataset", offered) else "--dataset"
        val = _kept(val_rows, val_encoded, val_flag, encoder, offered)
    else:
        train, val = _hold_out(train, split_dataset_ratio, seed, report)

    left_out: set[int] = set()
    if interleave_prob:
        drawn = _draw(train, dataset, Mixture(interleave_prob, seed))
        left_out = {row.number for row in train} - {row.number for row in drawn}
        train = drawn
    _count_rows(train_rows.specs + val_rows.specs, conversations, encoded, left_out, report)
    return _build_data(train, val, report)


def _is_offered(option: str, offered: Collection[str] | None) -> bool:
    return offered is None or option in offered


def load_prompts(
    files: Sequence[str],
    *,
    system: str | None = None,
    seed: int = 42,
    max_bad_rows: int | None = None,
    no_images: str | None = NO_IMAGES,
) -> list[Conversation]:
    """Read conversations to be completed by a model, from rows with or without an answer.

    `.prompt()` of a conversation omits the last assistant turn, and `.answer()` is the text of this turn.

    Args:
        max_bad_rows: maximum number of bad rows, which are dropped and logged. None: no bad row is allowed, because the
            command has no option for it.
        no_images: why rows with images are refused; None accepts them.

    Raises:
        UserError: a file cannot be read, or there are more bad rows than allowed.
    """
    rows = _read(files, DataReport(), system, seed, parse=partial(parse_row, needs_answer=False, no_images=no_images))
    can_be_left_out = max_bad_rows is not None and len(rows.conversations) > 0
    _check_bad_rows(rows.bad_rows, max_bad_rows or 0, can_be_left_out)
    for bad in rows.bad_rows:
        logger.warning("left out: %s", bad)
    return rows.conversations


def split(num_samples: int, ratio: float, seed: int) -> np.ndarray:
    """Return the sorted indices of the held-out samples: about `ratio` of them, at least one and never all.

    No sample is held out if `ratio` is 0 or there is only one sample.

    Args:
        ratio: share of the samples to hold out, at least 0 and below 1.
    """
    if ratio == 0 or num_samples < 2:
        return np.empty(0, np.int64)
    number = min(max(1, round(num_samples * ratio)), num_samples - 1)
    # RandomState: its stream never changes, so a resumed run holds out the same rows under any numpy.
    return np.sort(np.random.RandomState(seed).permutation(num_samples)[:number])


@dataclass
class _Rows:
    specs: list[str] = field(default_factory=list)  # the file of each conversation
    conversations: list[Conversation] = field(default_factory=list)
    bad_rows: list[BadRow] = field(default_factory=list)


def _read(
    specs: Sequence[str],
    report: DataReport,
    system: str | None,
    seed: int,
    parse: RowParser,
) -> _Rows:
    rows = _Rows()
    files = [(spec, find_rows(spec)) for spec in specs]  # reports a missing last file before the first one is read
    for spec, file in files:
        read = read_rows(file, system=system, parse=parse, seed=seed)
        rows.specs += [spec] * len(read.conversations)
        rows.conversations += read.conversations
        rows.bad_rows += read.bad_rows
        counts = report.files.setdefault(spec, Counts())  # one entry for a file that is given twice
        counts.rows += read.num_rows
        counts.dropped_bad += len(read.bad_rows)
        counts.not_sampled += read.num_not_sampled
        if read.note:
            report.notes.append(read.note)
    return rows


def _count_rows(
    specs: Sequence[str],
    conversations: Sequence[Conversation],
    encoded: Sequence[Encoded],
    left_out: set[int],
    report: DataReport,
) -> None:
    for number, (spec, conversation, row) in enumerate(zip(specs, conversations, encoded, strict=True)):
        counts = report.files[spec]
        if number in left_out:
            counts.not_sampled += 1
            continue
        _count(row, counts)
        if row.samples:
            counts.images += len(conversation.images)


def _count(row: Encoded, counts: Counts) -> None:
    """Add an encoded row to its file's counts; `rows` already includes it."""
    if row.bad is not None:
        counts.dropped_bad += 1
    elif not row.samples:
        counts.dropped_too_long += 1
    else:
        counts.kept += 1
        answers = list(chain.from_iterable(sample.sequences for sample in row.samples))
        counts.truncated += len(row.samples) == 1 and max(map(len, answers)) + row.reserved < row.length
        counts.tokens += sum(map(len, answers))
        counts.trained_tokens += sum(answer.num_trained_tokens for answer in answers)


def _special_token_notes(encoded: Sequence[Encoded]) -> list[str]:
    named = [row for row in encoded if row.special_token]
    if not named:
        return []
    return [f"rows with special tokens in their text: {len(named)}; {special_token_note(named[0])}"]


def _check_bad_rows(bad_rows: list[BadRow], max_bad_rows: int, can_be_left_out: bool = True) -> None:
    if len(bad_rows) <= max_bad_rows:
        return
    first = bad_rows[0]
    hints = [first.hint] if first.hint else []
    if can_be_left_out:
        hints.append(f"use --max_bad_rows {len(bad_rows)} to skip bad rows")
    hint = "\n    ".join(hints) or "correct these rows"
    if len(bad_rows) == 1:
        raise UserError(str(first), hint)
    title = f"{len(bad_rows)} bad rows"
    if can_be_left_out:
        title += f", --max_bad_rows {max_bad_rows}"
    lines = [title]
    lines += [f"  {bad}" for bad in bad_rows[:SHOWN_ROWS]]
    if len(bad_rows) > SHOWN_ROWS:
        lines.append(f"  and {len(bad_rows) - SHOWN_ROWS} more")
    raise UserError("\n".join(lines), hint)


def _check_lengths(encoded: list[Encoded], max_length: int) -> None:
    long = [row for row in encoded if row.length > max_length]
    if not long:
        return
    raise UserError(
        f"{long[0].source} has {long[0].length} tokens, over --max_length {max_length}; rows over it: {len(long)}",
        f"use --max_length {max(row.length for row in long)}, or --truncation_strategy delete, left or right",
    )


class _Kept(NamedTuple):
    """A kept row and its samples."""

    number: int  # index among training rows, or among held-out rows
    spec: str
    conversation: Conversation
    samples: tuple[Sample, ...]


def _kept(
    rows: _Rows, encoded: list[Encoded], flag: str, encoder: Encoder, offered: Collection[str] | None
) -> list[_Kept]:
    """Return the kept rows; raise UserError if no row is kept."""
    kept = []
    for number, (spec, conversation, row) in enumerate(zip(rows.specs, rows.conversations, encoded, strict=True)):
        if row.samples:
            kept.append(_Kept(number, spec, conversation, row.samples))
    if kept:
        return kept
    lengths = [row.length for row in encoded if row.bad is None]
    if not lengths:
        raise UserError(f"{flag}: all rows are bad", "use --max_bad_rows 0 to see why")
    max_length = encoder.max_length
    if encoder.truncation_strategy == "delete":
        shortest = min(lengths)
        hint = f"use --max_length {shortest} or more"
        if _is_offered("truncation_strategy", offered):
            hint += ", or --truncation_strategy right"
        problem = f"all {len(lengths)} rows are over --max_length {max_length}; the shortest has {shortest} tokens"
        raise UserError(f"{flag}: {problem}", hint)
    cut, hint = f"--max_length {max_length}", "use a larger --max_length"
    if _is_offered("truncation_strategy", offered):
        hint += ", or another --truncation_strategy"
    elif not _is_offered("max_length", offered):
        cut, hint = f"{max_length} tokens", "use rows with shorter questions"
    raise UserError(f"{flag}: truncated to {cut}, none of {len(lengths)} rows has a token to train on", hint)


def _hold_out(rows: list[_Kept], ratio: float, seed: int, report: DataReport) -> tuple[list[_Kept], list[_Kept]]:
    """Split the rows into training rows and held-out rows."""
    held_out = split(len(rows), ratio, seed)
    if ratio > 0 and not len(held_out):
        report.notes.append("--split_dataset_ratio: there is only one row; none is held out for evaluation")
    train = [rows[index] for index in np.delete(np.arange(len(rows)), held_out)]
    return train, [rows[index] for index in held_out]


def _build_data(train: Sequence[_Kept], val: Sequence[_Kept], report: DataReport) -> Data:
    """Create `Data` from training rows and held-out rows, and log the report."""
    samples = list(chain.from_iterable(row.samples for row in train))
    val_samples = list(chain.from_iterable(row.samples for row in val))
    report.train_samples = len(samples)
    report.val_samples = len(val_samples)
    report.log()
    val_conversations = [row.conversation for row in val]
    has_images = any(row.conversation.images for row in chain(train, val))
    return Data(samples, val_samples, val_conversations, report, digest([*samples, *val_samples]), has_images)


def _draw(rows: Sequence[_Kept], files: Sequence[str], mixture: Mixture) -> list[_Kept]:
    """Return the rows that the mixture draws from the files, in the order of drawing."""
    by_file: dict[str, list[_Kept]] = {file: [] for file in files}
    for row in rows:
        by_file[row.spec].append(row)
    taken = interleave([len(by_file[file]) for file in files], mixture)
    if not taken:
        empty = files[mixture.part(0)]
        raise UserError(f"--interleave_prob: {empty} has no row to train on", "add rows to it, or remove it")
    return [by_file[files[part]][place] for part, place in taken]
