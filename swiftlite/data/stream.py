"""`--streaming`: packed rows from files that are never held in memory, epoch after epoch.

Rows of the files are read, checked and tokenized as they are needed, in the order of the files. A stream is resumed by
the numbers of the rows that it has read and of those that wait: the files are read again up to there, and only what
waits is tokenized again.
"""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from swiftlite.data.conversation import BadRow
from swiftlite.data.dataset import Encoder, special_token_note
from swiftlite.data.packing import Numbered, RowStream
from swiftlite.data.sample import Sample
from swiftlite.data.sources import check_row, find_rows
from swiftlite.errors import UserError
from swiftlite.log import logger


class Stream(Iterator[list[Sample]]):
    """Packed rows without end.

    Args:
        files: of formats that are read row by row, each as a whole.
        encoder: its `max_length` is at most `packing_length`, padded.
        packing_length, buffer_size, multiple: see `packing.RowStream`.
        max_bad_rows: that an epoch may leave out.
        system: system prompt for rows that bring none.
        state: of a stream with the same arguments, to be continued bit for bit.

    Raises:
        UserError: no such file; while iterating: more bad rows than allowed, a row
            that is too long where that is an error, an epoch that keeps no row; files that have changed.
    """

    def __init__(
        self,
        files: Sequence[str],
        encoder: Encoder,
        packing_length: int,
        *,
        buffer_size: int = 1000,
        multiple: int = 1,
        max_bad_rows: int = 0,
        system: str | None = None,
        state: dict[str, Any] | None = None,
    ):
        self._files = [find_rows(name) for name in files]
        self._encoder = encoder
        self._max_bad_rows = max_bad_rows
        self._system = system
        self._has_warned = False
        state = state or {"num_read": 0, "rows_per_epoch": None, "num_bad": 0, "waiting": [], "ready": []}
        self.num_read: int = state["num_read"]
        self.rows_per_epoch: int | None = state["rows_per_epoch"]  # known after the first
        self._num_bad: int = state["num_bad"]
        waiting: list[int] = state["waiting"]
        ready: list[list[int]] = state["ready"]
        samples = self._read_again({*waiting, *itertools.chain(*ready)})

        def numbered(numbers: list[int]) -> list[Numbered]:
            return [(number, samples[number]) for number in numbers]

        self._rows = RowStream(
            self._read(),
            packing_length,
            buffer_size,
            multiple=multiple,
            waiting=numbered(waiting),
            ready=map(numbered, ready),
        )

    def __next__(self) -> list[Sample]:
        return next(self._rows)

    def state(self) -> dict[str, Any]:
        """What a stream that continues this one needs, for JSON."""
        return {
            "num_read": self.num_read,
            "rows_per_epoch": self.rows_per_epoch,
            "num_bad": self._num_bad,
            "waiting": _numbers(self._rows.waiting),
            "ready": [_numbers(row) for row in self._rows.ready],
        }

    def _one_pass(self) -> Iterator[tuple[object, str]]:
        """Rows of all files, and where they stand."""
        for file in self._files:
            for line, row in file.rows():
                yield row, f"{file.name}:{line}"

    def _read(self) -> Iterator[Numbered]:
        """The samples of rows that were not read yet, epoch after epoch; rows are numbered through all epochs.

        Example: a stream of files of 5 rows that has read rows 0 to 6 is in its second epoch. It passes over the first
        two rows of the files, gives the samples of rows 7, 8 and 9, then those of the third epoch.
        """
        while True:
            first = self.num_read % self.rows_per_epoch if self.rows_per_epoch else self.num_read
            num_rows = 0
            num_kept = 0
            for row, source in self._one_pass():
                num_rows += 1
                if num_rows <= first:
                    continue
                number = self.num_read
                self.num_read += 1
                sample = self._encode(row, source)
                if sample is not None:
                    num_kept += 1
                    yield number, sample
            is_as_long_as_before = self.rows_per_epoch in (None, num_rows)
            if num_rows < first or not is_as_long_as_before:
                raise _changed("--dataset")
            if not first and not num_kept:
                raise UserError(
                    f"--dataset: of {num_rows} rows none is left to train on",
                    f"those over --max_length {self._encoder.max_length} are dropped: give more, "
                    "or --truncation_strategy right",
                )
            self.rows_per_epoch = num_rows

    def _read_again(self, numbers: set[int]) -> dict[int, Sample]:
        """The samples of rows that an earlier stream had read and not given away."""
        wanted: dict[int, list[int]] = {}  # by place in the files: a row may wait in several epochs
        for number in sorted(numbers):
            place = number % self.rows_per_epoch if self.rows_per_epoch else number
            wanted.setdefault(place, []).append(number)
        samples: dict[int, Sample] = {}
        if not wanted:
            return samples
        for place, (row, source) in enumerate(self._one_pass()):
            if place not in wanted:
                continue
            conversation = check_row(row, source, system=self._system)
            sample = None if isinstance(conversation, BadRow) else self._encoder(conversation).sample
            if sample is None:
                raise _changed(source)
            samples |= dict.fromkeys(wanted.pop(place), sample)
            if not wanted:
                return samples
        raise _changed("--dataset")

    def _encode(self, row: object, source: str) -> Sample | None:
        """None where a row is left out."""
        conversation = check_row(row, source, system=self._system)
        if isinstance(conversation, BadRow):
            return self._leave_out(conversation)
        encoded = self._encoder(conversation)
        if encoded.bad:
            return self._leave_out(encoded.bad)
        if encoded.length > self._encoder.max_length and self._encoder.truncation_strategy == "error":
            raise UserError(
                f"{source} has {encoded.length} tokens, over --max_length {self._encoder.max_length}",
                f"--max_length {encoded.length} or more; or --truncation_strategy delete, left or right",
            )
        if encoded.special_token and not self._has_warned:
            self._has_warned = True
            logger.warning("%s; no further row is named", special_token_note(encoded))
        return encoded.sample

    def _leave_out(self, bad: BadRow) -> None:
        if self.rows_per_epoch is not None:
            return  # it was counted in the first epoch
        self._num_bad += 1
        if self._num_bad > self._max_bad_rows:
            allowed = f"; {self._max_bad_rows} before it were left out" if self._max_bad_rows else ""
            skip = f"--max_bad_rows {self._num_bad} leaves it out, but no more after it"
            raise UserError(f"{bad}{allowed}", "\n    ".join(line for line in (bad.hint, skip) if line))


def _numbers(samples: Iterable[Numbered]) -> list[int]:
    return [number for number, _ in samples]


def _changed(what: str) -> UserError:
    return UserError(f"{what} is not what this run has read before", "resume with the same files, or start anew")
