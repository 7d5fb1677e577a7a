"""Test the report of a writer of checkpoint files. test_checkpoint.py tests the files."""

import os
import queue

import pytest

from swiftlite.train.checkpoint.files import WriterReport


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
