"""Test that atomic writes survive, and that failed writes are reported."""

import resource
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from swiftlite.base.atomic import atomic_write, check_writable
from swiftlite.base.errors import UserError
from tests.messages import naming


def test_a_place_that_cannot_be_written_is_named(tmp_path):
    check_writable("--output_dir", tmp_path / "new" / "out")
    assert list((tmp_path / "new" / "out").iterdir()) == []
    (tmp_path / "file").touch()
    for place in ("/proc/out", str(tmp_path / "file" / "out")):
        with pytest.raises(UserError, match=naming(f"--output_dir {place}")):
            check_writable("--output_dir", Path(place))


def test_several_threads_may_check_one_directory(tmp_path):
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda _: check_writable("--output_dir", tmp_path), range(200)))
    assert list(tmp_path.iterdir()) == []


def test_what_is_written_is_on_disk_before_it_has_its_name(tmp_path, synced):
    atomic_write(tmp_path / "small.json", b"new")
    (content,) = synced
    assert content.parent == tmp_path
    assert content.name != "small.json"


def test_a_write_that_fails_leaves_what_was_there(tmp_path):
    """The kernel rejects writes beyond a size, as on a full disk."""
    path = tmp_path / "small.json"
    atomic_write(path, b"old")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            atomic_write(path, b"x" * 1000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]
