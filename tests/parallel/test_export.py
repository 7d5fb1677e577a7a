"""Test exports of ranks without a shared file system: all slices are sent to the first rank."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from swiftlite import families
from swiftlite.args.fields import ParallelLayout
from swiftlite.base.heads import Heads
from swiftlite.bridge.hf_config import read_config
from swiftlite.bridge.saving import save_hf
from swiftlite.bridge.transfer import load_hf
from swiftlite.model.build import build_model
from swiftlite.runtime.distributed import session
from tests.parallel.launch import launch
from tests.tiny import make_tiny_hf

pytestmark = pytest.mark.gloo
LAYOUT = ParallelLayout(tensor_model_parallel_size=2, pipeline_model_parallel_size=2, sequence_parallel=True)


def export_to_own_disk(source: Path, root: Path) -> list[str]:
    """Export with a separate directory per process as its disk; return the files in this directory."""
    hf_config = read_config(source)
    family = families.get(hf_config)
    with session(LAYOUT) as mesh:
        model = build_model(
            family.architecture(hf_config),
            hf_config,
            mesh=mesh,
            dtype=torch.float32,
            heads=Heads(1),
        )
        load_hf(model, source, family, hf_config)
        disk = root / str(dist.get_rank())
        save_hf(model, disk, family, hf_config, max_shard_bytes=40_000)
        return sorted(path.name for path in disk.glob("*")) if disk.exists() else []


def test_ranks_without_a_shared_disk_send_what_they_hold(tmp_path):
    source = make_tiny_hf(tmp_path / "source", "glm4_moe", depth=1, num_attention_heads=4, num_key_value_heads=2)
    first, *others = launch(4, export_to_own_disk, source, tmp_path)
    assert others == [[], [], []]
    assert not [name for name in first if name.startswith(".")]
    written = {key: t for path in (tmp_path / "0").glob("*.safetensors") for key, t in load_file(path).items()}
    original = load_file(source / "model.safetensors")
    assert written.keys() == original.keys()
    assert all(torch.equal(written[key], tensor) for key, tensor in original.items())
