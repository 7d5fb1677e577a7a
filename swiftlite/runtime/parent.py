"""Let a process end with its parent, however the parent ends. Does not import torch."""

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1


def exit_with_parent(parent: int, number: int = signal.SIGKILL) -> None:
    """Let Linux send this process a signal when its parent ends, even by kill -9; no effect on other systems.

    The kernel drops this setting in children of this process, and when the process changes its user.

    Args:
        parent: the parent's process id. A parent that has already ended is detected.
        number: SIGKILL, or SIGTERM for a process that has children to stop.
    """
    try:
        prctl = ctypes.CDLL(None).prctl
    except AttributeError:  # macOS
        return
    prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)
    if os.getppid() != parent:  # it ended before the kernel knew
        os.kill(os.getpid(), number)
