"""Test copies of runs in a directory and in a local S3 server, with files in place of real checkpoints."""

import json
import os
import time
from pathlib import Path, PurePosixPath

import pytest
import torch.distributed as dist

from swiftlite.base.errors import UserError
from swiftlite.runtime.progress import RESTARTS
from swiftlite.store import run_store
from swiftlite.store.best import Evaluations, chosen_checkpoint
from swiftlite.store.copies import Copies, Job, copies_of
from swiftlite.store.manifest import MANIFEST_FILE, write_manifest
from swiftlite.store.objects import ObjectStore, Stored, StoreError, check_store, digests_of, url_of
from swiftlite.store.retention import EPHEMERAL_FILE
from swiftlite.store.run_store import RUN_FILE, RunStore, claim_store, fetch_newest
from swiftlite.store.shares import ALONE, Shares
from tests.messages import mentions
from tests.store.s3 import S3, content_of, faulty_line, s3_server


@pytest.fixture(scope="module")
def s3():
    with s3_server() as server:
        yield server


@pytest.fixture(params=["s3", "directory"])
def url(request, s3: S3, monkeypatch, tmp_path) -> str:
    for name, value in s3.environment.items():
        monkeypatch.setenv(name, value)
    if request.param == "s3":
        return s3.new_url()
    return url_of(str(tmp_path / "a store"))


@pytest.fixture(autouse=True)
def _without_pauses(monkeypatch):
    monkeypatch.setattr(run_store, "_PAUSE_SECONDS", 0)
    monkeypatch.setattr(run_store, "_FIRST_SECONDS", 0.2)
    monkeypatch.setattr(run_store, "_OTHERWISE_SECONDS", 0.2)
    monkeypatch.setattr(run_store, "_ALONE_SECONDS", 0.4)


