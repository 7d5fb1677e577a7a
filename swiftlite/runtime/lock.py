"""Allow one run or export in a directory at a time. This module does not import torch."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from swiftlite.base.errors import UserError
from swiftlite.base.log import logger

LOCK_FILE = ".lock"


@contextmanager
def only_run_in(output_dir: Path, directory: Path | None = None) -> Iterator[None]:
    """Lock a directory against other processes. The kernel releases the lock when this process ends.

    The directory is created if necessary, and removed at the end if it is empty.

    Args:
        directory: directory to create and lock instead of `output_dir`.

    Raises:
        UserError: another run holds the lock, or the directory cannot be created.
    """
    path = (directory or output_dir) / LOCK_FILE
    file = None
    try:  # includes creating the directory, because a signal can arrive at any time
        file = _claim(output_dir, path)
        yield
    finally:
        with suppress(OSError):
            if file:
                path.unlink()
            path.parent.rmdir()  # fails unless it is empty
        with suppress(OSError):
            if file:
                file.close()


def _claim(output_dir: Path, path: Path) -> IO[str]:
    """Create and lock the lock file, and write "PID on HOST" to it.

    Raises:
        UserError: another run holds the lock, or the file cannot be created.
    """
    try:
        file = _open_locked(path)
    except BlockingIOError:
        raise UserError(*in_use(output_dir, _read_holder(path))) from None
    except OSError as error:
        raise UserError(
            f"--output_dir {output_dir} cannot be created: {error.strerror}", "choose a writable directory"
        ) from None
    with suppress(OSError):  # on a full disk the lock works without its text
        file.truncate(0)
        file.write(f"{os.getpid()} on {os.uname().nodename}")
        file.flush()
    return file


def holder_of(output_dir: Path) -> str:
    """Return the process that holds the lock, as "PID on HOST"; empty if the directory is not locked."""
    path = output_dir / LOCK_FILE
    try:
        with path.open(encoding="utf-8") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return _read_holder(path)
    except OSError:
        return ""
    return ""


def in_use(output_dir: Path, holder: str) -> tuple[str, str]:
    """Return the problem and the hint for a directory that another run uses."""
    return (
        f"--output_dir {output_dir} is in use by another run: process {holder}",
        "wait until it ends, stop it, or choose another directory",
    )


def _open_locked(path: Path) -> IO[str]:
    """Open the lock file and lock it, if the file system supports locks.

    Raises:
        BlockingIOError: another process holds the lock.
        OSError: the file cannot be created.
    """
    while True:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("a+", encoding="utf-8")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            raise
        except OSError as error:
            logger.warning("%s: locking failed (%s); do not start a second run in this directory", path, error.strerror)
            return file
        if path.exists() and os.path.samestat(path.stat(), os.fstat(file.fileno())):
            return file
        file.close()  # the previous holder has deleted it in the meantime


def _read_holder(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")[:200] or "unknown"
    except OSError:
        return "unknown"
