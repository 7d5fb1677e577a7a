"""Create temporary directories that the next command deletes if their process was killed. Does not import torch."""

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

OWNER = ".owner"
"""File in a directory whose lock the directory's process holds; its content is the name of the host."""


@contextmanager
def temporary_directory(prefix: str) -> Iterator[Path]:
    """Create a temporary directory, and delete it at the end; delete those of killed processes with the same prefix.

    The owner is recognized by a lock, which the kernel releases when the process ends, and not by its process id, which
    another process may have by then.

    Raises:
        OSError: the directory cannot be created.
    """
    _delete_abandoned(prefix)
    directory = Path(tempfile.mkdtemp(prefix=prefix))
    try:
        with (directory / f"{OWNER}.incomplete").open("w") as owner:
            owner.write(os.uname().nodename)
            owner.flush()
            with suppress(OSError):  # a file system without locks; then no other process can take the lock either
                fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
            (directory / f"{OWNER}.incomplete").rename(directory / OWNER)  # it is locked as soon as others see it
            yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _delete_abandoned(prefix: str) -> None:
    """Delete the directories of this user whose processes on this machine have ended."""
    for directory in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
        with suppress(OSError):  # another process deletes it
            if not directory.is_symlink() and directory.stat().st_uid == os.getuid() and _is_abandoned(directory):
                shutil.rmtree(directory, ignore_errors=True)


def _is_abandoned(directory: Path) -> bool:
    """Return whether a lock exists that no process of this machine holds.

    Raises:
        OSError: the directory has no lock, or a process holds it.
    """
    with (directory / OWNER).open() as owner:
        if owner.read() != os.uname().nodename:  # locks may not be shared between the machines of a network file system
            return False
        fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
