"""Report the failure of a rank to the launcher (`elastic.py`), which shows the rank that failed first.

When a rank dies, its sockets close, and every rank that waits for it raises an error within milliseconds, often before
the dead rank's traceback is printed. Therefore each rank writes torchelastic's error file. A rank that only lost a
connection writes its traceback only to this file; the launcher prints it if no rank has another error. torchelastic's
`@record` is not used for two reasons: its timestamps are whole seconds, and it requires torch, but most errors occur
before torch is imported. This module does not import torch.
"""

import json
import os
import time
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path

from swiftlite.base.errors import LostRank, is_of_connection

# Environment variable with the launcher's directory for files of ranks; unset without swiftlite's launcher.
FOLDER = "SWIFTLITE_TOLD_DIR"
# Environment variable with the launcher's process id.
LAUNCHER = "SWIFTLITE_LAUNCHER_PID"


@dataclass(frozen=True)
class Failure:
    """The content of the error file of one rank. torchelastic also reads the first two fields.

    Attributes:
        message: the traceback.
        timestamp: seconds since the epoch.
        code: exit code of the rank.
        is_lost: whether the rank only lost its connection to another rank; its stderr then has no traceback.
        is_final: whether the error would repeat if the run were restarted, such as a wrong option or a full disk.
        lost: the name of another rank that hangs, and how it was found; None if this rank is at fault.
    """

    message: str
    timestamp: float
    code: int
    is_lost: bool
    is_final: bool = False
    lost: tuple[str, str] | None = None


def report(error: BaseException, code: int, *, is_final: bool = False) -> bool:
    """Report to the launcher, if there is one, why this rank ends with `code`.

    Args:
        is_final: see `Failure`.

    Returns:
        Whether the launcher has received the traceback and prints it if necessary. If not, the rank must print it to
            stderr.
    """
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not file or FOLDER not in os.environ:
        return False
    lost = None
    if isinstance(error, LostRank):
        lost = (error.who, error.how)
    is_lost = lost is None and is_of_connection(error)
    failure = Failure("".join(traceback.format_exception(error)), time.time(), code, is_lost, is_final, lost)
    incomplete = Path(f"{file}.incomplete")
    try:
        incomplete.write_text(json.dumps(asdict(failure)), encoding="utf-8")
        incomplete.replace(file)  # atomic, because the launcher reads it even if the rank is killed here
    except OSError:  # the launcher has ended and removed its directory
        return False
    return is_lost