@pytest.fixture
def line(s3: S3, monkeypatch):
    """Return a line to the server of the URLs `s3`, which damages what a test requests."""
    with faulty_line(s3) as line:
        for name, value in (s3.environment | {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{line.server_port}"}).items():
            monkeypatch.setenv(name, value)
        yield line


@pytest.fixture
def run(tmp_path) -> Path:
    """Return a directory with the files of a run, without checkpoints."""
    directory = tmp_path / "run"
    (directory / "source").mkdir(parents=True)
    (directory / "source" / "config.json").write_text("{}")
    (directory / "args.json").write_text('{"lr": 1}')
    (directory / "metrics.jsonl").write_text("")
    (directory / ".lock").write_text("")
    return directory


def prepare_store(run: Path, url: str, *, resume: bool) -> None:
    """Do what a command does with a store before the first step."""
    if resume:
        fetch_newest(run, url)
    claim_store(run, url, resume=resume)


def add_checkpoint(run: Path, step: int, content: str = "", *, num_ranks: int = 1, is_ephemeral: bool = False) -> Path:
    checkpoint = run / f"checkpoint-{step}"
    checkpoint.mkdir()
    for rank in range(num_ranks):
        (checkpoint / f"__{rank}_0.distcp").write_text(f"tensors of step {step} {content}" * 1000)
    (checkpoint / "trainer_state.json").write_text(f'{{"step": {step}}}')
    if is_ephemeral:
        (checkpoint / EPHEMERAL_FILE).write_text("ephemeral")
    write_manifest(checkpoint, {})
    return checkpoint


def files(directory: Path) -> dict[str, bytes]:
    found = [path for path in directory.rglob("*") if path.is_file() and path.name != ".lock"]
    return {path.relative_to(directory).as_posix(): path.read_bytes() for path in found}


def decisions(run: Path) -> list[dict]:
    """Return the decisions in metrics.jsonl."""
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if "decision" in line]


def store_of(url: str) -> RunStore:
    return RunStore(ObjectStore.open(url))


def test_a_run_comes_back(url, run, tmp_path):
    prepare_store(run, url, resume=False)
    with copies_of(run, url, keep=None) as copies:
        assert copies is not None
        copies.add(add_checkpoint(run, 2))
        (run / "report.html").write_text("written at the end")
    assert store_of(url).steps() == [2]
    assert content_of(url) == files(run)
    other = tmp_path / "other"
    prepare_store(other, url, resume=True)
    assert files(other) == files(run)


def test_no_option_no_copies(run):
    with copies_of(run, None, keep=None) as copies:
        assert copies is None


def test_old_checkpoints_and_remains_are_deleted(url, run):
    prepare_store(run, url, resume=False)
    store = store_of(url)
    store.objects.put("checkpoint-1/__0_0.distcp", b"of a killed run")
    with copies_of(run, url, keep=2) as copies:
        assert copies is not None
        for step in (2, 4, 6):
            checkpoint = add_checkpoint(run, step)
            copies.add(checkpoint)
            while copies.in_use:
                time.sleep(0.01)
    assert store.steps() == [4, 6]
    assert {name.partition("/")[0] for name in store.objects.list() if "checkpoint-" in name} == {
        "checkpoint-4",
        "checkpoint-6",
    }


def test_an_ephemeral_copy_is_deleted_when_there_is_a_newer_one(url, run):
    prepare_store(run, url, resume=False)
    store = store_of(url)
    found = []
    copies = Copies(store, run, keep=1)
    for step in (2, 3, 4, 6, 7):
        copies.add(add_checkpoint(run, step, is_ephemeral=step in (3, 4, 7)))
        while copies.in_use:
            time.sleep(0.01)
        found.append(store.steps())
    copies.finish()
    assert found == [[2], [2, 3], [2, 4], [6], [6, 7]]


def test_the_best_copy_is_kept_and_comes_back(url, run, tmp_path):
    """A new machine fetches the newest checkpoint and the best one."""
    prepare_store(run, url, resume=False)
    with copies_of(run, url, 1) as copies:
        assert copies is not None
        evaluations = Evaluations("eval_loss", False, is_chosen=True)
        for step, value in enumerate((3.0, 1.0, 2.0, 4.0), start=1):
            evaluations = evaluations.having(step, value)
            evaluations.write(run)
            copies.add(add_checkpoint(run, step))
            while copies.in_use:
                time.sleep(0.01)
    assert store_of(url).steps() == [2, 4]
    other = tmp_path / "other machine"
    prepare_store(other, url, resume=True)
    assert sorted(path.name for path in other.glob("checkpoint-*")) == ["checkpoint-2", "checkpoint-4"]
    assert chosen_checkpoint(other) == other / "checkpoint-2"


def test_a_best_checkpoint_that_was_not_copied_is_copied_at_the_end(url, run):
    prepare_store(run, url, resume=False)
    evaluations = Evaluations("eval_loss", False).having(1, 1.0).having(2, 2.0)
    evaluations.write(run)
    add_checkpoint(run, 1)  # as if it had waited too long
    with copies_of(run, url, 1) as copies:
        assert copies is not None
        copies.add(add_checkpoint(run, 2))
    assert store_of(url).steps() == [1, 2]


def test_an_ephemeral_checkpoint_does_not_take_the_place_of_another_one(run, tmp_path, monkeypatch):
    copied = []
    monkeypatch.setattr(RunStore, "put_checkpoint", lambda self, checkpoint, shares: copied.append(checkpoint.name))
    url = url_of(str(tmp_path / "store"))
    prepare_store(run, url, resume=False)
    copies = Copies(store_of(url), run)
    with copies._changed:  # the thread takes no checkpoint meanwhile
        for step in (2, 3, 4):
            copies.add(add_checkpoint(run, step, is_ephemeral=step == 4))
    copies.finish()
    assert copied == ["checkpoint-3"]


@pytest.fixture
def ranks() -> list[Shares]:
    """Return the shares of three ranks that can send each other messages."""
    messages = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
    return [Shares(rank, 3, messages) for rank in range(3)]


def test_each_rank_copies_the_files_that_it_has_written(url, run, ranks, tmp_path):
    prepare_store(run, url, resume=False)
    first, *others = [Copies(store_of(url), run, shares=shares) for shares in ranks]
    for step in (2, 4):
        checkpoint = add_checkpoint(run, step, num_ranks=5)
        for number, copies in enumerate(others, start=1):
            shares = ranks[number]
            names = shares.own(path.name for path in checkpoint.iterdir())
            assert sorted(names) == [f"__{rank}_0.distcp" for rank in range(number, 5, 3)]
            copies.add(checkpoint)
            while copies.in_use:
                time.sleep(0.01)
            stored = {PurePosixPath(name).name for name in store_of(url).objects.list(checkpoint.name)}
            assert stored >= {*names}
            assert store_of(url).steps() == [2][: step // 4]  # the first rank completes it
        assert "__0_0.distcp" not in stored
        first.add(checkpoint)
        while first.in_use:
            time.sleep(0.01)
    for copies in (*others, first):
        copies.finish()
    assert content_of(url) == files(run)


def test_the_first_rank_copies_what_others_could_not(run, ranks, tmp_path):
    url = url_of(str(tmp_path / "store"))
    prepare_store(run, url, resume=False)
    broken = store_of(url_of(str(tmp_path / "broken")))
    (tmp_path / "broken").rmdir()
    (tmp_path / "broken").write_text("")  # a file in place of the directory
    copies = [Copies(store_of(url), run, shares=ranks[0]), *(Copies(broken, run, shares=each) for each in ranks[1:])]
    checkpoint = add_checkpoint(run, 2, num_ranks=3)
    for each in copies:
        each.add(checkpoint)
    for each in reversed(copies):
        each.finish()
    assert content_of(url) == files(run)


def test_a_rank_without_a_report_holds_up_no_run_that_has_failed(run, ranks, tmp_path):
    url = url_of(str(tmp_path / "store"))
    prepare_store(run, url, resume=False)

    def fail() -> None:
        with copies_of(run, url, None, ranks[0]) as copies:
            assert copies is not None
            copies.add(add_checkpoint(run, 2, num_ranks=3))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert content_of(url) == files(run)


def test_a_rank_leaves_a_complete_copy_and_another_run_alone(run, ranks, tmp_path):
    url = url_of(str(tmp_path / "store"))
    prepare_store(run, url, resume=False)
    store_of(url).put_checkpoint(add_checkpoint(run, 2, num_ranks=3))
    before = content_of(url)
    (run / "checkpoint-2").rename(run / "old")
    checkpoint = add_checkpoint(run, 2, "changed", num_ranks=3)
    assert store_of(url).put_share(checkpoint, ranks[1]) == []
    other = tmp_path / "other"
    other.mkdir()
    assert store_of(url).put_share(add_checkpoint(other, 4, num_ranks=3), ranks[1]) == []
    assert content_of(url) == before


def test_a_rank_reports_checkpoints_that_it_does_not_reach(run, ranks, tmp_path):
    url = url_of(str(tmp_path / "store"))
    prepare_store(run, url, resume=False)
    copies = Copies(store_of(url), run, shares=ranks[1])
    with copies._changed:  # the thread takes no checkpoint meanwhile
        for step in (2, 4):
            copies.add(add_checkpoint(run, step, num_ranks=3))
    copies.finish()
    ranks[2].of(1).report([])
    ranks[2].of(2).report(["__2_0.distcp"])
    assert ranks[0].of(1).copied_by_others() == set()
    assert ranks[0].of(2).copied_by_others() == {"__1_0.distcp", "__2_0.distcp"}


def test_a_directory_keeps_no_empty_directories(run, tmp_path):
    url = url_of(str(tmp_path / "store"))
    claim_store(run, url, resume=False)
    store_of(url).put_checkpoint(add_checkpoint(run, 2))
    store_of(url).put_checkpoint(add_checkpoint(run, 4))
    store_of(url).delete_oldest(1, 5)
    assert sorted(path.name for path in (tmp_path / "store").glob("checkpoint-*")) == ["checkpoint-4"]


def test_a_checkpoint_that_changed_is_replaced(url, run):
    prepare_store(run, url, resume=False)
    store = store_of(url)
    checkpoint = add_checkpoint(run, 2)
    assert store.put_checkpoint(checkpoint) > 0
    assert store.put_checkpoint(checkpoint) == 0
    for path in checkpoint.iterdir():
        path.unlink()
    checkpoint.rmdir()
    assert store.put_checkpoint(add_checkpoint(run, 2, "again")) > 0
    assert content_of(url) == files(run)


def test_an_incomplete_checkpoint_is_not_used(url, run, tmp_path):
    prepare_store(run, url, resume=False)
    store = store_of(url)
    store.put_checkpoint(add_checkpoint(run, 2))
    store.objects.put("checkpoint-4/trainer_state.json", b"{}")
    assert store.steps() == [2]
    prepare_store(tmp_path / "other", url, resume=True)
    assert [path.name for path in (tmp_path / "other").glob("checkpoint-*")] == ["checkpoint-2"]


def test_a_newer_checkpoint_of_the_directory_is_kept(url, run):
    prepare_store(run, url, resume=False)
    store_of(url).put_checkpoint(add_checkpoint(run, 2))
    add_checkpoint(run, 4)
    (run / "args.json").write_text('{"lr": 2}')
    before = files(run)
    prepare_store(run, url, resume=True)
    assert files(run) == before


@pytest.mark.parametrize("harm", ["lost", "other", "longer"])
def test_a_copy_is_repaired(url, run, harm):
    prepare_store(run, url, resume=False)
    checkpoint = add_checkpoint(run, 2)
    store_of(url).put_checkpoint(checkpoint)
    name, content = "checkpoint-2/__0_0.distcp", (checkpoint / "__0_0.distcp").read_bytes()
    if harm == "lost":
        store_of(url).objects.delete([name])
    else:
        store_of(url).objects.put(name, content + b"." if harm == "longer" else b"." + content[1:])
    assert store_of(url).put_checkpoint(checkpoint) == len(content)
    (decision,) = decisions(run)
    assert decision["fault"] == "damaged_copy"
    store_of(url).put_files(run)
    assert content_of(url) == files(run)
    assert store_of(url).put_checkpoint(checkpoint) == 0


def test_a_resumed_run_repairs_the_copy_of_its_checkpoint(url, run):
    prepare_store(run, url, resume=False)
    checkpoint = add_checkpoint(run, 2)
    store_of(url).put_checkpoint(checkpoint)
    store_of(url).objects.delete(["checkpoint-2/__0_0.distcp"])
    with copies_of(run, url, keep=None) as copies:
        assert copies is not None
        copies.add_alone(checkpoint)
    assert content_of(url) == files(run)


def test_a_file_that_its_disk_damaged_is_not_copied(url, run):
    prepare_store(run, url, resume=False)
    checkpoint = add_checkpoint(run, 2)
    content = (checkpoint / "__0_0.distcp").read_bytes()
    (checkpoint / "__0_0.distcp").write_bytes(b"." + content[1:])
    with pytest.raises(StoreError, match=r"__0_0.distcp.*SHA256SUMS"):
        store_of(url).put_checkpoint(checkpoint)
    assert store_of(url).steps() == []


def test_a_copy_has_no_files_of_another_layout(url, run, tmp_path):
    prepare_store(run, url, resume=False)
    store_of(url).put_checkpoint(add_checkpoint(run, 2))
    store_of(url).objects.put("checkpoint-2/__3_0.distcp", b"of four ranks")
    store_of(url).objects.put(f"checkpoint-2/{MANIFEST_FILE}", b"of four ranks")
    store_of(url).put_checkpoint(run / "checkpoint-2")
    prepare_store(tmp_path / "other", url, resume=True)
    assert files(tmp_path / "other") == files(run)


def test_what_a_line_damages_is_sent_again(s3, line, run, tmp_path):
    url = s3.new_url()
    prepare_store(run, url, resume=False)
    line.damages = {("PUT", "__0_0"): 2, ("PUT", "SHA256SUMS"): 1, ("PUT", "args.json"): 1}
    store_of(url).put_checkpoint(add_checkpoint(run, 2))
    assert not any(line.damages.values())
    assert content_of(url) == files(run)
    line.damages = {("GET", "__0_0"): 1, ("GET", "SHA256SUMS"): 1, ("GET", "args.json"): 1}
    prepare_store(tmp_path / "other", url, resume=True)
    assert not any(line.damages.values())
    assert files(tmp_path / "other") == files(run)


def test_a_line_that_damages_everything_seals_no_copy(s3, line, run):
    url = s3.new_url()
    prepare_store(run, url, resume=False)
    line.damages = {("PUT", "__0_0"): 99}
    with pytest.raises(StoreError, match="__0_0"):
        store_of(url).put_checkpoint(add_checkpoint(run, 2))
    assert store_of(url).steps() == []


def test_tags_of_a_service_that_encrypts(s3, run, tmp_path, monkeypatch):
    """With a key of the user, the tags of S3 look the same and are not the MD5. Sizes are then compared."""
    for name, value in s3.environment.items():
        monkeypatch.setenv(name, value)
    objects = ObjectStore.open(s3.new_url())
    objects.put("a", b"content")
    (stored,) = objects.list().values()
    digests = digests_of(write(tmp_path / "a", b"content"))
    other_tag = Stored(stored.size, "0" * 32)
    assert objects.is_copy("a", other_tag, 7, digests) is True
    assert not objects.has_md5_tags
    assert objects.is_copy("a", other_tag, 7, digests) is None
    assert objects.is_copy("a", other_tag, 8, digests) is False


def write(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def test_files_are_compared_by_content(url, run):
    """The clock of the store can be ahead, so a file that was written later can look older than its copy."""
    prepare_store(run, url, resume=False)
    store_of(url).put_files(run)
    (run / "args.json").write_text('{"lr": 2}')  # as long as before
    an_hour_ago = time.time() - 3600
    os.utime(run / "args.json", (an_hour_ago, an_hour_ago))
    store_of(url).put_files(run)
    assert content_of(url) == files(run)


def test_a_damaged_copy_is_refused(url, run, tmp_path):
    prepare_store(run, url, resume=False)
    store = store_of(url)
    store.put_checkpoint(add_checkpoint(run, 2))
    store.objects.put("checkpoint-2/__0_0.distcp", b"something else")
    with pytest.raises(UserError) as caught:
        prepare_store(tmp_path / "other", url, resume=True)
    assert mentions(str(caught.value), "--checkpoint_store checkpoint-2 __0_0.distcp")
    assert not list((tmp_path / "other").iterdir())


@pytest.mark.parametrize("own", [None, 2])
def test_the_whole_copy_before_a_damaged_one_is_used(url, run, tmp_path, own):
    """Or the checkpoint in the directory, if it is newer than the other copy."""
    prepare_store(run, url, resume=False)
    for step in (1, 4):
        store_of(url).put_checkpoint(add_checkpoint(run, step))
    store_of(url).objects.delete(["checkpoint-4/__0_0.distcp"])
    other = tmp_path / "other"
    if own:
        prepare_store(other, url, resume=True)
        add_checkpoint(other, own)
        (other / "metrics.jsonl").write_text("")
        (other / "args.json").write_text("of this directory")
    before = files(other) if own else {}
    prepare_store(other, url, resume=True)
    newest = max(int(path.name.removeprefix("checkpoint-")) for path in other.glob("checkpoint-*"))
    assert newest == (own or 1)
    decision = decisions(other)[-1]
    assert (decision["step"], decision["fault"]) == (newest, "damaged_copy")
    assert mentions(decision["decision"], f"checkpoint-4 checkpoint-{newest}")
    if own:
        assert files(other) | {"metrics.jsonl": b""} == before


@pytest.mark.parametrize("line", [f"{'0' * 64}  ../stolen", f"{'0' * 64}  ..", "no digest"])
def test_names_in_digests_stay_in_the_checkpoint(url, run, tmp_path, line):
    prepare_store(run, url, resume=False)
    store_of(url).objects.put(f"checkpoint-2/{MANIFEST_FILE}", line.encode())
    with pytest.raises(UserError) as caught:
        prepare_store(tmp_path / "other", url, resume=True)
    assert mentions(str(caught.value), "--checkpoint_store")
    assert not (tmp_path / "stolen").exists()


def test_names_of_objects_stay_in_the_run(s3, run, tmp_path, monkeypatch):
    for name, value in s3.environment.items():
        monkeypatch.setenv(name, value)
    url = s3.new_url()
    prepare_store(run, url, resume=False)
    store = store_of(url)
    store.put_checkpoint(add_checkpoint(run, 2))
    for name in (".lock", "source/.hidden", "elsewhere/file"):
        store.objects.put(name, b"not of a run")
    other = tmp_path / "other"
    prepare_store(other, url, resume=True)
    assert files(other) == files(run)
    assert not (other / ".lock").exists()


def test_a_new_run_does_not_use_the_store_of_another(url, run, tmp_path):
    prepare_store(run, url, resume=False)
    store_of(url).put_checkpoint(add_checkpoint(run, 2))
    before = content_of(url)
    with pytest.raises(UserError) as caught:
        prepare_store(tmp_path / "other", url, resume=False)
    assert mentions(str(caught.value), "--checkpoint_store checkpoint-2 --resume")
    other = tmp_path / "with a checkpoint"
    other.mkdir()
    add_checkpoint(other, 1)
    with pytest.raises(UserError) as caught:
        prepare_store(other, url, resume=True)
    assert mentions(str(caught.value), "--checkpoint_store --output_dir")
    (other / RUN_FILE).write_text('{"run": "another"}')
    with pytest.raises(UserError):
        prepare_store(other, url, resume=True)
    assert content_of(url) == before


def test_an_interrupted_fetch_leaves_no_checkpoint(url, run, tmp_path, monkeypatch):
    prepare_store(run, url, resume=False)
    store_of(url).put_checkpoint(add_checkpoint(run, 2))

    def full(self, name, path):
        raise OSError(28, os.strerror(28), str(path))

    monkeypatch.setattr(run_store.ObjectStore, "get", full)
    other = tmp_path / "other"
    with pytest.raises(UserError) as caught:
        prepare_store(other, url, resume=True)
    assert mentions(str(caught.value), "--output_dir")
    assert not list(other.glob("*checkpoint-*"))
    monkeypatch.undo()
    if url.startswith("file:"):  # the address of the other store was undone as well
        prepare_store(other, url, resume=True)
        assert files(other) == files(run)


def test_a_store_that_fails_is_a_warning_until_the_end(run, tmp_path, caplog):
    """A file stands where the directory of the store was, so nothing can be written."""
    url = url_of(str(tmp_path / "store"))
    prepare_store(run, url, resume=False)
    copies = Copies(store_of(url), run)
    (tmp_path / "store" / RUN_FILE).unlink()
    (tmp_path / "store").rmdir()
    (tmp_path / "store").write_text("")
    copies.add(add_checkpoint(run, 2))
    while copies.in_use:
        time.sleep(0.01)
    assert "checkpoint-2" in caplog.text
    (tmp_path / "store").unlink()
    copies.add(add_checkpoint(run, 4))
    copies.finish()
    assert store_of(url).steps() == [4]


def test_the_last_failure_is_an_error(run, tmp_path):
    url = url_of(str(tmp_path / "store"))
    prepare_store(run, url, resume=False)
    copies = Copies(store_of(url), run)
    (tmp_path / "store" / RUN_FILE).unlink()
    (tmp_path / "store").rmdir()
    (tmp_path / "store").write_text("")
    copies.add(add_checkpoint(run, 2))
    with pytest.raises(UserError) as caught:
        copies.finish()
    assert mentions(str(caught.value), "--checkpoint_store --resume")


def test_an_unexpected_error_in_the_thread_is_reported(run, tmp_path, monkeypatch):
    def fail(self, checkpoint, shares):
        raise RuntimeError("out of threads")

    monkeypatch.setattr(RunStore, "put_checkpoint", fail)
    copies = Copies(store_of(url_of(str(tmp_path / "store"))), run)
    copies.add(add_checkpoint(run, 2))
    with pytest.raises(UserError) as caught:
        copies.finish()
    assert mentions(str(caught.value), "--checkpoint_store RuntimeError")


def test_what_is_copied_is_not_deleted(run, tmp_path):
    url = url_of(str(tmp_path / "store"))
    copies = Copies(store_of(url), run)
    checkpoint = add_checkpoint(run, 2)
    with copies._changed:  # the thread cannot finish meanwhile
        copies._waiting = Job(checkpoint, ALONE)
        assert copies.in_use == {checkpoint}
        copies._changed.notify_all()
    copies.finish()
    assert copies.in_use == set()


@pytest.mark.parametrize("option", ["ftp://host/dir", "", "https://bucket", "s3:/bucket/run", "S3://bucket", "s3://"])
def test_other_urls_are_refused(option):
    with pytest.raises(UserError) as caught:
        check_store(option, "run")
    assert mentions(str(caught.value), "--checkpoint_store")
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("store", ["run", "run/", "./run/copies", "run/source", "file://{}/run"])
def test_a_store_is_not_in_the_directory_of_the_run(tmp_path, monkeypatch, store):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError) as caught:
        check_store(store.format(tmp_path), "run")
    assert mentions(str(caught.value), "--checkpoint_store --output_dir")
    check_store("run2", "run")


def test_two_runs_do_not_use_one_store_at_the_same_time(url, run, tmp_path):
    """The first run has no checkpoint yet."""
    claim_store(run, url, resume=False)
    claim_store(run, url, resume=False)  # by the launcher, then by the first rank
    before = content_of(url)
    with pytest.raises(UserError) as caught:
        claim_store(tmp_path / "other", url, resume=False)
    assert mentions(str(caught.value), "--checkpoint_store checkpoint_store.json")
    assert content_of(url) == before
    claim_store(tmp_path / "its directory was lost", url, resume=True)
    assert content_of(url) == before


@pytest.mark.parametrize("content", [b"{", b"[]", b""])
def test_a_store_of_an_unknown_run_is_refused(url, run, tmp_path, content):
    prepare_store(run, url, resume=False)
    store_of(url).put_checkpoint(add_checkpoint(run, 2))
    store_of(url).objects.put(RUN_FILE, content)
    other = tmp_path / "other"
    other.mkdir()
    add_checkpoint(other, 1)
    for directory in (other, run, tmp_path / "new"):
        with pytest.raises(UserError) as caught:
            fetch_newest(directory, url)
        assert mentions(str(caught.value), "--checkpoint_store")


@pytest.mark.parametrize("line", ["", f"{'0' * 64}  trainer_state.json"])
def test_digests_of_all_files_are_needed(url, run, tmp_path, line):
    prepare_store(run, url, resume=False)
    store_of(url).put_checkpoint(add_checkpoint(run, 2))
    store_of(url).objects.put(f"checkpoint-2/{MANIFEST_FILE}", line.encode())
    with pytest.raises(UserError) as caught:
        fetch_newest(tmp_path / "other", url)
    assert mentions(str(caught.value), "--checkpoint_store SHA256SUMS")
    assert not list((tmp_path / "other").glob("*checkpoint-*"))


def test_files_of_a_killed_copy_are_deleted(run, tmp_path):
    url = url_of(str(tmp_path / "store"))
    claim_store(run, url, resume=False)
    remains = tmp_path / "store" / "checkpoint-1"
    remains.mkdir()
    (remains / "__0_0.distcp#1").write_text("half")
    with copies_of(run, url, keep=None) as copies:
        assert copies is not None
        copies.add(add_checkpoint(run, 2))
    assert not remains.exists()


def test_a_bucket_that_does_not_exist(s3, run, monkeypatch):
    for name, value in s3.environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError) as caught:
        prepare_store(run, "s3://nosuch/run", resume=False)
    assert mentions(str(caught.value), "--checkpoint_store s3://nosuch/run NoSuchBucket")
    assert "\n" not in caught.value.problem


@pytest.fixture
def url_without_answer(monkeypatch) -> str:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    return "s3://bucket/run"


@pytest.mark.parametrize("resume", [False, True])
def test_a_server_that_does_not_answer(run, url_without_answer, resume):
    with pytest.raises(UserError) as caught:
        prepare_store(run, url_without_answer, resume=resume)
    assert mentions(str(caught.value), "--checkpoint_store s3://bucket/run")
    assert "secret" not in str(caught.value)


def test_a_run_with_a_checkpoint_continues_without_the_store(run, url_without_answer):
    add_checkpoint(run, 2)
    assert not fetch_newest(run, url_without_answer)
    claim_store(run, url_without_answer, resume=True)
    assert [(line["step"], line["fault"]) for line in decisions(run)] == [(2, "store_down")] * 2
    assert mentions(decisions(run)[0]["decision"], "--checkpoint_store s3://bucket/run checkpoint-2")


def test_a_wrong_url_is_an_error_until_the_run_has_used_it(s3, run, monkeypatch):
    for name, value in s3.environment.items():
        monkeypatch.setenv(name, value)
    add_checkpoint(run, 2)
    with pytest.raises(UserError):
        fetch_newest(run, "s3://nosuch/run")
    monkeypatch.setenv(RESTARTS, "1")
    assert not fetch_newest(run, "s3://nosuch/run")


def test_a_store_that_was_not_claimed_is_claimed_before_the_first_copy(run, tmp_path):
    first, second = (url_of(str(tmp_path / name)) for name in ("store", "another"))
    copies = Copies(store_of(first), run)
    copies.add(add_checkpoint(run, 2))
    copies.finish()
    assert json.loads(content_of(first)[RUN_FILE]) == json.loads((run / RUN_FILE).read_text())
    claim_store(tmp_path / "other", second, resume=False)
    store_of(second).put_checkpoint(add_checkpoint(tmp_path / "other", 2))
    before = content_of(second)
    copies = Copies(store_of(second), run)
    copies.add(run / "checkpoint-2")
    with pytest.raises(UserError) as caught:
        copies.finish()
    assert mentions(str(caught.value), "--checkpoint_store --output_dir")
    assert content_of(second) == before


def test_large_files_are_written_in_parts(s3, tmp_path, monkeypatch):
    for name, value in s3.environment.items():
        monkeypatch.setenv(name, value)
    content = os.urandom(40 << 20)
    (tmp_path / "large").write_bytes(content)
    objects = ObjectStore.open(s3.new_url())
    objects.put("large", tmp_path / "large")
    objects.get("large", tmp_path / "back")
    assert (tmp_path / "back").read_bytes() == content
    with pytest.raises(StoreError):
        objects.read("nosuch")
