"""Provide the package's logger. Rank 0 logs everything; other ranks log only warnings and errors, with their rank."""

import logging
import sys

from swiftlite.base.redact import redact_text

logger = logging.getLogger("swiftlite")


class _Formatter(logging.Formatter):
    """A formatter that replaces keys and tokens in every line by ***."""

    def format(self, record: logging.LogRecord) -> str:
        return redact_text(super().format(record))


class _Handler(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        write_line(self.format(record))


def write_line(text: str) -> None:
    """Print a line to stderr. On a terminal, the line is printed above a progress bar."""
    if sys.stderr.isatty():
        from tqdm import tqdm

        tqdm.write(text, file=sys.stderr)
    else:
        print(text, file=sys.stderr, flush=True)


def setup(rank: int = 0, level: int = logging.INFO) -> None:
    """Let the logger write to stderr, because stdout is for results.

    Args:
        rank: this process's global rank; ranks above 0 log only warnings and errors.
        level: lowest level logged on rank 0.
    """
    handler = _Handler()
    prefix = "swiftlite: "
    if rank > 0:
        prefix = f"swiftlite[rank {rank}]: "
        level = logging.WARNING
    handler.setFormatter(_Formatter(prefix + "%(message)s"))
    logger.handlers[:] = [handler]
    logger.propagate = False
    logger.setLevel(level)
