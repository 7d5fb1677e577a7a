"""Define errors that a user can fix. They are printed without a traceback, unlike all other exceptions."""

import errno
import os

# Messages of torch, gloo and NCCL for a lost peer; torch has no exception class for errors of gloo.
_OF_CONNECTION = (
    "gloo/transport",
    "NCCL",
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "failed to recv",
)
_OF_STORAGE = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.ESTALE, errno.EINTR)


class UserError(Exception):
    """An error in the user's input, with the problem and a hint.

    Args:
        problem: the invalid input and why it is invalid, in the user's terms (flag, path, file:line).
        hint: what to do or type next. It is printed indented below the problem.
        exit_code: 1 for a failed run, 2 for invalid options.
        is_final: whether the error would repeat if the run were restarted.
    """

    def __init__(self, problem: str, hint: str = "", exit_code: int = 1, *, is_final: bool = True):
        super().__init__(problem)
        self.problem = _printable(problem)
        self.hint = _printable(hint)
        self.exit_code = exit_code
        self.is_final = is_final

    def __str__(self) -> str:
        if not self.hint:
            return self.problem
        return f"{self.problem}\n    {self.hint}"


def clip(text: str, length: int) -> str:
    """Truncate a text, which can be a whole document, to `length` characters for a message."""
    if len(text) <= length:
        return text
    return text[: length - 3] + "..."


_CONTROL = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}


def _printable(text: str) -> str:
    """Escape what is unsafe on a terminal: half a surrogate pair becomes `\\ud83d`, an escape character `\\x1b`."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8").translate(_CONTROL)


class OptionError(UserError):
    """One or more invalid options; all problems of a command line are reported together.

    Args:
        problems: pairs (problem, hint); an empty hint is not printed.
    """

    def __init__(self, problems: list[tuple[str, str]]):
        lines = ["1 problem with these options"]
        if len(problems) > 1:
            lines = [f"{len(problems)} problems with these options"]
        for problem, hint in problems:
            lines.append("  " + problem.replace("\n", "\n  "))
            if hint:
                lines.append(f"      {hint}")
        super().__init__("\n".join(lines), exit_code=2)
        self.problems = problems


class LostRank(UserError):
    """Another rank hangs, and this rank has waited for it.

    Args:
        who: the rank and its host.
        how: how it was found.
    """

    def __init__(self, who: str, how: str):
        hint = "see the log and the processes of its host; --max_restarts restarts"
        super().__init__(f"{who} hangs: {how}", hint, is_final=False)
        self.who = who
        self.how = how


def is_of_connection(error: BaseException) -> bool:
    """Return whether a rank lost its connection to another rank, or waited for it until the time limit."""
    return any(words in str(error) for words in _OF_CONNECTION)


def is_of_storage(error: BaseException) -> bool:
    """Return whether an error is a failure of a disk or a network file system.

    For some of these errors, torch raises a general exception, which is recognized by its message: "open file failed
    with strerror: No space left on device".
    """
    if isinstance(error, OSError):
        return error.errno in _OF_STORAGE
    return isinstance(error, RuntimeError) and any(os.strerror(number) in str(error) for number in _OF_STORAGE)


def is_of_memory(error: BaseException) -> bool:
    """Return whether a GPU or the host ran out of memory.

    For the host, torch raises a general exception, which is recognized by its message.
    """
    name = type(error).__name__  # compared by name, because torch is not imported here
    return isinstance(error, MemoryError) or name == "OutOfMemoryError" or "can't allocate memory" in str(error)


def reason_of(error: BaseException) -> str:
    """Return a short reason why a file could not be written or read, such as a full disk."""
    text = (str(error).strip().splitlines() or [type(error).__name__])[-1]
    if any(os.strerror(number) in text for number in (errno.ENOSPC, errno.EDQUOT)):
        return f"the disk is full ({text[:200]})"
    return text[:200]
