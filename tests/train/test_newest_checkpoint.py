"""Test that a run continues from its newest whole checkpoint, and what becomes of damaged ones."""

import hashlib
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from swiftlite.base.errors import UserError
from swiftlite.plan.facts import run_checkpoints
from swiftlite.report.metrics import decisions_in, read_metrics
from swiftlite.runtime.distributed import session
from swiftlite.runtime.progress import RESTARTS
from swiftlite.store.manifest import write_manifest
from swiftlite.store.objects import ObjectStore, url_of
from swiftlite.store.run_store import RunStore, claim_store
from swiftlite.train import phases
from swiftlite.train import run as training
from swiftlite.train.checkpoint.state import CheckpointState
from swiftlite.train.checkpoint.verification import newest_whole_checkpoint
from tests.messages import mentions, naming
from tests.parallel.launch import launch
from tests.train.prepared import prepare
from tests.untimed import untimed


def add_checkpoint(run: Path, step: int) -> Path:
    """Write the files of a checkpoint, without tensors."""
    checkpoint = run / f"checkpoint-{step}"
    checkpoint.mkdir(parents=True)
    for name in (".metadata", "common.pt", "__0_0.distcp", "__1_0.distcp"):
        (checkpoint / name).write_text(f"{name} of step {step}" * 100)
    (checkpoint / "trainer_state.json").write_text(CheckpointState(step, 1, "float32").to_json())
    write_manifest(checkpoint, {})
    return checkpoint


def flip(checkpoint: Path) -> None:
    path = checkpoint / "__1_0.distcp"
    content = path.read_bytes()
    path.write_bytes(bytes([content[0] ^ 1]) + content[1:])


def lose(checkpoint: Path) -> None:
    (checkpoint / "__0_0.distcp").unlink()


def truncate(checkpoint: Path) -> None:
    path = checkpoint / "__0_0.distcp"
    path.write_bytes(path.read_bytes()[:100])


def lose_digests(checkpoint: Path) -> None:
    (checkpoint / "SHA256SUMS").unlink()


HARMS = [flip, lose, truncate, lose_digests]


@pytest.fixture
def run(tmp_path) -> Path:
    directory = tmp_path / "run"
    for step in (2, 4, 10):
        add_checkpoint(directory, step)
    return directory


def steps(run: Path) -> list[int]:
    return [int(path.name.removeprefix("checkpoint-")) for path in run_checkpoints(run)]


def decisions(run: Path) -> list[tuple]:
    return [(line["step"], line["fault"], line.get("lost_steps")) for line in decisions_in(read_metrics(run))]


@pytest.mark.parametrize("harm", HARMS)
def test_a_damaged_checkpoint_is_renamed_and_the_one_before_is_used(mesh, run, harm: Callable[[Path], None]):
    harm(run / "checkpoint-10")
    left = sorted(path.name for path in (run / "checkpoint-10").iterdir())
    assert newest_whole_checkpoint(run, None) == run / "checkpoint-4"
    assert steps(run) == [2, 4]
    assert sorted(path.name for path in (run / "checkpoint-10.damaged").iterdir()) == left
    assert decisions(run) == [(4, "damaged_checkpoint", 6)]
    assert mentions(read_metrics(run)[0]["decision"], "checkpoint-10 checkpoint-10.damaged checkpoint-4")
    harm(add_checkpoint(run, 10))  # the run has saved this step again
    assert newest_whole_checkpoint(run, None) == run / "checkpoint-4"
    assert (run / "checkpoint-10.damaged-2").is_dir()


def test_a_whole_checkpoint_is_left_alone(mesh, run):
    assert newest_whole_checkpoint(run, None) == run / "checkpoint-10"
    assert steps(run) == [2, 4, 10]
    assert not (run / "metrics.jsonl").exists()
    assert newest_whole_checkpoint(run.with_name("new"), None) is None


