"""Which of several failed ranks to believe: the one that broke, not those that lost their connection to it.

A rank that dies takes its sockets with it, and every rank that waits for it raises within milliseconds, often before
the dead one's own traceback is out. So each rank tells the launcher (`elastic.py`) how it failed, and one that only
lost a connection leaves its traceback there, to be shown if nobody has a better reason. No torch.
"""

import json
import os
import time
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path

# The launcher's folder for what its ranks tell it; unset without a launcher.
FOLDER = "SWIFTLITE_TOLD_DIR"
# What torch, gloo and NCCL say when the other side is gone or silent; torch has no class for gloo's.
_LOST_CONNECTION = (
    "gloo/transport",
    "NCCL",
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "failed to recv",
)


@dataclass(frozen=True)
class Failure:
    """How one rank failed, by its own words.

    Attributes:
        time: nanoseconds since the epoch.
        is_lost: whether it only lost its connection to another rank; its stderr then has no traceback.
    """

    time: int
    code: int
    is_lost: bool
    traceback: str


def tell_launcher(error: BaseException, code: int) -> bool:
    """Tell the launcher, if there is one, why this rank ends with `code`.

    Returns:
        Whether the launcher now has the traceback and shows it if it is needed; if not, it belongs on stderr.
    """
    folder, rank = os.environ.get(FOLDER), os.environ.get("RANK")
    if not folder or rank is None:
        return False
    is_lost = any(words in str(error) for words in _LOST_CONNECTION)
    failure = Failure(time.time_ns(), code, is_lost, "".join(traceback.format_exception(error)))
    try:
        _path(folder, int(rank)).write_text(json.dumps(asdict(failure)), encoding="utf-8")
    except OSError:  # the launcher is gone and its folder with it
        return False
    return is_lost


def told(folder: str, rank: int) -> Failure | None:
    """What a rank told; None if it ended without a word, as a killed one does."""
    try:
        return Failure(**json.loads(_path(folder, rank).read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return None


def _path(folder: str, rank: int) -> Path:
    return Path(folder) / f"failure-{rank}"
