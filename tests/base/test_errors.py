"""Test which errors are failures of a disk, and their descriptions."""

import errno

import pytest
import torch

from swiftlite.base.errors import UserError, is_of_memory, is_of_storage, reason_of

# torch.save's, where the file cannot be opened (torch 2.13). Python tries again what was interrupted, torch does not.
FAILED = "[enforce fail at inline_container.cc:747] . open file failed with strerror: "
OF_TORCH = RuntimeError(f"{FAILED}No space left on device")
INTERRUPTED = RuntimeError(f"{FAILED}Interrupted system call")


@pytest.mark.parametrize(
    "error", [OSError(errno.ENOSPC, "full"), OSError(errno.EIO, "read"), OF_TORCH, INTERRUPTED], ids=str
)
def test_a_failing_disk(error):
    assert is_of_storage(error)


@pytest.mark.parametrize(
    "error", [PermissionError(errno.EACCES, "denied"), ValueError("Input/output error"), RuntimeError("shape")], ids=str
)
def test_not_a_failing_disk(error):
    assert not is_of_storage(error)


def test_no_memory():
    with pytest.raises(RuntimeError) as raised:
        torch.empty(2**46)
    assert is_of_memory(raised.value)
    assert is_of_memory(torch.OutOfMemoryError("CUDA out of memory."))
    assert not is_of_memory(RuntimeError("shape"))


def test_a_full_disk_by_that_name():
    reason = reason_of(OF_TORCH)
    assert "No space left on device" in reason
    assert reason != str(OF_TORCH)
    assert reason_of(INTERRUPTED) == str(INTERRUPTED)


def test_what_a_file_holds_does_not_draw_on_the_terminal():
    error = UserError("a tensor called \x1b[2K\rswiftlite: done", "\ud83d")
    assert str(error) == "a tensor called \\x1b[2K\\x0dswiftlite: done\n    \\ud83d"
