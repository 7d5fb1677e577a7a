"""Test models with images: logits and gradients of vision tower, trunk and heads equal those of transformers."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from swiftlite.base.errors import UserError
from swiftlite.bridge.saving import save_hf
from swiftlite.data.batch import Batch, collate, collate_packed
from swiftlite.families.rank import Rank
from swiftlite.families.resolved import resolve
from swiftlite.model.attention.rope import RotaryEmbedding
from swiftlite.model.context_parallel import describe_packed
from swiftlite.model.gpt import GPTModel, Logits
from swiftlite.model.inputs import ModelInputs
from swiftlite.model.open import open_model
from swiftlite.model.tower import TowerInputs
from tests.images import Seen, VisionReference, extras_of, sum_of_losses
from tests.messages import mentions
from tests.tiers import some_of
from tests.tiny import VISION_TOWERS, make_tiny_hf, make_tiny_vision_hf, per_expert

CLOSE = 2e-5
"""Maximum difference, relative to the largest value: float32 sums in another order."""
FAMILIES = list(VISION_TOWERS)
ROWS: list[list[int | str]] = [[5, "0", 6], [9], [2, "1", 3, "2", 4]]
"""Rows with one image, without an image, and with two images of different sizes."""


@pytest.fixture(params=some_of(FAMILIES, "qwen2_5_vl", "qwen3_vl"))
def family(request) -> str:
    return request.param


@pytest.fixture
def hf_dir(shared, family) -> Path:
    return shared(f"vision-{family}", lambda directory: make_tiny_vision_hf(directory, family, depth=1))


def open_vision(hf_dir: Path, mesh: Any, **options: Any) -> GPTModel:
    (model,), report = open_model(resolve(hf_dir).with_images(), mesh, dtype=torch.float32, **options)
    assert not report.carried
    return model.eval()


def rows_of(hf_dir: Path, parts: list[list[int | str]]) -> list[Seen]:
    return [Seen(hf_dir, row, seed) for seed, row in enumerate(parts)]


def make_batch(hf_dir: Path, reference: VisionReference, rows: list[Seen], is_packed: bool) -> Batch:
    samples = [row.sample(reference.model) for row in rows]
    function = collate_packed if is_packed else collate
    return function(samples, 0, num_drafts=1, extras=extras_of(hf_dir))


def logits_of(model: GPTModel, batch: Batch, rows: list[Seen]) -> list[list[torch.Tensor]]:
    """Return the logits [S, V] of trunk and head for each row."""
    result = model(
        ModelInputs(
            batch.tokens_KBS[0],
            batch.position_ids_BS,
            mtp_input_ids=batch.tokens_KBS[1:],
            packed_seq_params=describe_packed(batch.cu_seqlens),
            tower_inputs=TowerInputs.of(batch),
            axes_3BS=batch.axes_3BS,
        )
    )
    assert isinstance(result, Logits)
    logits, start = [], 0
    for number, row in enumerate(rows):
        length = row.ids_1S.size(1)
        if batch.cu_seqlens is None:
            logits.append([part[number, : length - depth] for depth, part in enumerate([result.main, *result.mtp])])
        else:
            here = [part[0, start : start + length - depth] for depth, part in enumerate([result.main, *result.mtp])]
            logits.append(here)
            start += length
    return logits


def assert_close(found: torch.Tensor, expected: torch.Tensor, name: str = "") -> None:
    largest = expected.abs().max().item()
    difference = (found - expected).abs().max().item()
    assert difference <= CLOSE * largest, f"{name}: {difference} of {largest}"


@pytest.mark.parametrize("is_packed", [False, True], ids=["padded", "packed"])
def test_trunk_and_head_equal_transformers(hf_dir, family, mesh, is_packed):
    reference = VisionReference(hf_dir, family, 1)
    rows = rows_of(hf_dir, ROWS)
    found = logits_of(open_vision(hf_dir, mesh), make_batch(hf_dir, reference, rows, is_packed), rows)
    for logits, row in zip(found, rows, strict=True):
        for ours, theirs in zip(logits, reference(row), strict=True):
            assert_close(ours, theirs)


@pytest.mark.parametrize("changed", ["blind_heads", "flat_positions"])
def test_features_and_positions_matter(hf_dir, family, mesh, changed):
    """A head that reads the placeholder's embedding, or a model whose positions are indices, has other logits."""
    reference = VisionReference(hf_dir, family, 1, **{changed: True})
    rows = rows_of(hf_dir, ROWS[:1])
    ((trunk, head),) = logits_of(open_vision(hf_dir, mesh), make_batch(hf_dir, reference, rows, False), rows)
    expected_trunk, expected_head = reference(rows[0])
    assert (head - expected_head).abs().max() > 1e-2 * expected_head.abs().max()
    if changed == "flat_positions":
        assert (trunk - expected_trunk).abs().max() > 1e-2 * expected_trunk.abs().max()


