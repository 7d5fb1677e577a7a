"""Encode rows as samples, in several processes."""

import itertools
import multiprocessing
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol

import numpy as np
from transformers import PreTrainedTokenizerBase

from swiftlite.args.data_fields import TruncationStrategy
from swiftlite.base.errors import UserError
from swiftlite.data.image_inputs import PATCHES, ImageEncoder, share_images
from swiftlite.data.images import ImageRef
from swiftlite.data.rows.conversation import BadRow, Conversation, RowError, parse_row
from swiftlite.data.rows.document import parse_document
from swiftlite.data.rows.prompt import parse_prompt
from swiftlite.data.rows.sources import RowParser
from swiftlite.data.sample import Sample, join, make_sample, truncate
from swiftlite.data.template import ChatTemplate, check_ids, special_tokens_of


@dataclass(frozen=True)
class Encoded:
    """The result of encoding one row. If neither `samples` nor `bad` is set, the row is too long."""

    length: int = 0  # before truncation; for a pair, with the longer answer
    samples: tuple[Sample, ...] = ()  # several if a long row is split
    bad: BadRow | None = None
    source: str = ""
    special_token: str = ""
    """The first special token in the text of a turn, or an empty string."""
    reserved: int = 0
    """Number of tokens of `length` that are reserved for a completion."""


class Encoder(Protocol):
    """Encodes rows as samples.

    The encoder is sent to each worker process once. It contains everything that a result depends on.

    Attributes:
        parse: function that parses the rows.
        max_length: maximum length of a sample in tokens.
        truncation_strategy: treatment of longer rows. A row without labels after truncation counts as too long.
    """

    @property
    def parse(self) -> RowParser: ...
    @property
    def max_length(self) -> int: ...
    @property
    def truncation_strategy(self) -> TruncationStrategy: ...
    def __call__(self, row: Conversation) -> Encoded: ...


@dataclass(frozen=True)
class ConversationEncoder:
    """An `Encoder` that encodes conversations with the tokenizer's chat template.

    Attributes:
        images: reads the images of rows; None if `parse` refuses rows with images.
    """

    template: ChatTemplate
    max_length: int
    truncation_strategy: TruncationStrategy
    parse: RowParser = parse_row
    images: ImageEncoder | None = None

    def __call__(self, row: Conversation) -> Encoded:
        source = row.source
        try:
            answers = self._answers(row)
        except RowError as error:
            return Encoded(bad=BadRow(source, error.problem, error.hint), source=source)
        length = max(map(len, answers))
        special_token = self.template.special_token_in(row)
        if length <= self.max_length:
            return Encoded(length, self._join(answers, row), source=source, special_token=special_token)
        if self.truncation_strategy in ("left", "right"):
            kept = [answer for answer in map(self._truncate, answers) if answer is not None]
            is_whole = len(kept) == len(answers)
            if is_whole and all(answer.num_trained_tokens for answer in kept) and not _are_equal(kept):
                return Encoded(length, self._join(kept, row), source=source, special_token=special_token)
        return Encoded(length, source=source)

    def _truncate(self, answer: Sample) -> Sample | None:
        """Truncate a sample to `max_length`; return None if this would cut an image."""
        assert self.truncation_strategy in ("left", "right")
        if len(answer) > self.max_length and self.images and PATCHES in answer.extras:
            return self.images.truncate(answer, self.max_length, self.truncation_strategy)
        return truncate(answer, self.max_length, self.truncation_strategy)

    def _join(self, answers: Sequence[Sample], row: Conversation) -> tuple[Sample]:
        sample = replace(join(answers), trains_heads=row.trains_heads)
        return (sample.with_extras(**row.extras),)

    def _answers(self, row: Conversation) -> list[Sample]:
        """Return the sample of a row, or the two samples of a pair.

        Raises:
            RowError: the template does not support the turns, a trained turn cannot be located exactly in the text, a
                token has no embedding, an image cannot be used, or the two answers of a pair have the same tokens.
        """
        images: Sequence[ImageRef] = ()
        if self.images is not None:
            images = self.images.read(row)
        answers = [self._encode(row, images)]
        if row.rejected is not None:
            rejected = replace(self._encode(row.other(), images), trains_heads=False)
            answers.append(share_images(rejected, answers[0]))
        if _are_equal(answers):
            raise RowError("row", "both answers have the same tokens, so there is nothing to learn", "remove the row")
        return answers

    def _encode(self, row: Conversation, images: Sequence[ImageRef]) -> Sample:
        if self.images is None:
            return self.template.encode(row)
        sample = self.template.encode(row, [self.images.num_items(image) for image in images])
        return self.images.with_images(sample, images)


