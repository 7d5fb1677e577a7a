"""Read torch's flight recorder, which records the collective operations of a rank, when a rank has waited too long.

The environment variables with which torch enables it are set in `cli/main.py`. NCCL writes the same file itself before
it ends the process. `torchfrtrace` compares the files of all ranks.
"""

import json
import os
from pathlib import Path

from torch._C import _distributed_c10d as c10d

PREFIX = "TORCH_FR_DUMP_TEMP_FILE"
"""Environment variable with the path of the file, without the number of the rank."""


def last_collective() -> str:
    """Return the last operation of this process in words; empty if none was recorded (or before torch 2.9)."""
    dump = getattr(c10d, "_dump_fr_trace_json", None)
    if dump is None:
        return ""
    entries = json.loads(dump()).get("entries", [])
    if not entries:
        return ""
    last = max(entries, key=lambda entry: entry["record_id"])
    number = last["p2p_seq_id"] if last["is_p2p"] else last["collective_seq_id"]
    return f"{last['profiling_name']} (number {number} of group {last['process_group'][-1]})"


def write_trace(rank: int) -> None:
    """Write the recorded operations to the file of this rank, if the environment names one."""
    prefix = os.environ.get(PREFIX)
    if prefix and Path(prefix).parent.is_dir() and last_collective():
        Path(f"{prefix}{rank}").write_bytes(c10d._dump_fr_trace())  # pyright: ignore[reportAttributeAccessIssue]