def test_a_run_whose_checkpoints_are_all_damaged(mesh, run, monkeypatch):
    """A person decides. A run that restarts by itself begins again; nothing is deleted."""
    for step in (2, 4, 10):
        flip(run / f"checkpoint-{step}")
    for _ in range(2):  # the second time, there are only renamed ones
        with pytest.raises(UserError, match=naming("--resume checkpoint-10.damaged")):
            newest_whole_checkpoint(run, None)
    monkeypatch.setenv(RESTARTS, "1")
    assert newest_whole_checkpoint(run, None) is None
    assert len(list(run.glob("checkpoint-*.damaged"))) == 3


def test_the_copy_of_a_damaged_checkpoint_is_used(mesh, run, tmp_path):
    url = url_of(str(tmp_path / "store"))
    claim_store(run, url, resume=False)
    store = RunStore(ObjectStore.open(url))
    (run / "args.json").write_text("{}")
    store.put_checkpoint(run / "checkpoint-10")
    (run / "args.json").write_text("newer than in the store")
    flip(run / "checkpoint-10")
    assert newest_whole_checkpoint(run, url) == run / "checkpoint-10"
    assert decisions(run) == [(10, "damaged_checkpoint", 0)]
    assert (run / "args.json").read_text() == "newer than in the store"
    flip(run / "checkpoint-10")
    store.objects.delete(["checkpoint-10/common.pt"])
    assert newest_whole_checkpoint(run, url) == run / "checkpoint-4"
    assert [line[1] for line in decisions(run)] == ["damaged_checkpoint", "damaged_copy", "damaged_checkpoint"]


def newest_of_rank(run: Path) -> str:
    with session():
        return str(newest_whole_checkpoint(run, None))


@pytest.mark.gloo
def test_all_ranks_use_the_same_checkpoint(run):
    """Each rank verifies a part of the files, and one file is damaged."""
    flip(run / "checkpoint-10")
    assert launch(2, newest_of_rank, run) == [str(run / "checkpoint-4")] * 2
    assert decisions(run) == [(4, "damaged_checkpoint", 6)]


def test_a_checkpoint_of_the_first_releases_is_checked_for_its_sizes(mesh, options, tmp_path):
    run = train(options(save_steps=2), mesh)
    for checkpoint in run_checkpoints(run):
        path = checkpoint / "trainer_state.json"
        state = json.loads(path.read_text())
        del state["version"]
        path.write_text(json.dumps(state))
        lose_digests(checkpoint)
    assert newest_whole_checkpoint(run, None) == run / "checkpoint-4"
    truncate(run / "checkpoint-4")
    assert newest_whole_checkpoint(run, None) == run / "checkpoint-2"


def train(args, mesh) -> Path:
    """Run all phases that change weights; return the run's directory."""
    run = prepare(args, mesh)
    state = phases.restore(run)
    trainer = training.make_trainer(run, state)
    phases.fit(run, trainer, state.step, training.make_held_out(run))
    return run.output_dir


def test_the_weights_are_those_of_an_unbroken_run(mesh, options, tmp_path):
    def content(run: Path) -> tuple:
        lines = [untimed(line) for line in read_metrics(run) if "decision" not in line]
        files = sorted((run / "checkpoint-6").glob("*.distcp"))
        return lines, [hashlib.sha256(path.read_bytes()).hexdigest() for path in files]

    args = options(save_steps=2, train_iters=6, output_dir=str(tmp_path / "unbroken"))
    unbroken = content(train(args, mesh))
    shutil.copytree(tmp_path / "unbroken", tmp_path / "damaged")
    shutil.rmtree(tmp_path / "damaged" / "checkpoint-6")
    flip_tensors(tmp_path / "damaged" / "checkpoint-4")
    resumed = train(replace(args, output_dir=str(tmp_path / "damaged"), resume=True), mesh)
    assert content(resumed) == unbroken
    assert decisions(resumed) == [(2, "damaged_checkpoint", 2)]
    assert steps(resumed) == [2, 4, 6]


def flip_tensors(checkpoint: Path) -> None:
    path = next(checkpoint.glob("*.distcp"))
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
