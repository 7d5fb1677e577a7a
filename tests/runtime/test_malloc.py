"""Test in a separate process that freed memory returns to the operating system, because the setting is permanent."""

import platform
import subprocess
import sys

import pytest

# Frees every second of 64 blocks of 4 MB, and prints how many bytes of them remain in memory.
PROGRAM = """
import ctypes, mmap
from swiftlite.runtime.malloc import return_large_blocks

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * mmap.PAGESIZE

libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.malloc.argtypes = [ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]
libc.free(libc.malloc(2**24))  # from here on, glibc keeps smaller blocks
if {is_set}:
    assert return_large_blocks()
before = resident()
blocks = [libc.malloc(2**22) for _ in range(64)]
for block in blocks:
    ctypes.memset(block, 1, 2**22)
for block in blocks[::2]:
    libc.free(block)
print(resident() - before - 32 * 2**22)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has the setting")
def test_freed_blocks_are_returned():
    kept = {}
    for is_set in (False, True):
        command = [sys.executable, "-c", PROGRAM.replace("{is_set}", str(is_set))]
        kept[is_set] = int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert kept[True] < 2**22 < 16 * 2**22 < kept[False]
