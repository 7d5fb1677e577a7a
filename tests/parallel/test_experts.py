"""The bridge with experts on several ranks: every number is written once, whatever the layout, and none is lost."""

from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from safetensors.torch import load_file, save_file

from swiftlite import families
from swiftlite.bridge import placement
from swiftlite.bridge.hf_config import read_config
from swiftlite.bridge.plan import bind
from swiftlite.bridge.tensors import describe
from swiftlite.bridge.transfer import load_hf, save_hf
from swiftlite.errors import UserError
from swiftlite.model.build import build_config
from swiftlite.model.specs import decoder_spec, mtp_spec
from swiftlite.runtime.device import current_device
from swiftlite.runtime.distributed import session
from tests.parallel.launch import launch
from tests.tiny import make_tiny_hf

pytestmark = pytest.mark.gloo


class Layout(NamedTuple):
    """Sizes of the groups; what is left of the world is data-parallel."""

    tp: int = 1
    pp: int = 1
    ep: int = 1
    etp: int = 1


LAYOUTS = {
    2: [Layout(), Layout(ep=2), Layout(etp=2), Layout(tp=2), Layout(tp=2, ep=2), Layout(tp=2, etp=2), Layout(pp=2)],
    4: [
        Layout(ep=2),
        Layout(ep=4),
        Layout(ep=2, etp=2),
        Layout(tp=2, ep=2),
        Layout(tp=2, ep=2, etp=2),
        Layout(tp=2, pp=2, ep=2),
        Layout(pp=2, ep=2),
        Layout(pp=2, etp=2),
        Layout(pp=4),
    ],
}
SOURCES = {
    "glm4_moe": {"family": "glm4_moe", "depth": 1, "num_hidden_layers": 4},
    "glm4_moe-stacked": {"family": "glm4_moe", "depth": 2, "num_hidden_layers": 4, "packed_experts": True},
    "qwen3_moe": {"family": "qwen3_moe", "depth": 1, "num_hidden_layers": 4, "mlp_only_layers": [2]},
}
SIZES: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}


def build(source: Path, layout: Layout) -> GPTModel:
    """megatron-core's own GPTModel with our layers: its parameters are all that the bridge sees."""
    hf_config = read_config(source)
    family = families.get(hf_config)
    sizes = {
        "pipeline_model_parallel_size": layout.pp,
        "expert_model_parallel_size": layout.ep,
        "expert_tensor_parallel_size": layout.etp,
    }
    config = build_config(
        family.transformer_config(hf_config) | sizes,
        device=current_device(),
        dtype=torch.float32,
        mtp_num_layers=family.mtp_depth(hf_config),
        tensor_model_parallel_size=layout.tp,
    )
    stage, num_layers = parallel_state.get_pipeline_model_parallel_rank(), config.num_layers // layout.pp
    whole = decoder_spec(config)
    assert whole.layer_specs
    layers = whole.layer_specs[stage * num_layers : (stage + 1) * num_layers]
    is_last = stage == layout.pp - 1
    # gpt_model.py copies the embedding of a later stage to the GPU; where there is none, nowhere.
    with patch.object(torch.Tensor, "cuda", lambda self: self):
        model = _stage(config, hf_config, layers, whole.layer_norm, stage == 0, is_last)
    with torch.no_grad():
        for tensor in model.state_dict(keep_vars=True).values():
            if tensor is not None:
                tensor.fill_(float("nan"))
    return model


def _stage(config, hf_config, layers, layer_norm, is_first: bool, is_last: bool) -> GPTModel:
    return GPTModel(
        config=config,
        transformer_layer_spec=TransformerBlockSubmodules(layers, layer_norm),  # pyright: ignore[reportArgumentType]
        mtp_block_spec=mtp_spec(config) if is_last else None,  # pyright: ignore[reportArgumentType]
        vocab_size=hf_config["vocab_size"],
        max_sequence_length=hf_config["max_position_embeddings"],
        pre_process=is_first,
        post_process=is_last,
        position_embedding_type="rope",
    )


