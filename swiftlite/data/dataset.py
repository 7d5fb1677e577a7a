"""Read files into encoded training and held-out samples, and count all rows: kept, bad, too long, not sampled.

The result depends only on files, options and seed, and not on ranks or the number of processes. Ranks can compare the
`digest` of their results.
"""

import operator
from collections.abc import Collection, Sequence
from dataclasses import asdict, astuple, dataclass, field
from functools import partial
from itertools import chain
from typing import Any, overload

import numpy as np

from swiftlite.args.data_file import prepared_files
from swiftlite.base.errors import UserError
from swiftlite.base.log import logger
from swiftlite.data.encoded_rows import EncodedRows, Part, digest_of, encode_file
from swiftlite.data.encoder import Encoder, EncoderPool, special_token_note
from swiftlite.data.packing.mixture import Mixture, interleave
from swiftlite.data.row_cache import RowCache
from swiftlite.data.rows.conversation import NO_IMAGES, BadRow, Conversation, parse_row
from swiftlite.data.rows.hub_rows import HubRows
from swiftlite.data.rows.sources import DataFile, RowParser, conversations_at, find_rows, read_rows, sample_note
from swiftlite.data.sample import Sample

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


class HeldOutConversations(Sequence[Conversation]):
    """The conversations of held-out rows, read from their files again; a slice reads only its own rows.

    Args:
        rows: all rows.
        chosen: numbers of the held-out rows.
        system, parse: the arguments with which the rows were read.
    """

    def __init__(self, rows: EncodedRows, chosen: np.ndarray, system: str | None, parse: RowParser):
        self._rows = rows
        self._chosen = chosen
        self._system = system
        self._parse = parse
        self._read: list[Conversation] | None = None

    def __len__(self) -> int:
        return len(self._chosen)

    @overload
    def __getitem__(self, index: int) -> Conversation: ...
    @overload
    def __getitem__(self, index: slice) -> list[Conversation]: ...
    def __getitem__(self, index: int | slice) -> Conversation | list[Conversation]:
        if isinstance(index, slice) and self._read is None:
            return self._at(self._chosen[index])
        if self._read is None:
            self._read = self._at(self._chosen)
        return self._read[index]

    def _at(self, chosen: np.ndarray) -> list[Conversation]:
        rows = self._rows
        found: dict[tuple[int, int], Conversation] = {}
        for number in np.unique(rows.file_R[chosen]).tolist():
            wanted = rows.number_R[chosen][rows.file_R[chosen] == number].tolist()
            read = conversations_at(rows.files[number], wanted, system=self._system, parse=self._parse)
            found |= {(number, place): conversation for place, conversation in read.items()}
        places = zip(rows.file_R[chosen].tolist(), rows.number_R[chosen].tolist(), strict=True)
        return [found[place] for place in places]


