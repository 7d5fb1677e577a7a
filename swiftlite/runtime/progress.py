"""Record how far a run has come, for a launcher that restarts it after failures. This module does not import torch.

With --max_restarts, the first rank writes the record after each step. The launcher reads it to detect a failure that
repeats, and the restarted run reads it to measure the lost time.
"""

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from swiftlite.base.errors import UserError
from swiftlite.base.json_file import read_json

# Environment variable with the path of the record; unset without --max_restarts.
FILE = "SWIFTLITE_PROGRESS_FILE"
# Environment variable with the number of restarts so far.
RESTARTS = "SWIFTLITE_RESTARTS"
# Name of the record in --output_dir.
NAME = ".progress.json"


@dataclass(frozen=True)
class Progress:
    """The progress of a run over all its restarts.

    Attributes:
        restarts: number of restarts when the record was written.
        last: last completed step since the last restart; at first, the step of the checkpoint.
        furthest: last completed step over all restarts.
        finished: time at which `furthest` was completed, in seconds since the epoch.
        repeated: number of steps up to `furthest` that were computed again since then.
    """

    restarts: int
    last: int
    furthest: int
    finished: float
    repeated: int = 0

    def write(self, path: Path) -> None:
        """Write the record atomically, but without flushing it to disk, because it is written in each step."""
        incomplete = path.with_name(f"{path.name}.incomplete")
        incomplete.write_text(json.dumps(asdict(self)), encoding="utf-8")
        incomplete.replace(path)


def read_progress(path: Path) -> Progress | None:
    """Return the record of a run; None if it does not exist or is damaged, as after a power failure."""
    try:
        return Progress(**read_json(path))
    except (OSError, ValueError, TypeError):
        return None


def progress_file() -> Path | None:
    """Return the path of the record; None without --max_restarts."""
    path = os.environ.get(FILE)
    return Path(path) if path else None


def num_restarts() -> int:
    """Return how often the launcher has restarted this run."""
    return int(os.environ.get(RESTARTS) or 0)


def check_launcher(max_restarts: int) -> None:
    """Check that a launcher of swiftlite restarts this process, if restarts are requested.

    Raises:
        UserError: another launcher started this process, or none.
    """
    if max_restarts and progress_file() is None:
        raise UserError(
            f"--max_restarts {max_restarts} requires that swiftlite starts the processes, but another program did",
            "start the command `swiftlite` once per node, with NPROC_PER_NODE and NNODES; or omit --max_restarts, set "
            "--resume true, and let the other program restart the job (torchrun --max-restarts)",
            2,
        )
