"""Files that survive a crash and a power cut: old, whole or absent."""

import os
from pathlib import Path

from swiftlite.errors import UserError


def write_durably(path: Path, content: bytes, writer: str = "") -> None:
    """Write a small file so that after a crash it is either absent, old or whole.

    Args:
        writer: distinguishes processes that may write the same file at the same time.
    """
    temporary = path.with_name(f".{path.name}{writer}.incomplete")
    try:
        with temporary.open("wb") as out:
            out.write(content)
            out.flush()
            os.fsync(out.fileno())
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)  # a full disk needs the space
        error.filename = str(path)  # a write that fails does not say of which file
        raise


def check_writable(flag: str, directory: Path) -> None:
    """Make a directory and try a small file in it, before an hour of work is to be written there.

    Raises:
        UserError: it cannot be; names the flag.
    """
    trial = directory / ".trial"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        write_durably(trial, b"\0" * 4096)
        trial.unlink()
    except OSError as error:
        raise UserError(
            f"{flag} {directory} cannot be written: {error.strerror}", "make room, or name another place"
        ) from None


def flush_to_disk(directory: Path) -> None:
    """Let a directory and all below it survive a power cut."""
    for path in (*directory.rglob("*"), directory):
        sync(path)


def sync(path: Path) -> None:
    """Let what is in a file, or the names in a directory, survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
