"""Write files atomically, so that they survive crashes and power failures."""

import os
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from swiftlite.base.errors import UserError


def atomic_write(path: Path, content: bytes, writer: str = "") -> None:
    """Write a small file atomically: after a crash, the file has either the old or the new content.

    Args:
        writer: suffix of the temporary file that distinguishes processes which write the same file at the same time.
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
        error.filename = str(path)  # the error of a failed write has no file name
        raise


ABANDONED_SECONDS = 3600
"""Age in seconds at which an incomplete file counts as abandoned. Writing one file takes seconds."""


def delete_incomplete(directory: Path) -> None:
    """Delete incomplete files of killed processes. Recent files are kept, because another process could be writing
    them.
    """
    for path in directory.glob(".*.incomplete"):
        with suppress(FileNotFoundError):  # renamed by its process in the meantime
            if time.time() - path.stat().st_mtime > ABANDONED_SECONDS:
                path.unlink()


def check_writable(flag: str, directory: Path) -> None:
    """Check that a directory can be created and written, before work starts whose results will be written there.

    Raises:
        UserError: the directory cannot be written; the error names the flag.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        # A file without a name, so that a killed process leaves no file.
        with tempfile.TemporaryFile(dir=directory) as trial:
            trial.write(b"\0" * 4096)
            trial.flush()
            os.fsync(trial.fileno())
    except OSError as error:
        raise UserError(
            f"{flag} {directory} cannot be written: {error.strerror}",
            "free disk space, allow this user to write there, or use another directory",
        ) from None


def fsync_tree(directory: Path) -> None:
    """Flush a directory and everything below it to disk, so that they survive a power cut."""
    for path in (*directory.rglob("*"), directory):
        sync(path)


def sync(path: Path) -> None:
    """Flush the content of a file, or the names in a directory, to disk, so that they survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