@pytest.mark.parametrize(
    ("family", "is_packed"), [(family, number % 2 > 0) for number, family in enumerate(FAMILIES)], indirect=["family"]
)
def test_gradients_equal_transformers(hf_dir, family, mesh, tmp_path, is_packed):
    reference = VisionReference(hf_dir, family, 1)
    rows = rows_of(hf_dir, ROWS)
    for row in rows:
        reference.loss(row).backward()
    model = open_vision(hf_dir, mesh)
    logits = logits_of(model, make_batch(hf_dir, reference, rows, is_packed), rows)
    losses = [sum_of_losses(part, row) for part, row in zip(logits, rows, strict=True)]
    torch.stack(losses).sum().backward()
    found, expected = gradients_of(model, hf_dir, tmp_path), per_expert(reference.gradients())
    assert found.keys() <= expected.keys()
    assert found.keys() == per_expert(load_file(hf_dir / "model.safetensors")).keys()
    for name, gradient in found.items():
        assert_close(gradient, expected[name], name)


def gradients_of(model: GPTModel, hf_dir: Path, directory: Path) -> dict[str, torch.Tensor]:
    """Return the gradient of each tensor by its name in files. The weights are lost."""
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.data = parameter.grad
    hf_model = resolve(hf_dir).with_images()
    save_hf([model], directory, hf_model.family, hf_model.config)
    return load_file(directory / "model.safetensors")


def test_without_images_the_tower_has_zero_gradients(hf_dir, family, mesh):
    """megatron-core's DDP waits for a gradient of each trained parameter."""
    reference = VisionReference(hf_dir, family, 1)
    rows = rows_of(hf_dir, ROWS[1:2])
    model = open_vision(hf_dir, mesh)
    batch = make_batch(hf_dir, reference, rows, False)
    ((trunk, head),) = logits_of(model, batch, rows)
    tower: Any = model.tower
    assert len(tower(batch.items)) == 0
    sum_of_losses([trunk, head], rows[0]).backward()
    for name, parameter in tower.named_parameters():
        assert torch.equal(parameter.grad, torch.zeros_like(parameter)), name


def test_without_images_a_frozen_tower_computes_nothing(hf_dir, family, mesh):
    rows = rows_of(hf_dir, ROWS[1:2])
    tower: Any = open_vision(hf_dir, mesh).tower
    batch = make_batch(hf_dir, VisionReference(hf_dir, family, 1), rows, False)
    learned = tower(batch.items)
    calls: list[int] = []
    tower.visual.register_forward_pre_hook(lambda *_: calls.append(1))
    frozen = tower.requires_grad_(False)(batch.items)
    assert (frozen.shape, frozen.dtype) == (learned.shape, learned.dtype)
    assert calls == []


def test_an_export_is_bitwise_identical(family, mesh, tmp_path):
    hf_dir = make_tiny_vision_hf(tmp_path / "hf", family, depth=1, dtype=torch.bfloat16)
    hf_model = resolve(hf_dir).with_images()
    chunks, report = open_model(hf_model, mesh, dtype=torch.bfloat16)
    assert not report.carried
    assert not report.dropped
    save_hf(chunks, tmp_path / "out", hf_model.family, hf_model.config, dtypes="bfloat16")
    before = per_expert(load_file(hf_dir / "model.safetensors"))  # without a source, an export has single experts
    after = load_file(tmp_path / "out" / "model.safetensors")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_without_images_the_tower_is_carried(hf_dir, mesh):
    (model,), report = open_model(resolve(hf_dir), mesh, dtype=torch.float32)
    assert model.tower is None
    tower = {name for name in load_file(hf_dir / "model.safetensors") if "visual" in name}
    assert set(report.carried) == tower


