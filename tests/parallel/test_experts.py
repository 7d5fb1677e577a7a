"""Test weight conversion with experts on several ranks: for every layout, each number is written exactly once."""

import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from swiftlite import families
from swiftlite.args.fields import ParallelLayout
from swiftlite.base.errors import UserError
from swiftlite.base.heads import Heads
from swiftlite.bridge import placement
from swiftlite.bridge.binding import bind
from swiftlite.bridge.hf_config import read_config
from swiftlite.bridge.saving import save_hf
from swiftlite.bridge.tensors import describe
from swiftlite.bridge.transfer import load_hf
from swiftlite.model.build import build_model
from swiftlite.model.gpt import GPTModel
from swiftlite.runtime.distributed import session
from swiftlite.runtime.mesh import Mesh
from tests.messages import naming
from tests.parallel.launch import launch, open_store, prepare_session
from tests.tiers import selected, some_of
from tests.tiny import make_tiny_hf

pytestmark = pytest.mark.gloo


def layout(tp: int = 1, pp: int = 1, ep: int = 1, etp: int = 1) -> ParallelLayout:
    """Return a layout. The remaining processes are data-parallel."""
    return ParallelLayout(
        tensor_model_parallel_size=tp,
        sequence_parallel=tp > 1,
        pipeline_model_parallel_size=pp,
        expert_model_parallel_size=ep,
        expert_tensor_parallel_size=etp,
    )


LAYOUTS: dict[int, dict[str, ParallelLayout]] = {
    2: {
        "DP2": layout(),
        "EP2": layout(ep=2),
        "ETP2": layout(etp=2),
        "TP2-EP2": layout(tp=2, ep=2),
        "TP2-ETP2": layout(tp=2, etp=2),
        "PP2": layout(pp=2),
    },
    4: {
        "EP4": layout(ep=4),
        "EP2-ETP2": layout(ep=2, etp=2),
        "TP2-EP2-ETP2": layout(tp=2, ep=2, etp=2),
        "TP2-PP2-EP2": layout(tp=2, pp=2, ep=2),
        "PP2-ETP2": layout(pp=2, etp=2),
    },
}
SOURCES: dict[str, dict[str, Any]] = {
    "glm4_moe": {"family": "glm4_moe", "depth": 1, "num_hidden_layers": 4},
    "glm4_moe-stacked": {"family": "glm4_moe", "depth": 2, "num_hidden_layers": 4, "packed_experts": True},
    "qwen3_moe": {"family": "qwen3_moe", "depth": 1, "num_hidden_layers": 4, "mlp_only_layers": [2]},
}
SIZES: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}


def build(source: Path, mesh: Mesh) -> list[GPTModel]:
    """Return the model of a directory with uninitialized weights."""
    hf_config = read_config(source)
    family = families.get(hf_config)
    model = build_model(
        family.architecture(hf_config),
        hf_config,
        mesh=mesh,
        dtype=torch.float32,
        heads=Heads.from_config(hf_config),
    )
    with torch.no_grad():
        for chunk in model:
            for name, tensor in chunk.state_dict(keep_vars=True).items():
                if tensor is not None and not name.endswith("_extra_state"):
                    tensor.fill_(float("nan"))
    return model


def numbers_written(model: Sequence[GPTModel], source: Path) -> Counter[str]:
    """Return how many numbers of each HF tensor this rank writes."""
    hf_config = read_config(source)
    family = families.get(hf_config)
    shards = placement.shards_of(model)
    rows = family.rows(hf_config)
    written = Counter()
    for binding in bind(shards, rows, others_hold=placement.others_hold(model, shards)):
        if binding.shard.writes and not binding.is_copy:
            for shard, local_index, hf_key, _ in binding.slices():
                written[str(hf_key)] += shard.tensor[local_index].numel()
    return written


