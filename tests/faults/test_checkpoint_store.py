"""Test runs with --checkpoint_store that are killed, lose their directory, and resume from a local S3 server."""

import shutil
import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from swiftlite.store.objects import ObjectStore
from swiftlite.store.run_store import RUN_FILE, RunStore
from tests.faults.hunt import COMMANDS, SFT, Command, content_of_run, run, write_files
from tests.forked import SignalAtCall
from tests.store.s3 import S3, faulty_line, s3_server
from tests.tiers import some_of

PLACES = [
    ("claim_store", 1),
    ("RunStore.put_checkpoint", 1),
    ("ObjectStore.put", 3),  # files of the run
    ("ObjectStore.put", 12),  # files of the first checkpoint
    ("ObjectStore.put", 14),
    ("RunStore.delete_oldest", 1),
    ("Trainer.step", 4),
    ("Checkpointer.save", 2),
    ("RunStore.put_checkpoint", 2),
    ("RunStore.delete_oldest", 4),
    ("ObjectStore.delete", 1),
    ("write_report", 1),
    ("Copies.finish", 1),
]
FETCHING = [("RunStore.get_checkpoint", 1), ("ObjectStore.get", 2), ("fsync_tree", 1)]

WITH_STEP_2 = SignalAtCall("RunStore.delete_oldest", 2, in_threads=True)
"""After this signal, the store contains step 2 and no other. The trainer can be at any later step."""


@pytest.fixture(scope="module")
def s3():
    with s3_server() as server:
        yield server


@pytest.fixture
def url(s3: S3, monkeypatch) -> str:
    for name, value in s3.environment.items():
        monkeypatch.setenv(name, value)
    return s3.new_url()


@pytest.fixture(scope="module")
def words(tmp_path_factory) -> dict[str, str]:
    return write_files(tmp_path_factory.mktemp("inputs"))


@pytest.fixture(scope="module")
def unbroken(words, tmp_path_factory) -> dict[str, Any]:
    """Return the content of a run that was neither stopped nor copied."""
    out = tmp_path_factory.mktemp("unbroken")
    code, errors, _ = run(COMMANDS["sft_limit_1"], words, out)
    assert code == 0, errors
    return content_of_run(out)


def command_for(url: str) -> Command:
    return replace(COMMANDS["sft_limit_1"], argv=f"{SFT} --save_total_limit 1 --checkpoint_store {url}")


def without_id(content: dict[str, Any]) -> dict[str, Any]:
    """Return the content without the file with the id of the run, which a run without a store does not have."""
    return content | {"names": [name for name in content["names"] if Path(name).name != RUN_FILE]}


def stored(url: str, directory: Path) -> Path:
    """Copy the newest checkpoint of a store to `directory/run`, which verifies its digests."""
    store = RunStore(ObjectStore.open(url))
    store.get_checkpoint(store.steps()[-1], directory / "run")
    return directory


@pytest.mark.parametrize(("function", "number"), some_of(PLACES, ("ObjectStore.put", 12)))
def test_a_killed_run_resumes_from_the_store(words, unbroken, url, function, number, tmp_path):
    command = command_for(url)
    at = SignalAtCall(function, number, in_threads=True)
    code, errors, _ = run(command, words, tmp_path, signal_at=at)
    assert code == -signal.SIGKILL, errors
    store = RunStore(ObjectStore.open(url))
    if store.steps():
        stored(url, tmp_path / "whole")
    shutil.rmtree(tmp_path / "run", ignore_errors=True)
    code, errors, _ = run(command, words, tmp_path, is_again=True)
    assert code == 0, errors
    shutil.rmtree(tmp_path / "whole", ignore_errors=True)
    assert without_id(content_of_run(tmp_path)) == unbroken
    assert store.steps() == [4]
    found = content_of_run(stored(url, tmp_path / "back"))
    assert found["checkpoints"] == unbroken["checkpoints"]
    assert found["metrics"] == unbroken["metrics"]


@pytest.mark.parametrize(("function", "number"), some_of(FETCHING))
def test_a_killed_fetch_is_repeated(words, unbroken, url, function, number, tmp_path):
    command = command_for(url)
    code, errors, _ = run(command, words, tmp_path, signal_at=WITH_STEP_2)
    assert code == -signal.SIGKILL, errors
    shutil.rmtree(tmp_path / "run")
    code, errors, _ = run(
        command, words, tmp_path, is_again=True, signal_at=SignalAtCall(function, number, in_threads=True)
    )
    assert code == -signal.SIGKILL, errors
    assert not list((tmp_path / "run").glob("checkpoint-*"))
    code, errors, _ = run(command, words, tmp_path, is_again=True)
    assert code == 0, errors
    assert without_id(content_of_run(tmp_path)) == unbroken


@pytest.mark.slow
def test_a_store_that_is_down_at_a_resume(words, unbroken, s3, url, monkeypatch, tmp_path):
    """The run continues from its directory, and copies when the store answers again."""
    command = command_for(url)
    code, errors, _ = run(command, words, tmp_path, signal_at=WITH_STEP_2)
    assert code == -signal.SIGKILL, errors
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
    metrics = tmp_path / "run" / "metrics.jsonl"
    with ThreadPoolExecutor(1) as thread:
        running = thread.submit(run, command, words, tmp_path, is_again=True)
        while "store_down" not in metrics.read_text():
            assert not running.done(), running.result()
            time.sleep(0.05)
        with faulty_line(s3, port):
            code, errors, _ = running.result()
    assert code == 0, errors
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3.endpoint)
    lines = [line for line in metrics.read_text().splitlines(keepends=True) if "store_down" not in line]
    metrics.write_text("".join(lines))
    assert without_id(content_of_run(tmp_path)) == unbroken
    assert content_of_run(stored(url, tmp_path / "back"))["checkpoints"] == unbroken["checkpoints"]


@pytest.mark.slow
@pytest.mark.gloo
def test_another_layout_resumes_from_the_store_as_from_the_directory(words, url, tmp_path):
    """The first process saves step 2 and is killed. Two processes continue, from the store and from the directory."""
    command = command_for(url)
    code, errors, _ = run(command, words, tmp_path, signal_at=WITH_STEP_2)
    assert code == -signal.SIGKILL, errors
    local = tmp_path / "local"
    shutil.copytree(tmp_path / "run", local / "run")
    shutil.rmtree(tmp_path / "run")
    shutil.rmtree(local / "run" / "checkpoint-4", ignore_errors=True)
    layout = " --resume --pipeline_model_parallel_size 2"
    from_store = replace(command, again=layout, processes=2)
    code, errors, _ = run(from_store, words, tmp_path, is_again=True)
    assert code == 0, errors
    from_directory = replace(COMMANDS["sft_limit_1"], again=layout, processes=2)
    code, errors, _ = run(from_directory, words, local, is_again=True)
    assert code == 0, errors
    found: dict[str, Any] = content_of_run(tmp_path)
    found["names"] = [name for name in found["names"] if not name.startswith("local")]
    expected = content_of_run(local)
    assert found == expected