def numbers_written(model: GPTModel, source: Path) -> Counter[str]:
    """How many numbers of each HF tensor this rank writes."""
    hf_config = read_config(source)
    family = families.get(hf_config)
    shards = placement.shards_of([model])
    rows = family.rows(hf_config)
    written = Counter()
    for binding in bind(shards, rows, others_hold=placement.others_hold([model], shards)):
        if binding.shard.writes and not binding.is_copy:
            for shard, local_index, hf_key, _ in binding.copies():
                written[str(hf_key)] += shard.tensor[local_index].numel()
    return written


def transfer(root: Path, layouts: list[Layout]) -> list[dict[str, Counter[str]]]:
    """What each process does: every source in and out at every layout; returns what it wrote."""
    results = []
    with session():
        for layout in layouts:
            parallel_state.destroy_model_parallel()
            parallel_state.initialize_model_parallel(
                tensor_model_parallel_size=layout.tp,
                pipeline_model_parallel_size=layout.pp,
                expert_model_parallel_size=layout.ep,
                expert_tensor_parallel_size=layout.etp,
                create_gloo_process_groups=False,
            )
            result = {}
            for name in SOURCES:
                source, hf_config = root / name, read_config(root / name)
                family = families.get(hf_config)
                model = build(source, layout)
                load_hf([model], source, family, hf_config)
                dtypes = {key: tensor["dtype"] for key, tensor in describe(source).items()}
                save_hf([model], root / str(layout) / name, family, hf_config, dtypes=dtypes, max_shard_bytes=10**5)
                result[name] = numbers_written(model, source)
            check_a_checkpoint_that_lacks_an_expert(root, layout)
            results.append(result)
        dist.barrier()
    return results


def check_a_checkpoint_that_lacks_an_expert(root: Path, layout: Layout) -> None:
    """Every rank says so, also those that do not hold it."""
    hf_config = read_config(root / "broken")
    with pytest.raises(UserError, match=r"missing: model\.layers\.3\.mlp\.experts\.3\.up_proj\.weight"):
        load_hf([build(root / "glm4_moe", layout)], root / "broken", families.get(hf_config), hf_config)
    # A model with fewer layers than the rows have: whoever holds the last stage cannot know, the counts can.
    hf_config = read_config(root / "glm4_moe") | {"num_hidden_layers": 5, "num_nextn_predict_layers": 0}
    with pytest.raises(UserError, match=r"the Megatron model has no decoder\.layers\.4\."):
        save_hf([build(root / "glm4_moe", layout)], root / "never", families.get(hf_config), hf_config)


@pytest.fixture(scope="module")
def transferred(tmp_path_factory) -> dict[int, tuple[Path, list[list[dict[str, Counter[str]]]]]]:
    """By world size: the directory of all files, and what each rank wrote at each layout."""
    results = {}
    for world_size, layouts in LAYOUTS.items():
        root = tmp_path_factory.mktemp("experts")
        for name, options in SOURCES.items():
            make_tiny_hf(root / name, **options, **SIZES)
        broken = make_tiny_hf(root / "broken", **SOURCES["glm4_moe"], **SIZES)
        remove(broken, "model.layers.3.mlp.experts.3.up_proj.weight")
        results[world_size] = root, launch(world_size, transfer, root, layouts)
    return results


def remove(directory: Path, key: str) -> None:
    tensors = load_file(directory / "model.safetensors")
    del tensors[key]
    save_file(tensors, directory / "model.safetensors")


def read_all(directory: Path) -> dict[str, torch.Tensor]:
    return {key: tensor for path in directory.glob("*.safetensors") for key, tensor in load_file(path).items()}


CASES = [(world_size, number) for world_size, layouts in LAYOUTS.items() for number in range(len(layouts))]


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize(
    ("world_size", "number"), CASES, ids=[f"{n}-{'-'.join(map(str, LAYOUTS[n][i]))}" for n, i in CASES]
)
def test_round_trip(transferred, world_size, number, source):
    root, ranks = transferred[world_size]
    original = read_all(root / source)
    written = read_all(root / str(LAYOUTS[world_size][number]) / source)
    assert written.keys() == original.keys()
    for key, tensor in original.items():
        assert written[key].dtype is tensor.dtype
        assert torch.equal(written[key], tensor), key

    counts = sum((rank[number][source] for rank in ranks), Counter())
    hf_config = read_config(root / source)
    rows = families.get(hf_config).rows(hf_config)
    assert counts == {key: torch.Size(shape).numel() for row in rows for key, shape in row.hf.items()}
