"""Read the conversations that `deploy --log_requests` wrote, and divide them into rows for training and held-out rows.

The newest rows are held out: heads are judged by the requests that came last.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from swiftlite.base.errors import UserError
from swiftlite.base.log import logger

HELD_OUT_SHARE = 0.2
MIN_HELD_OUT = 16
MAX_HELD_OUT = 48
"""Maximum number of held-out rows, because the model continues each of them before and after training."""


@dataclass(frozen=True)
class LoggedRow:
    """A row of the log.

    Attributes:
        row: the row, in the format that `megatron sft` reads.
        digest: digest of its line.
    """

    row: Any
    digest: str


def read_log(path: Path) -> list[LoggedRow]:
    """Return the rows of a log and of the file that it replaced when it was full, the oldest first.

    Lines that are not rows are skipped with a warning; the server may be writing the last one.

    Raises:
        UserError: the log cannot be read.
    """
    older = path.with_name(f"{path.stem}.1{path.suffix}")
    lines: list[bytes] = []
    for file in (older, path):
        try:
            lines += file.read_bytes().splitlines(keepends=True)
        except FileNotFoundError:
            continue
        except OSError as error:
            raise UserError(f"--request_log {file} cannot be read: {error.strerror}", "check its permissions") from None
    rows, num_skipped = [], 0
    for line in lines:
        if (row := _parse(line)) is not None:
            rows.append(LoggedRow(row, hashlib.sha256(line).hexdigest()))
        elif line.endswith(b"\n"):
            num_skipped += 1
    if num_skipped:
        logger.warning("%s: %d lines are not conversations and are skipped", path, num_skipped)
    return rows


def _parse(line: bytes) -> Any:
    """Return the row of a line; None if it is not a complete row."""
    try:
        row = json.loads(line)
        roles = [message["role"] for message in row["messages"]]
    except (ValueError, TypeError, LookupError):
        return None
    return row if line.endswith(b"\n") and roles and roles[-1] == "assistant" else None


def num_new(rows: Sequence[LoggedRow], last: str) -> int:
    """Return the number of rows after the one with the digest `last`; all if there is none."""
    for number, logged in enumerate(reversed(rows)):
        if logged.digest == last:
            return number
    return len(rows)


def divide(rows: Sequence[LoggedRow], max_rows: int) -> tuple[list[Any], list[Any]]:
    """Return the rows for training and the held-out rows: the newest 20 %, at least 16 and at most 48.

    A conversation whose question is a held-out one is not trained, so that a question that clients repeat does not
    count as progress.

    Args:
        max_rows: maximum number of rows for training, the newest ones.
    """
    number = min(max(MIN_HELD_OUT, round(HELD_OUT_SHARE * len(rows))), MAX_HELD_OUT)
    held_out = [logged.row for logged in rows[-number:]]
    questions = {_question(row) for row in held_out}
    training = [logged.row for logged in rows[:-number] if _question(logged.row) not in questions]
    return training[-max_rows:], held_out


def _question(row: Any) -> str:
    """Return everything before the answer as text."""
    return json.dumps(row["messages"][:-1], sort_keys=True)
