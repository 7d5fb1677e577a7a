"""Report the failure of a rank to the launcher (`elastic.py`), so that it can show the rank that failed first.

When a rank dies its sockets close, and every rank that waits for it raises within milliseconds, often before the dead
rank's traceback is printed. Each rank therefore writes torchelastic's error file. A rank that only lost a connection
writes its traceback to this file only, to be shown if there is no better reason. torchelastic's `@record` is not
sufficient: it requires torch, which most errors precede, and its timestamps are whole seconds. No torch."""

import json
import os
import time
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path

# The launcher's folder for files of its ranks; unset without swiftlite's launcher.
FOLDER = "SWIFTLITE_TOLD_DIR"
# The launcher's process id.
LAUNCHER = "SWIFTLITE_LAUNCHER_PID"
# Messages of torch, gloo and NCCL for a lost or silent peer; torch has no exception class for gloo's.
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
    """The error file of one rank; torchelastic reads the first two fields too.

    Attributes:
        message: the traceback.
        timestamp: seconds since the epoch.
        code: exit code of the rank.
        is_lost: whether it only lost its connection to another rank; its stderr then has no traceback.
    """

    message: str
    timestamp: float
    code: int
    is_lost: bool


def report(error: BaseException, code: int) -> bool:
    """Report to the launcher, if there is one, why this rank ends with `code`.

    Returns:
        Whether the launcher has the traceback and prints it if necessary; otherwise the rank prints it to stderr.
    """
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not file or FOLDER not in os.environ:
        return False
    is_lost = any(words in str(error) for words in _LOST_CONNECTION)
    failure = Failure("".join(traceback.format_exception(error)), time.time(), code, is_lost)
    incomplete = Path(f"{file}.incomplete")
    try:
        incomplete.write_text(json.dumps(asdict(failure)), encoding="utf-8")
        incomplete.replace(file)  # atomic, because the launcher reads it even if the rank is killed here
    except OSError:  # the launcher has ended and removed its folder
        return False
    return is_lost
