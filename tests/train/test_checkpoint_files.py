"""Test parts of the writer of checkpoint files. test_checkpoint.py tests the files."""

import os
import queue

import pytest
import torch

from swiftlite.train.checkpoint.files import WriterReport, with_own_storage


def test_a_report_reaches_the_process_that_the_writer_was_forked_from():
    report = WriterReport()
    writer = os.fork()
    if not writer:
        report.put(("results", {"a.distcp": "digest"}))
        os._exit(0)
    os.waitpid(writer, 0)
    assert report.get_nowait() == "results"
    assert report.digests == {"a.distcp": "digest"}


def test_a_writer_that_was_killed_has_said_nothing():
    """megatron-core expects this exception, and then reports that the save has failed."""
    with pytest.raises(queue.Empty):
        WriterReport().get_nowait()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_part_of_a_tensor_is_not_copied(dtype):
    whole = torch.arange(24, dtype=dtype).view(6, 4)
    for part in (*whole.chunk(2), whole[6:], whole):
        own = with_own_storage(part)
        assert torch.equal(own, part)
        assert own.data_ptr() == part.data_ptr()
        assert own.untyped_storage().nbytes() == part.nbytes  # torch.save writes the whole storage
    columns = whole[:, 1:3]
    assert with_own_storage(columns) is columns
