"""Errors that a user can mend. They print without a traceback; every other exception keeps its own."""

import errno
import os

_OF_STORAGE = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.ESTALE, errno.EINTR)


class UserError(Exception):
    """Something the user gave cannot be: says what, why, and what to type next.

    Args:
        problem: what was given and why it cannot be, in the user's words (flag, path, file:line).
        hint: the next thing to do; printed indented below the problem.
        exit_code: 1 for a failed run, 2 for options that cannot be.
    """

    def __init__(self, problem: str, hint: str = "", exit_code: int = 1):
        super().__init__(problem)
        self.problem = _printable(problem)
        self.hint = _printable(hint)
        self.exit_code = exit_code

    def __str__(self) -> str:
        return f"{self.problem}\n    {self.hint}" if self.hint else self.problem


def clip(text: str, length: int) -> str:
    """A text for a message, cut if it is longer: it may be a whole document."""
    return text if len(text) <= length else text[: length - 3] + "..."


_CONTROL = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}


def _printable(text: str) -> str:
    """What files may hold and no terminal should get: half a surrogate pair as `\\ud83d`, an escape as `\\x1b`."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8").translate(_CONTROL)


class OptionError(UserError):
    """One or more options that cannot be; all problems of a command line are reported together.

    Args:
        problems: pairs of (problem, hint); an empty hint is left out.
    """

    def __init__(self, problems: list[tuple[str, str]]):
        lines = [f"{len(problems)} problem{'s' if len(problems) > 1 else ''} with these options"]
        for problem, hint in problems:
            lines.append("  " + problem.replace("\n", "\n  "))
            if hint:
                lines.append(f"      {hint}")
        super().__init__("\n".join(lines), exit_code=2)
        self.problems = problems


def is_of_storage(error: BaseException) -> bool:
    """Whether a disk or a network file system failed: nothing that a change of options or of the program would mend.

    Of some errors torch keeps only the words: "open file failed with strerror: No space left on device".
    """
    if isinstance(error, OSError):
        return error.errno in _OF_STORAGE
    return isinstance(error, RuntimeError) and any(os.strerror(number) in str(error) for number in _OF_STORAGE)


def is_of_memory(error: BaseException) -> bool:
    """Whether a GPU or the machine had no room for a tensor; of a CPU torch keeps only the words."""
    name = type(error).__name__  # torch's class, without torch
    return isinstance(error, MemoryError) or name == "OutOfMemoryError" or "can't allocate memory" in str(error)


def reason_of(error: BaseException) -> str:
    """Why a file could not be written or read, in a few words: a full disk by that name."""
    text = (str(error).strip().splitlines() or [type(error).__name__])[-1]
    if any(os.strerror(number) in text for number in (errno.ENOSPC, errno.EDQUOT)):
        return f"the disk is full ({text[:200]})"
    return text[:200]
