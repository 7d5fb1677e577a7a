"""Test the parameters, operations and activations of vision towers that plans count, against torch and transformers."""

from math import prod
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from swiftlite.families.rank import FLOAT32, Rank
from swiftlite.families.tower import FROZEN, TrainedParts
from swiftlite.families.vision import Qwen2_5Vision, Qwen3Vision, VisionTower, is_aligner_parameter
from swiftlite.model.vision import VisionTransformer

SIZES: dict[str, Any] = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 4,
    "out_hidden_size": 24,
    "patch_size": 4,
    "in_channels": 3,
    "temporal_patch_size": 2,
    "spatial_merge_size": 2,
}
LEARNED = SIZES | {"num_position_embeddings": 64}
TOWERS: dict[str, VisionTower] = {
    "plain": Qwen3Vision(LEARNED),
    "deepstack": Qwen3Vision(LEARNED | {"deepstack_visual_indexes": [0]}),
    "windows": Qwen2_5Vision(SIZES | {"window_size": 16, "fullatt_block_indexes": [1]}),
}
IMAGES = [(4, 4), (2, 4)]
"""Rows and columns of items, multiples of a window."""
PARTS = [TrainedParts(vit=True, aligner=True), TrainedParts(vit=False, aligner=True), FROZEN]
ONLY_VIT = TrainedParts(vit=True, aligner=False)

every_tower = pytest.mark.parametrize("tower", TOWERS.values(), ids=TOWERS)


def build(tower: VisionTower, trained: TrainedParts) -> VisionTransformer:
    config: Any = SimpleNamespace(params_dtype=torch.float32, hidden_size=tower.config["out_hidden_size"])
    module = VisionTransformer(tower, config)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.normal_(std=0.1)
            is_aligner = is_aligner_parameter(f"tower.{name}")
            parameter.requires_grad_(trained.aligner if is_aligner else trained.vit)
    return module.train()


def make_items(tower: VisionTower) -> dict[str, torch.Tensor]:
    places = [[row, column, *size] for size in IMAGES for row in range(size[0]) for column in range(size[1])]
    width = 4 * prod(tower.shapes()["patch_embed.proj.weight"][1:])
    return {"patches": torch.randn(len(places), width), "grid": torch.tensor(places)}


@every_tower
@pytest.mark.parametrize("trained", [*PARTS, ONLY_VIT], ids=str)
def test_operations_are_those_that_torch_counts(tower, trained):
    module = build(tower, trained)
    module.visual.config._attn_implementation = "eager"  # torch does not count the attention kernel of a CPU
    with FlopCounterMode(display=False) as counter:
        outputs = module(make_items(tower))
        if any(trained):
            outputs.sum().backward()
    macs = tower.macs(trained)
    sizes = [rows * columns for rows, columns in IMAGES]
    counted = macs.item * sum(sizes) + macs.square * sum(size**2 for size in sizes)
    assert counter.get_total_flops() == 2 * counted


def saved_bytes(module: VisionTransformer, items: dict[str, torch.Tensor]) -> int:
    """Return the bytes of the tensors that autograd saves in a forward pass, without weights."""
    weights = {parameter.untyped_storage().data_ptr() for parameter in module.parameters()}
    storages = {}

    def save(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            storages[storage.data_ptr()] = tensor, storage.nbytes()  # the tensor, so that its memory is not reused
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
        module(items)
    return sum(size for _, size in storages.values())


@every_tower
@pytest.mark.parametrize("trained", PARTS, ids=str)
def test_activations_are_those_that_autograd_saves(tower, trained):
    items = make_items(tower)
    found = saved_bytes(build(tower, trained), items)
    counted = tower.activation_bytes(len(items["grid"]), FLOAT32, trained, recomputes=False)
    assert counted.recomputed == 0
    norm_input = 0
    if isinstance(tower, Qwen2_5Vision) and trained == PARTS[1]:
        norm_input = (32 + 1) * FLOAT32 * 4 * len(items["grid"])  # counted, and not saved without a gradient
        norm_input -= 8 * len(items["grid"])  # the order of items, saved and not counted
    assert found == counted.stored - norm_input


@every_tower
def test_recomputed_activations(tower):
    items = make_items(tower)
    module = build(tower, PARTS[0])
    whole = tower.activation_bytes(len(items["grid"]), FLOAT32, PARTS[0], recomputes=False)
    counted = tower.activation_bytes(len(items["grid"]), FLOAT32, PARTS[0], recomputes=True)
    module.recompute_activations()
    rotary = 2 * 8 * FLOAT32 * 4 * len(items["grid"])  # arguments of all blocks, which hooks do not see
    assert saved_bytes(module, items) + rotary == counted.stored
    inputs_of_blocks = 2 * 32 * FLOAT32 * 4 * len(items["grid"])
    assert counted.recomputed == (whole.stored - counted.stored + inputs_of_blocks) // 2


PUBLISHED: dict[str, tuple[type[VisionTower], dict[str, Any], int]] = {
    "Qwen2.5-VL-3B": (
        Qwen2_5Vision,
        {"depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16, "in_chans": 3}
        | {"out_hidden_size": 2048, "patch_size": 14, "spatial_merge_size": 2, "window_size": 112}
        | {"fullatt_block_indexes": [7, 15, 23, 31], "temporal_patch_size": 2},
        668_684_288,
    ),
    "Qwen3-VL-4B": (
        Qwen3Vision,
        {"depth": 24, "hidden_size": 1024, "intermediate_size": 4096, "num_heads": 16, "in_channels": 3}
        | {"out_hidden_size": 2560, "patch_size": 16, "spatial_merge_size": 2, "temporal_patch_size": 2}
        | {"deepstack_visual_indexes": [5, 11, 17], "num_position_embeddings": 2304},
        415_347_712,
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_of_published_towers(name):
    """The sizes are those of `vision_config` in the published config.json."""
    tower_class, config, expected = PUBLISHED[name]
    tower: Any = tower_class(config)
    assert tower.parameters(Rank()).total == expected
    with torch.device("meta"):
        module = build(tower, FROZEN)
    assert sum(parameter.numel() for parameter in module.parameters()) == expected
    parts = [tower.trained_parameters(trained).total for trained in (PARTS[1], ONLY_VIT)]
    assert sum(parts) == expected
    assert min(parts) > 0
