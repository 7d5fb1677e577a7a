"""A file of rows with a maximum size, to which several processes append."""

import fcntl
import os
from pathlib import Path

from swiftlite.base.errors import UserError

MODE = 0o600  # conversations are private


class LogFile:
    """A file that is renamed when it is full: `log.jsonl` replaces `log.1.jsonl`, and a new `log.jsonl` begins.

    Args:
        max_bytes: maximum size of the file. A single longer line is written to an empty file.
    """

    def __init__(self, path: Path, max_bytes: int):
        self.path = path
        self._file = path.resolve()  # renaming a link would leave the file that it points to
        self._older = self._file.with_name(f"{path.stem}.1{path.suffix}")
        self._max_bytes = max_bytes

    def check(self, option: str) -> None:
        """Create the file if it is missing, and check that it can be written. Only its owner can read it afterwards.

        Raises:
            UserError: the file cannot be written; the error names the option.
        """
        hint = "give a file in an existing directory that this user can write"
        if self._file.exists() and not self._file.is_file():  # opening a pipe would block
            raise UserError(f"{option} {self.path} is not a file", hint)
        try:
            descriptor = self._open()
            try:
                os.fchmod(descriptor, MODE)  # an existing file may have another mode
            finally:
                os.close(descriptor)
        except OSError as error:
            problem = f"{option} {self.path} cannot be written: {error.strerror}"
            raise UserError(problem, hint) from None

    def append(self, line: bytes) -> None:
        """Append a line.

        Raises:
            OSError: the line cannot be written; the file is unchanged.
        """
        while not self._append(line):
            pass

    def _append(self, line: bytes) -> bool:
        """Append a line; return False if the path has a new file, which requires another attempt."""
        descriptor = self._open()
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            if not self._is_current(descriptor):
                return False  # another process has renamed it
            size = os.fstat(descriptor).st_size
            if size and size + len(line) > self._max_bytes:
                # Under the lock of the renamed file: a process that waits for it finds that it must open the new one.
                self._file.replace(self._older)
                return False
            if size and os.pread(descriptor, 1, size - 1) != b"\n":
                line = b"\n" + line  # an editor may have left the last line without its end
            if os.write(descriptor, line) < len(line):
                os.ftruncate(descriptor, size)
                raise OSError("the line was written only in part")
            return True
        finally:
            os.close(descriptor)

    def _open(self) -> int:
        return os.open(self._file, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, MODE)

    def _is_current(self, descriptor: int) -> bool:
        try:
            return os.path.samestat(os.fstat(descriptor), self._file.stat())
        except FileNotFoundError:
            return False