@dataclass(frozen=True)
class PromptEncoder:
    """An `Encoder` that encodes the prompt of a row, without labels.

    Attributes:
        max_length: maximum length of prompt and completion in tokens.
        max_completion_length: length that is reserved for the completion.
        images: reads the images of rows; None if `parse` refuses rows with images.
    """

    template: ChatTemplate
    max_length: int
    truncation_strategy: TruncationStrategy
    max_completion_length: int
    parse: RowParser = parse_prompt
    images: ImageEncoder | None = None

    def __call__(self, row: Conversation) -> Encoded:
        try:
            sample = encode_prompt(self.template, row, self.images).with_extras(**row.extras)
        except RowError as error:
            return Encoded(bad=BadRow(row.source, error.problem, error.hint), source=row.source)
        special_token = self.template.special_token_in(row)
        length = len(sample) + self.max_completion_length
        samples = (sample,) if length <= self.max_length else ()
        reserved = self.max_completion_length
        return Encoded(length, samples, source=row.source, special_token=special_token, reserved=reserved)


def encode_prompt(template: ChatTemplate, row: Conversation, images: ImageEncoder | None = None) -> Sample:
    """Return the tokens of a prompt, and the extras of its images, as a sample without labels.

    Args:
        row: turns that end before an assistant turn.
        images: reads the images of the row; None for a row without images.

    Raises:
        RowError: the template does not support the turns, a token has no embedding, or an image cannot be used.
    """
    refs: tuple[ImageRef, ...] = ()
    lengths: list[int] = []
    if images is not None:
        refs = images.read(row)
        lengths = [images.num_items(ref) for ref in refs]
    ids = template.encode_prompt(row.messages, row.tools, lengths)
    sample = make_sample(ids, np.zeros(len(ids)), row.source, row.channel)
    if images is None:
        return sample
    return images.with_images(sample, refs)


def _are_equal(answers: Sequence[Sample]) -> bool:
    """Return whether both samples of a pair are identical; False for a single sample."""
    return len(answers) > 1 and np.array_equal(answers[0].input_ids, answers[1].input_ids)


@dataclass(frozen=True)
class DocumentEncoder:
    """An `Encoder` that encodes documents without a template. A long document gives several samples.

    Attributes:
        tokenizer: encodes a document as plain text, with the beginning-of-text token if the tokenizer has one.
        vocab_size: number of tokens in the model's embedding.
        append_eos: whether to append the tokenizer's eos token to each document.

    Raises:
        UserError: the tokenizer has no eos token to append.
    """

    tokenizer: PreTrainedTokenizerBase
    vocab_size: int
    max_length: int
    truncation_strategy: TruncationStrategy = "split"
    append_eos: bool = True
    parse: RowParser = parse_document

    def __post_init__(self) -> None:
        if self.append_eos and self.tokenizer.eos_token_id is None:
            raise UserError(
                "--append_eos requires an eos token; this model's tokenizer has none",
                "set eos_token in its tokenizer_config.json, or use --append_eos false",
            )

    @cached_property
    def _special_tokens(self) -> Any:
        return special_tokens_of(self.tokenizer)

    def __call__(self, row: Conversation) -> Encoded:
        text = row.messages[0]["content"]
        ids = list(self.tokenizer(text, verbose=False)["input_ids"])
        if self.append_eos and ids[-1:] != [self.tokenizer.eos_token_id]:
            ids.append(self.tokenizer.eos_token_id)
        try:
            check_ids(ids, self.tokenizer, self.vocab_size, "text")
            if len(ids) < 2:
                raise RowError("text", "has one token; a document requires two or more")
        except RowError as error:
            return Encoded(bad=BadRow(row.source, error.problem, error.hint), source=row.source)
        document = make_sample(ids, np.ones(len(ids)), row.source, row.channel)
        found = self._special_tokens.search(text)
        special_token = found[0] if found else ""
        return Encoded(len(ids), self._cut(document), source=row.source, special_token=special_token)

    def _cut(self, document: Sample) -> tuple[Sample, ...]:
        if len(document) <= self.max_length:
            return (document,)
        if self.truncation_strategy == "split":
            return split(document, self.max_length)
        if self.truncation_strategy in ("left", "right"):
            return (truncate(document, self.max_length, self.truncation_strategy),)
        return ()


