"""Test the error file of a rank, as torchelastic reads it."""

import time

import pytest
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from swiftlite.launch import failure


@pytest.fixture
def error_file(tmp_path, monkeypatch):
    """Return the file to which a rank of swiftlite's launcher reports."""
    monkeypatch.setenv(failure.FOLDER, str(tmp_path))
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    return tmp_path / "error.json"


@pytest.mark.parametrize(
    ("message", "is_lost"),
    [("what went wrong", False), ("[../third_party/gloo/transport/tcp/pair.cc:534] Connection closed by peer", True)],
)
def test_torchelastic_reads_the_report(error_file, message, is_lost):
    before = time.time()
    with pytest.raises(RuntimeError) as raised:
        raise RuntimeError(message)
    assert failure.report(raised.value, 3) is is_lost
    read = ProcessFailure(local_rank=0, pid=1, exitcode=1, error_file=str(error_file))
    assert read.message.startswith("Traceback")
    assert read.message.endswith(f"RuntimeError: {message}\n")
    assert int(before) <= read.timestamp <= time.time()
    report = failure.Failure(**read.error_file_data)
    assert (report.code, report.is_lost) == (3, is_lost)
    assert [path.name for path in error_file.parent.iterdir()] == ["error.json"]


def test_without_a_launcher_of_ours_nothing_is_reported(error_file, monkeypatch):
    """torchrun started by hand also sets its variable, but would not show the traceback."""
    monkeypatch.delenv(failure.FOLDER)
    assert not failure.report(RuntimeError("Connection reset by peer"), 1)
    assert not error_file.exists()


def test_a_launcher_that_is_gone_gets_no_report(error_file, monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "gone" / "error.json"))
    assert not failure.report(RuntimeError("Connection reset by peer"), 1)
