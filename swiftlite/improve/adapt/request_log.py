"""Read the conversations that `deploy --log_requests` wrote, and divide them into rows for training and held-out rows.

The newest rows are held out: heads are judged by the requests that came last.
"""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from swiftlite.base.errors import UserError
from swiftlite.base.log import logger

HELD_OUT_SHARE = 0.2
MIN_HELD_OUT = 16
LINES = 8
"""Number of lines that `digest_of_end` reads."""
MAX_HELD_OUT = 48
"""Maximum number of held-out rows, because the model continues each of them before and after training."""


def read_log(path: Path) -> list[bytes]:
    """Return the lines of a log and of the file that it replaced when it was full, the oldest first.

    A line without its end is left out: the server is writing it.

    Raises:
        UserError: the log cannot be read.
    """
    older = path.resolve().with_name(f"{path.stem}.1{path.suffix}")  # as `LogFile` names it, also behind a link
    lines: list[bytes] = []
    for file in (older, path):
        try:
            lines += file.read_bytes().splitlines(keepends=True)
        except FileNotFoundError:
            continue
        except OSError as error:
            raise UserError(f"--request_log {file} cannot be read: {error.strerror}", "check its permissions") from None
    return [line for line in lines if line.endswith(b"\n")]


def digest_of_end(lines: Sequence[bytes]) -> str:
    """Return a digest by which the end of a log is found again, also after its file was renamed.

    It is that of several lines, because clients repeat requests.
    """
    return hashlib.sha256(b"".join(lines[-LINES:])).hexdigest()


def num_new(lines: Sequence[bytes], end: str) -> int:
    """Return the number of lines after those with the digest `end`; all if there are none.

    Only these lines are read, because the log is read every few seconds.
    """
    for number in range(len(lines)):
        if digest_of_end(lines[max(0, len(lines) - number - LINES) : len(lines) - number]) == end:
            return number
    return len(lines)


def divide(lines: Sequence[bytes], max_rows: int) -> tuple[list[Any], list[Any]]:
    """Return the rows for training and the held-out rows: the newest 20 %, at least 16 and at most 48.

    A conversation whose question is a held-out one is not trained, so that a question that clients repeat does not
    count as progress. Lines that are not conversations are skipped with a warning.

    Args:
        max_rows: maximum number of rows for training, the newest ones.
    """
    newest = lines[-(max_rows + MAX_HELD_OUT) :]
    rows = [row for row in map(_parse, newest) if row is not None]
    if len(rows) < len(newest):
        logger.warning("--request_log: %d lines are not conversations and are skipped", len(newest) - len(rows))
    number = min(max(MIN_HELD_OUT, round(HELD_OUT_SHARE * len(lines))), MAX_HELD_OUT)
    held_out = rows[-number:]
    questions = set(map(_question, held_out))
    training = [row for row in rows[:-number] if _question(row) not in questions]
    return training[-max_rows:], held_out


def _parse(line: bytes) -> Any:
    """Return the row of a line; None if it is not a conversation that ends with an answer."""
    try:
        row = json.loads(line)
        roles = [message["role"] for message in row["messages"]]
    except (ValueError, TypeError, LookupError):
        return None
    return row if roles and roles[-1] == "assistant" else None


def _question(row: Any) -> str:
    """Return everything before the answer as text."""
    return json.dumps(row["messages"][:-1], sort_keys=True)