def split(document: Sample, max_length: int) -> tuple[Sample, ...]:
    """Split a document into pieces of at most `max_length` tokens, which overlap by one token.

    Each piece starts with the last token of the previous piece. Therefore every token of the document except the first
    is a label exactly once.

    Example: tokens `a b c d e f` in pieces of 3 are `a b c`, `c d e`, `e f`, with labels `b c`, `d e`, `f`.

    Args:
        max_length: at least 2.
    """
    pieces = []
    for start in range(0, len(document) - 1, max_length - 1):
        ids = document.input_ids[start : start + max_length]
        pieces.append(make_sample(ids, np.ones(len(ids)), document.source, document.channel))
    return tuple(pieces)


def special_token_note(source: str, special_token: str) -> str:
    """Return a note that says where a special token occurs in a row, and how the token is encoded."""
    becomes = "it becomes that token, as in transformers, and may end a turn or a text early"
    return f"{source} has {special_token}: {becomes}"


_encoder: Encoder | None = None  # set by `_start_worker` in a worker process
CHUNK_ROWS = 64
"""Number of rows that are sent to a worker process at once."""
CHUNKS_AHEAD = 4
"""Number of chunks per worker process that are read ahead of their results."""


def _start_worker(encoder: Encoder) -> None:
    global _encoder
    _encoder = encoder


def _encode_in_worker(rows: list[Conversation | None]) -> list[Encoded | None]:
    assert _encoder is not None
    return [row and _encoder(row) for row in rows]


class EncoderPool(AbstractContextManager["EncoderPool"]):
    """Encodes rows with several processes, which are started for the first rows and end with the context.

    Args:
        num_proc: number of processes; 1 encodes in this process.
    """

    def __init__(self, encoder: Encoder, num_proc: int):
        self.encoder = encoder
        self._num_proc = num_proc
        self._executor: ProcessPoolExecutor | None = None

    def __exit__(self, *_: object) -> None:
        if self._executor is not None:
            self._executor.shutdown(cancel_futures=True)

    def encode(self, rows: Iterable[Conversation | None]) -> Iterator[Encoded | None]:
        """Yield the results in the order of the rows, and None for None. Only a few chunks of rows are read ahead."""
        if self._num_proc <= 1:
            yield from (row and self.encoder(row) for row in rows)
            return
        if self._executor is None:
            # Forked from a process that has imported this module, which takes seconds, and has no threads: a fork of
            # this process, in which torch or tokenizers has started threads, can hang.
            context = multiprocessing.get_context("forkserver")
            context.set_forkserver_preload([__name__])
            self._executor = ProcessPoolExecutor(self._num_proc, context, _start_worker, (self.encoder,))
        given = iter(rows)
        pending: deque[Future[list[Encoded | None]]] = deque()
        while chunk := list(itertools.islice(given, CHUNK_ROWS)):
            pending.append(self._executor.submit(_encode_in_worker, chunk))
            if len(pending) > CHUNKS_AHEAD * self._num_proc:
                yield from pending.popleft().result()
        while pending:
            yield from pending.popleft().result()
