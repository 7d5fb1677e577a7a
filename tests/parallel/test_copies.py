"""Test that several ranks copy a checkpoint to a store. tests/store tests the copies of one process."""

import time
from pathlib import Path

import pytest
import torch.distributed as dist

from swiftlite.args.commands import SftArgs
from swiftlite.runtime.distributed import session
from swiftlite.store.manifest import write_manifest
from swiftlite.store.objects import ObjectStore, url_of
from swiftlite.store.run_store import claim_store
from swiftlite.train import phases
from tests.parallel.launch import launch
from tests.store.s3 import content_of

pytestmark = pytest.mark.gloo


def copy(run: Path, store: str) -> list[str]:
    """Copy checkpoint-2, on the first rank after the other ranks are done; return the objects that are there before."""
    with session(), phases.copy_checkpoints(SftArgs(output_dir=str(run), checkpoint_store=store)) as copies:
        assert copies is not None
        is_first = dist.get_rank() == 0
        if not is_first:
            copies.add(run / "checkpoint-2")
            while copies.in_use:
                time.sleep(0.01)
        dist.barrier()
        before = sorted(ObjectStore.open(url_of(store)).list("checkpoint-2"))
        dist.barrier()
        if is_first:
            copies.add(run / "checkpoint-2")
    return before


def test_each_rank_copies_its_files_and_the_first_one_completes_the_copy(tmp_path):
    run, store = tmp_path / "run", str(tmp_path / "store")
    checkpoint = run / "checkpoint-2"
    checkpoint.mkdir(parents=True)
    for name in (".metadata", "common.pt", "trainer_state.json", *(f"__{rank}_0.distcp" for rank in range(3))):
        (checkpoint / name).write_text(name * 1000)
    write_manifest(checkpoint, {})
    claim_store(run, store, resume=False)
    expected = [f"checkpoint-2/__{rank}_0.distcp" for rank in (1, 2)]
    assert launch(3, copy, run, store) == [expected] * 3
    found = content_of(url_of(store))
    assert found == {path.relative_to(run).as_posix(): path.read_bytes() for path in run.rglob("*") if path.is_file()}
