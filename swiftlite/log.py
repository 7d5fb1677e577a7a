"""One logger for the whole product. Rank 0 speaks; warnings and errors of other ranks are kept, with the rank."""

import logging
import sys

from swiftlite.redact import redact_text

logger = logging.getLogger("swiftlite")


class _Formatter(logging.Formatter):
    """Lines without keys and tokens, whatever is logged."""

    def format(self, record: logging.LogRecord) -> str:
        return redact_text(super().format(record))


def setup(rank: int = 0, level: int = logging.INFO) -> None:
    """Send the logger to stderr, so that stdout stays free for results.

    Args:
        rank: this process's global rank; above 0 only warnings pass.
        level: lowest level shown on rank 0.
    """
    handler = logging.StreamHandler(sys.stderr)
    prefix = "swiftlite: " if rank == 0 else f"swiftlite[rank {rank}]: "
    handler.setFormatter(_Formatter(prefix + "%(message)s"))
    logger.handlers[:] = [handler]
    logger.propagate = False
    logger.setLevel(level if rank == 0 else logging.WARNING)
