"""End a process when its parent ends, even if the parent is killed. This module does not import torch."""

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1


def exit_with_parent(parent: int, number: int = signal.SIGKILL) -> None:
    """Make Linux send this process a signal when its parent ends, even by kill -9. On other systems, there is no
    effect.

    Children of this process do not inherit the setting, and it is lost when the process changes its user.

    Args:
        parent: the parent's process id. A parent that has already ended is detected.
        number: SIGKILL, or SIGTERM for a process that must stop its children.
    """
    try:
        prctl = ctypes.CDLL(None).prctl
    except AttributeError:  # macOS
        return
    prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)
    if os.getppid() != parent:  # the parent ended before this call
        os.kill(os.getpid(), number)