@dataclass(frozen=True)
class Data:
    """Encoded samples, and counts of all rows.

    Attributes:
        train: training samples, in the order of the files.
        val: held-out samples.
        val_conversations: the turns of each held-out row, which are read from the files when they are needed;
            `.prompt()` is the prompt and `.answer()` the reference answer.
        report: counts of rows and remarks about the data.
        digest: sha256 over the training and held-out samples.
        has_images: whether any kept row has images.
    """

    train: Sequence[Sample]
    val: Sequence[Sample]
    val_conversations: Sequence[Conversation]
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
    cache: RowCache | None = None,
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
        cache: stores encoded rows in files, which all processes of a machine share. Default: the rows are in the memory
            of this process.

    Raises:
        UserError: a file cannot be read, there are more bad rows than allowed, or no row is left.
    """
    report = DataReport()
    files = [(spec, find_rows(spec)) for spec in (*dataset, *val_dataset)]  # reports a missing file before reading one
    with EncoderPool(encoder, num_proc) as pool:
        parts = [_encode(file, pool, system, seed, cache) for _, file in files]
    bad_rows = _report_files(files, parts, report)
    rows = EncodedRows([(file, own) for (_, file), own in zip(files, parts, strict=True)])
    _check_bad_rows(bad_rows, max_bad_rows, len(rows) > 0 and _is_offered("max_bad_rows", offered))
    report.bad_rows = [str(bad) for bad in bad_rows]
    if encoder.truncation_strategy == "error":
        _check_lengths(rows, encoder.max_length)

    report.notes += _special_token_notes(files, parts)
    is_train = rows.file_R < len(dataset)
    train = np.empty(0, np.int64)
    if dataset:
        train = _kept(rows, is_train, "--dataset", encoder, offered)
    if val_dataset:
        val_flag = "--val_dataset" if _is_offered("val_dataset", offered) else "--dataset"
        val = _kept(rows, ~is_train, val_flag, encoder, offered)
    else:
        held_out = split(len(train), split_dataset_ratio, seed)
        if split_dataset_ratio > 0 and not len(held_out):
            report.notes.append("--split_dataset_ratio: there is only one row; none is held out for evaluation")
        train, val = np.delete(train, held_out), train[held_out]

    is_left_out = np.zeros(len(rows), bool)
    if interleave_prob:
        drawn = _draw(rows, train, dataset, Mixture(interleave_prob, seed))
        is_left_out[train] = True
        is_left_out[drawn] = False
        train = drawn
    _count_rows([spec for spec, _ in files], rows, is_left_out, report)
    train_samples, val_samples = rows.samples_of(train), rows.samples_of(val)
    report.train_samples = len(train_samples)
    report.val_samples = len(val_samples)
    report.log()
    return Data(
        train=train_samples,
        val=val_samples,
        val_conversations=HeldOutConversations(rows, val, system, encoder.parse),
        report=report,
        digest=digest_of(train_samples, val_samples),
        has_images=bool(rows.num_images_R[train].any() or rows.num_images_R[val].any()),
    )


def _encode(
    file: DataFile | HubRows, pool: EncoderPool, system: str | None, seed: int, cache: RowCache | None
) -> Sequence[Part]:
    """Return the encoded rows of a file, from the cache if it can store them."""
    parts = None
    if cache is not None:
        parts = cache.open(file, pool, system=system, seed=seed)
    if parts is None:
        parts = list(encode_file(file, pool, system=system, seed=seed))
    if not parts:
        raise UserError(f"{file.name} has no rows")
    return parts


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
    named = chain.from_iterable(map(prepared_files, files))
    found = [find_rows(spec) for spec in named]  # reports a missing last file before the first one is read
    parse = partial(parse_row, needs_answer=False, no_images=no_images)
    conversations: list[Conversation] = []
    bad_rows: list[BadRow] = []
    for file in found:
        read = read_rows(file, system=system, parse=parse, seed=seed)
        conversations += read.conversations
        bad_rows += read.bad_rows
    _check_bad_rows(bad_rows, max_bad_rows or 0, max_bad_rows is not None and len(conversations) > 0)
    for bad in bad_rows:
        logger.warning("left out: %s", bad)
    return conversations


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


_Files = Sequence[tuple[str, DataFile | HubRows]]  # with the file as the user specified it


def _report_files(files: _Files, parts: Sequence[Sequence[Part]], report: DataReport) -> list[BadRow]:
    """Add what is known of each file without its samples to the report, and return all bad rows.

    Rows that are not valid come before rows that cannot be encoded.
    """
    unparsed: list[BadRow] = []
    unencoded: list[BadRow] = []
    for (spec, file), own in zip(files, parts, strict=True):
        counts = report.files.setdefault(spec, Counts())  # one entry for a file that is given twice
        num_drawn = 0
        for part in own:
            facts = part.facts
            counts.rows += facts.num_rows
            counts.not_sampled += facts.num_not_sampled
            counts.dropped_bad += len(facts.unparsed) + len(facts.unencoded)
            num_drawn += facts.num_parsed
            unparsed += (BadRow(f"{file.name}:{line}", problem, hint) for line, problem, hint in facts.unparsed)
            unencoded += (BadRow(f"{file.name}:{line}", problem, hint) for line, problem, hint in facts.unencoded)
        if note := sample_note(file, num_drawn):
            report.notes.append(note)
    return unparsed + unencoded


def _count_rows(specs: Sequence[str], rows: EncodedRows, is_left_out: np.ndarray, report: DataReport) -> None:
    """Add the rows that can be encoded to the counts of their files."""
    is_kept = (rows.num_samples_R > 0) & ~is_left_out
    longest = np.zeros(len(rows), np.int64)
    np.maximum.at(longest, rows.row_of_S, rows.length_S)
    num_tokens = np.bincount(rows.row_of_S, rows.length_S, minlength=len(rows)).astype(np.int64)
    num_trained = np.bincount(rows.row_of_S, rows.num_trained_S, minlength=len(rows)).astype(np.int64)
    is_truncated = (rows.num_samples_R == 1) & (longest + rows.reserved_R < rows.length_R)
    for number, spec in enumerate(specs):
        here = rows.file_R == number
        kept = here & is_kept
        counts = report.files[spec]
        counts.not_sampled += int((here & is_left_out).sum())
        counts.dropped_too_long += int((here & ~is_kept & ~is_left_out).sum())
        counts.kept += int(kept.sum())
        counts.truncated += int((kept & is_truncated).sum())
        counts.tokens += int(num_tokens[kept].sum())
        counts.trained_tokens += int(num_trained[kept].sum())
        counts.images += int(rows.num_images_R[kept].sum())


def _special_token_notes(files: _Files, parts: Sequence[Sequence[Part]]) -> list[str]:
    named = [(file, part.facts) for (_, file), own in zip(files, parts, strict=True) for part in own]
    named = [(file, facts) for file, facts in named if facts.num_special]
    if not named:
        return []
    file, facts = named[0]
    line, token = facts.special
    number = sum(facts.num_special for _, facts in named)
    return [f"rows with special tokens in their text: {number}; {special_token_note(f'{file.name}:{line}', token)}"]


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


def _check_lengths(rows: EncodedRows, max_length: int) -> None:
    long = np.flatnonzero(rows.length_R > max_length)
    if not long.size:
        return
    first = int(long[0])
    raise UserError(
        f"{rows.source(first)} has {rows.length_R[first]} tokens, over --max_length {max_length}; "
        f"rows over it: {len(long)}",
        f"use --max_length {rows.length_R[long].max()}, or --truncation_strategy delete, left or right",
    )


def _kept(
    rows: EncodedRows, among: np.ndarray, flag: str, encoder: Encoder, offered: Collection[str] | None
) -> np.ndarray:
    """Return the numbers of the kept rows among those marked in `among`; raise UserError if no row is kept."""
    kept = np.flatnonzero(among & (rows.num_samples_R > 0))
    if kept.size:
        return kept
    lengths = rows.length_R[among]
    if not lengths.size:
        raise UserError(f"{flag}: all rows are bad", "use --max_bad_rows 0 to see why")
    max_length = encoder.max_length
    if encoder.truncation_strategy == "delete":
        shortest = lengths.min()
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


def _draw(rows: EncodedRows, train: np.ndarray, specs: Sequence[str], mixture: Mixture) -> np.ndarray:
    """Return the rows among `train` that the mixture draws from the files, in the order of drawing."""
    by_spec: dict[str, np.ndarray] = {}
    for spec in specs:
        numbers = [number for number, other in enumerate(specs) if other == spec]  # a file can be given twice
        by_spec[spec] = train[np.isin(rows.file_R[train], numbers)]
    taken = interleave([len(by_spec[spec]) for spec in specs], mixture)
    if not taken:
        empty = specs[mixture.part(0)]
        raise UserError(f"--interleave_prob: {empty} has no row to train on", "add rows to it, or remove it")
    return np.array([by_spec[specs[part]][place] for part, place in taken])
