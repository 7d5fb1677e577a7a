"""Reduce the memory that the C library keeps after tensors in host memory are freed."""

import ctypes

# Parameters of mallopt(3).
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
LARGE = 2**20
"""Bytes of a large block."""


def return_large_blocks() -> bool:
    """Let malloc return large blocks to the operating system as soon as they are freed.

    By default, glibc raises the size of such blocks up to 32 MB and keeps smaller ones in the heap. Fragments of the
    heap that cannot be used again have 0.4 GB after a training step of an 8B model's head.

    Returns:
        Whether the C library has this setting; only glibc has it.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    # Twice the size, as in glibc's own rule: the default, 128 KB, would return the end of the heap very often.
    return bool(mallopt(_M_MMAP_THRESHOLD, LARGE) and mallopt(_M_TRIM_THRESHOLD, 2 * LARGE))
