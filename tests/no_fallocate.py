"""Make fallocate(2) fail as on a file system that cannot allocate blocks, such as NFS before 4.2."""

import ctypes
import errno
import platform
import struct

_NUMBERS = {"x86_64": 285, "aarch64": 47}
_SET_NO_NEW_PRIVILEGES, _SET_SECCOMP, _FILTER = 38, 22, 2
_LOAD, _JUMP_IF_EQUAL, _RETURN = 0x20, 0x15, 0x06
_ALLOW, _FAIL = 0x7FFF0000, 0x00050000


class _Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_char_p)]


def forbid_fallocate() -> bool:
    """Forbid fallocate for the rest of this process; return whether this was possible."""
    number = _NUMBERS.get(platform.machine())
    if number is None:
        return False
    instructions = [
        (_LOAD, 0, 0, 0),  # the number of the call
        (_JUMP_IF_EQUAL, 0, 1, number),
        (_RETURN, 0, 0, _FAIL | errno.EOPNOTSUPP),
        (_RETURN, 0, 0, _ALLOW),
    ]
    code = b"".join(struct.pack("HBBI", *instruction) for instruction in instructions)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_SET_NO_NEW_PRIVILEGES, 1, 0, 0, 0):
        return False
    return libc.prctl(_SET_SECCOMP, _FILTER, ctypes.byref(_Program(len(instructions), code))) == 0