def transfer_all(root: Path, layouts: Sequence[str], ports: Sequence[int]) -> dict[str, dict[str, Counter[str]]]:
    """Load and save every source with some layouts in this process; return the counts of written numbers."""
    results = {}
    for port, layout_name in zip(ports, layouts, strict=True):
        prepare_session(port)
        with session(LAYOUTS[int(os.environ["WORLD_SIZE"])][layout_name], timeout_minutes=2) as mesh:
            result = {}
            for name in SOURCES:
                source, hf_config = root / name, read_config(root / name)
                family = families.get(hf_config)
                model = build(source, mesh)
                load_hf(model, source, family, hf_config)
                dtypes = {key: tensor["dtype"] for key, tensor in describe(source).items()}
                out_dir = root / layout_name / name
                save_hf(model, out_dir, family, hf_config, dtypes=dtypes, max_shard_bytes=10**5)
                result[name] = numbers_written(model, source)
            check_what_lacks_an_expert(root, mesh)
            results[layout_name] = result
            dist.barrier()
    return results


def check_what_lacks_an_expert(root: Path, mesh: Mesh) -> None:
    """Check that every rank reports a missing expert, including ranks that do not hold it."""
    hf_config = read_config(root / "broken")
    with pytest.raises(UserError, match=naming("model.layers.3.mlp.experts.3.up_proj.weight")):
        load_hf(build(root / "glm4_moe", mesh), root / "broken", families.get(hf_config), hf_config)
    # A model with fewer layers than the rows have: whoever holds the last stage cannot know, the counts can.
    hf_config = read_config(root / "glm4_moe") | {"num_hidden_layers": 5, "num_nextn_predict_layers": 0}
    with pytest.raises(UserError, match=r"Megatron.* decoder\.layers\.4\."):
        save_hf(build(root / "glm4_moe", mesh), root / "never", families.get(hf_config), hf_config)


@pytest.fixture(scope="module")
def transferred(request, tmp_path_factory) -> dict[int, tuple[Path, list[dict[str, dict[str, Counter[str]]]]]]:
    """Return, by number of processes, the directory of all files and the counts of each rank for each layout."""
    results = {}
    for num_processes in LAYOUTS:
        layouts = [
            name for number, name in selected(request, "num_processes", "layout_name") if number == num_processes
        ]
        if not layouts:
            continue
        root = tmp_path_factory.mktemp("experts")
        for name, options in SOURCES.items():
            make_tiny_hf(root / name, **options, **SIZES)
        broken = make_tiny_hf(root / "broken", **SOURCES["glm4_moe"], **SIZES)
        remove(broken, "model.layers.3.mlp.experts.3.up_proj.weight")
        stores = [open_store() for _ in layouts]
        ranks = launch(num_processes, transfer_all, root, layouts, [store.port for store in stores])
        results[num_processes] = root, ranks
    return results


def remove(directory: Path, key: str) -> None:
    tensors = load_file(directory / "model.safetensors")
    del tensors[key]
    save_file(tensors, directory / "model.safetensors")


def read_all(directory: Path) -> dict[str, torch.Tensor]:
    return {key: tensor for path in directory.glob("*.safetensors") for key, tensor in load_file(path).items()}


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize(
    ("num_processes", "layout_name"),
    some_of(
        [(number, name) for number, layouts in LAYOUTS.items() for name in layouts],
        (2, "TP2-EP2"),
        (2, "TP2-ETP2"),
        (4, "EP2-ETP2"),
        (4, "TP2-PP2-EP2"),
    ),
    ids=lambda value: str(value),
)
def test_round_trip(transferred, num_processes, layout_name, source):
    root, ranks = transferred[num_processes]
    original, written = read_all(root / source), read_all(root / layout_name / source)
    assert written.keys() == original.keys()
    for key, tensor in original.items():
        assert written[key].dtype is tensor.dtype
        assert torch.equal(written[key], tensor), key

    counts = sum((rank[layout_name][source] for rank in ranks), Counter())
    hf_config = read_config(root / source)
    rows = families.get(hf_config).rows(hf_config)
    assert counts == {key: torch.Size(shape).numel() for row in rows for key, shape in row.hf.items()}
