"""Limit what the process of a program can do. This module imports only the standard library.

Landlock, which needs no privileges, keeps the process from other files, other processes' memory and, since Linux 6.12,
from signals to them. Without it (Linux before 5.13, other systems), the process has the permissions of its user.
"""

import ctypes
import os
import resource
import sys
from contextlib import suppress
from pathlib import Path

MAX_MEMORY = 2 * 1024**3
MAX_FILE = 16 * 1024**2
MAX_TASKS = 64
"""Processes and threads of a program."""
FIRST_USER = 1_000_000_000
"""Number of the first of the users as which programs run if the trainer runs as root."""

_PR_SET_DUMPABLE, _PR_SET_KEEPCAPS, _PR_SET_CHILD_SUBREAPER, _PR_SET_NO_NEW_PRIVS = 4, 8, 36, 38
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446  # system calls, with the same numbers on all processors
_EXECUTE, _WRITE_FILE, _READ = 1 << 0, 1 << 1, 1 << 2 | 1 << 3
_CHANGE = _WRITE_FILE | 0x1FF0  # also create and remove files of all kinds
_SCOPED = 3  # no abstract sockets and no signals out of the process and its children
_CAP_DAC_READ_SEARCH, _CAPABILITY_VERSION = 2, 0x20080522
SYSTEM = ("/usr", "/lib", "/lib64", "/bin", "/sys", "/proc", "/nix", "/opt/conda")
"""Directories that Python and its libraries read."""
SETTINGS = ("ld.so.cache", "localtime", "passwd", "group", "hosts", "resolv.conf", "nsswitch.conf", "mime.types", "ssl")
"""Files in /etc that Python and its libraries read; others, such as shadow, can contain secrets."""


def limit_resources(cpu_seconds: int) -> None:
    """Set limits of processor time, memory and the size of files."""
    limits = {
        resource.RLIMIT_CPU: cpu_seconds,
        resource.RLIMIT_AS: MAX_MEMORY,
        resource.RLIMIT_FSIZE: MAX_FILE,
        resource.RLIMIT_CORE: 0,
    }
    for kind, limit in limits.items():
        _set_limit(kind, limit)


def hide_memory() -> None:
    """Deny other processes of this user access to the memory and the open files of this process (Linux)."""
    _prctl(_PR_SET_DUMPABLE, 0)


def adopt_orphans() -> None:
    """Become the parent of processes whose parent has ended, so that `descendants` finds them (Linux)."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def children() -> list[int]:
    """Return the processes whose parent is this one; empty if there is no /proc."""
    found = []
    for file in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            if int(file.read_text().rpartition(")")[2].split()[1]) == os.getpid():
                found.append(int(file.parent.name))
    return found


def isolate(directory: str) -> None:
    """Take away everything that this process does not need to execute a program in a directory."""
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)
    if os.getuid() == 0 and sys.platform == "linux":
        _drop_root(directory)
    _set_limit(resource.RLIMIT_NPROC, MAX_TASKS + _num_tasks())
    _restrict_files(directory)


def _drop_root(directory: str) -> None:
    """Change from root to a user that no other process has, without capabilities except to read files.

    Limits of processes do not hold for root, and root can send signals to the trainer. In a container whose root cannot
    read the files of this Python as another user, the process stays root without capabilities.
    """
    is_public = all(map(_is_public, (sys.prefix, sys.base_prefix)))
    kept = 0 if is_public else _permitted() & 1 << _CAP_DAC_READ_SEARCH
    if kept or is_public:
        user = FIRST_USER + os.getpid()
        with suppress(OSError):  # a container may have no such user
            os.chown(directory, user, user)
            os.setgroups([])
            os.setresgid(user, user, user)
            _prctl(_PR_SET_KEEPCAPS, 1)
            os.setresuid(user, user, user)
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION, 0)
    sets = (ctypes.c_uint32 * 6)(kept, kept, 0, 0, 0, 0)  # effective, permitted, inheritable; the lower and upper half
    ctypes.CDLL(None).capset(header, sets)


def _permitted() -> int:
    """Return the capabilities of this process as bits."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next((int(line.split()[1], 16) for line in lines if line.startswith("CapPrm")), 0)


def _is_public(path: str) -> bool:
    return all(each.stat().st_mode & 1 for each in (Path(path), *Path(path).parents))


def _num_tasks() -> int:
    """Return how many threads this user has, which count towards the limit of new ones."""
    number = 0
    for directory in Path("/proc").glob("[0-9]*/task"):
        with suppress(OSError):
            if directory.stat().st_uid == os.getuid():
                number += len(list(directory.iterdir()))
    return number


def landlock_version() -> int:
    """Return the version of the kernel's Landlock; 0 or -1 if it has none. Version 6 (Linux 6.12) limits signals."""
    if sys.platform != "linux":
        return 0
    return ctypes.CDLL(None).syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), 1)


def _restrict_files(directory: str) -> None:
    """Allow to read Python and the system, and to write to one directory, with Landlock where the kernel has it."""
    libc = ctypes.CDLL(None, use_errno=True)
    version = landlock_version()
    if version < 1:
        return
    change = _CHANGE | (1 << 14 if version >= 3 else 0)  # truncate
    handled = change | _READ | _EXECUTE
    ruleset = (ctypes.c_uint64 * 3)(handled, 0, _SCOPED)
    size = 24 if version >= 6 else 8
    rules = libc.syscall(_CREATE_RULESET, ruleset, ctypes.c_size_t(size), 0)
    of_python = {sys.prefix, sys.base_prefix, *sys.path}
    for path in (*SYSTEM, *(f"/etc/{name}" for name in SETTINGS), *of_python):
        _allow(libc, rules, path, _READ | _EXECUTE)
    _allow(libc, rules, directory, handled)
    is_file = handled & (_WRITE_FILE | 1 << 2 | 1 << 14)
    for path in (os.devnull, "/dev/zero", "/dev/random", "/dev/urandom"):
        _allow(libc, rules, path, is_file)
    if libc.syscall(_RESTRICT_SELF, rules, 0):
        raise OSError(ctypes.get_errno(), "landlock_restrict_self")
    os.close(rules)


def _allow(libc: ctypes.CDLL, rules: int, path: str, access: int) -> None:
    """Add a rule for the files below a path, which may be missing."""
    try:
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return
    if not Path(path).is_dir():
        access &= _EXECUTE | _WRITE_FILE | 1 << 2 | 1 << 14  # rights of directories are invalid for a file
    rule = access.to_bytes(8, sys.byteorder) + descriptor.to_bytes(4, sys.byteorder)
    libc.syscall(_ADD_RULE, rules, 1, rule, 0)
    os.close(descriptor)


def _set_limit(kind: int, limit: int) -> None:
    with suppress(ValueError, OSError):  # a lower limit of the user remains
        resource.setrlimit(kind, (limit, limit))


def _prctl(option: int, value: int) -> None:
    with suppress(AttributeError):  # macOS
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)
