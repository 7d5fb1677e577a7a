"""One logger for the whole product. Rank 0 speaks; warnings and errors of other ranks are kept, with the rank."""

import logging
import sys

logger = logging.getLogger("swiftlite")


def setup(rank: int = 0, level: int = logging.INFO) -> None:
    """Send the logger to stderr, so that stdout stays free for results.

    Args:
        rank: this process's global rank; above 0 only warnings pass.
        level: lowest level shown on rank 0.
    """
    handler = logging.StreamHandler(sys.stderr)
    prefix = "swiftlite: " if rank == 0 else f"swiftlite[rank {rank}]: "
    handler.setFormatter(logging.Formatter(prefix + "%(message)s"))
    logger.handlers[:] = [handler]
    logger.propagate = False
    logger.setLevel(level if rank == 0 else logging.WARNING)