def test_the_parameters_are_counted(hf_dir):
    hf_model = resolve(hf_dir).with_images()
    tower = hf_model.family.architecture(hf_model.config).tower
    assert tower is not None
    tensors = load_file(hf_dir / "model.safetensors")
    expected = sum(tensor.numel() for name, tensor in tensors.items() if "visual" in name)
    assert tower.parameters(Rank()).total == expected


def test_rotary_frequencies_remain_float32(hf_dir, mesh):
    """Float16Module casts all buffers of a model."""
    model = open_vision(hf_dir, mesh)
    tower: Any = model.tower
    before = tower.visual.rotary_pos_emb.inv_freq.clone()
    model.bfloat16()
    assert tower.visual.blocks[0].norm1.weight.dtype is torch.bfloat16
    assert torch.equal(tower.visual.rotary_pos_emb.inv_freq, before)


def test_recomputation_gives_the_same_gradients(hf_dir, family, mesh):
    reference = VisionReference(hf_dir, family, 1)
    rows = rows_of(hf_dir, ROWS[:1])
    batch = make_batch(hf_dir, reference, rows, False)
    gradients, forwards = [], []
    for recomputes in (False, True):
        model = open_vision(hf_dir, mesh).train()
        tower: Any = model.tower
        if recomputes:
            tower.recompute_activations()
        calls: list[int] = []
        tower.visual.blocks[0].attn.register_forward_pre_hook(lambda *_, calls=calls: calls.append(1))
        tower(batch.items).square().sum().backward()
        gradients.append({name: parameter.grad for name, parameter in tower.named_parameters()})
        forwards.append(len(calls))
    assert forwards == [1, 2]
    assert all(torch.equal(gradients[0][name], gradients[1][name]) for name in gradients[0])


CONFIG_CHANGES = {
    "missing": lambda config: config.pop("vision_config"),
    "depth": lambda config: config["vision_config"].pop("depth"),
    "out_hidden_size": lambda config: config["vision_config"].update(out_hidden_size=1),
}


@pytest.mark.parametrize("change", CONFIG_CHANGES)
def test_a_config_without_the_tower_is_refused(hf_dir, tmp_path, change):
    config = json.loads((hf_dir / "config.json").read_text())
    CONFIG_CHANGES[change](config)
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError) as raised:
        resolve(tmp_path).with_images()
    assert mentions(raised.value.problem, "vision_config")


def test_images_require_a_tower(tmp_path):
    with pytest.raises(UserError) as raised:
        resolve(make_tiny_hf(tmp_path, "qwen3")).with_images()
    assert mentions(raised.value.problem, "images")


FLAT = {"type": "mrope", "mrope_section": [6, 5, 5]}


def test_rotary_settings_of_published_files(tmp_path, mesh):
    """Qwen2.5-VL's config.json has no text_config, and names a rotary type that only assigns axes."""
    nested = make_tiny_vision_hf(tmp_path / "nested", "qwen2_5_vl")
    config = json.loads((nested / "config.json").read_text())
    text = config.pop("text_config")
    del text["rope_parameters"]
    config = {**text, **config, "rope_scaling": FLAT, "rope_theta": 10000.0}
    axes_3BS = torch.tensor([[[0, 1, 1, 2]], [[0, 1, 1, 2]], [[0, 1, 2, 2]]])
    device = torch.device("cpu")
    found = RotaryEmbedding(config, device, torch.float32).at(axes_3BS)
    expected = RotaryEmbedding(resolve(nested).config, device, torch.float32).at(axes_3BS)
    assert torch.equal(found, expected)
    (nested / "config.json").write_text(json.dumps(config))
    open_vision(nested, mesh)
