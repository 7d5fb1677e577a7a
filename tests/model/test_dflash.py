"""Test DFlash and DSpark drafters against an implementation in plain torch (`tests/engines/dflash_reference.py`)."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from swiftlite.base.errors import UserError
from swiftlite.bridge.rows import shapes_of
from swiftlite.families import dflash
from swiftlite.families.drafters import DrafterOptions, with_drafter
from swiftlite.families.resolved import resolve
from swiftlite.model.gpt import GPTModel
from swiftlite.model.inputs import ModelInputs
from swiftlite.model.open import open_model
from tests.engines.dflash_reference import DFlashReference, add_drafter, declare
from tests.messages import naming
from tests.model.test_eagle3 import IDS, STEPS, check_packed_row, check_recomputation, logits_of, sum_of
from tests.model_tensors import tensor_of
from tests.tiny import make_tiny_hf, make_tiny_vision_hf

DRAFTS = STEPS
FEATURES = [1, 2, 3]
RANK = 8


def make(directory: Path, family: str = "llama", layers: int = 2, rank: int = 0) -> Path:
    return add_drafter(make_tiny_hf(directory, family, num_hidden_layers=4), FEATURES, layers, rank)


def load(directory: Path, mesh, **options) -> GPTModel:
    model = resolve(directory)
    heads = replace(model.heads, unroll=DRAFTS)
    (chunk,), _ = open_model(model, mesh, dtype=torch.float32, heads=heads, freeze_trunk=True, **options)
    return chunk


def expected_logits(reference: DFlashReference) -> list[torch.Tensor]:
    """Return the logits of each draft at the positions that `logits_of` returns."""
    ids = torch.tensor([IDS])
    context, _ = reference.trunk_states(ids)
    states = reference.block_states(context[:, :-1], ids[:, 1:], DRAFTS)[0]
    known = [len(IDS) - 1 - draft for draft in range(DRAFTS)]
    return [reference.logits_after(states[:end, draft], ids[0, draft + 1 :]) for draft, end in enumerate(known)]


CASES = [("llama", 2, 0), ("qwen3_moe", 1, 0), ("llama", 2, RANK), ("qwen3", 1, RANK)]


@pytest.mark.parametrize(("family", "layers", "rank"), CASES)
def test_all_drafts_and_their_gradients(family, layers, rank, tmp_path, mesh):
    directory = make(tmp_path, family, layers, rank)
    model, reference = load(directory, mesh), DFlashReference.load(directory, family)
    reference.trunk.requires_grad_(False)
    expected, found = expected_logits(reference), logits_of(model.train())
    for ours, wanted in zip(found, expected, strict=True):
        # Float32 sums in another order, as in test_unroll.py.
        torch.testing.assert_close(ours, wanted, rtol=0, atol=2e-5 * float(wanted.abs().max()))
    sum_of(found).backward()
    sum_of(expected).backward()
    resolved = resolve(directory)
    for row in resolved.family.head_rows(resolved.config, 0):
        ours = tensor_of(model, row.mcore).grad
        if row.mcore.endswith("k_layernorm.weight"):
            assert ours is None
            continue
        if len(row.hf) > 1:
            continue  # joined; the comparison of layouts covers them
        wanted = reference.own[next(iter(row.hf)).replace(".", "/")].grad
        assert ours is not None
        assert wanted is not None
        torch.testing.assert_close(ours, wanted, rtol=0, atol=5e-5 * float(wanted.abs().max()), msg=row.mcore)
    assert all(parameter.grad is None for parameter in model.decoder.parameters())


def test_what_a_block_sees(tmp_path, mesh):
    """Later tokens change no bit of the drafts; the anchor changes all of them."""
    model = load(make(tmp_path), mesh)
    place = 6
    changed = {offset: [*IDS] for offset in (1, 2)}
    for offset, row in changed.items():
        row[place + offset] = (row[place + offset] + 1) % 100
    rows = [model(ModelInputs(torch.tensor([row]), torch.arange(len(row))[None])) for row in (IDS, *changed.values())]
    plain, of_anchor, of_later = ([each[0, place] for each in row.mtp] for row in rows)
    assert all(torch.equal(one, other) for one, other in zip(plain, of_later, strict=True))
    assert all(float((one - other).abs().max()) > 1e-3 for one, other in zip(plain, of_anchor, strict=True))


def test_another_layer_is_noticed(tmp_path, mesh):
    """Layers that are off by one give other logits."""
    directory = make(tmp_path)
    before = logits_of(load(directory, mesh))
    config = json.loads((directory / "config.json").read_text())
    config["drafter"]["feature_layers"] = [0, 1, 2]
    (directory / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=naming("drafter feature_layers 0")):
        load(directory, mesh)
    config["drafter"]["feature_layers"] = [1, 2]
    (directory / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=naming("fc.weight")):
        load(directory, mesh)
    reference = DFlashReference.load(declare(directory, FEATURES, 2), "llama")
    reference.features = [0, 1, 2]
    after = expected_logits(reference)
    assert all(float((one - other).abs().max()) > 0.1 for one, other in zip(before, after, strict=True))


@pytest.mark.parametrize("rank", [0, RANK])
def test_a_packed_row_is_its_sequences(rank, tmp_path, mesh):
    check_packed_row(load(make(tmp_path, rank=rank), mesh))


@pytest.mark.parametrize("rank", [0, RANK])
def test_recomputation_changes_no_bit(rank, tmp_path, mesh):
    check_recomputation(partial(load, make(tmp_path, rank=rank), mesh))


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_new_drafter_starts_with_copies_of_the_last_layers(family, tmp_path, mesh):
    directory = make_tiny_hf(tmp_path, family, num_hidden_layers=4)
    config = json.loads((directory / "config.json").read_text())
    declared = dflash.declaration(config) | {"layers": 1, "decoder_layers": 2}
    (directory / "config.json").write_text(json.dumps(config | {"drafter": declared}))
    (model,), report = open_model(resolve(directory), mesh, dtype=torch.float32, mtp_init="copy_last_layer")
    drafter: Any = model.mtp.layers[0]
    decoder: Any = model.decoder
    for own, source in zip(drafter.decoder_layers, decoder.layers[-2:], strict=True):
        of_trunk = dict(source.named_parameters())
        for name, parameter in own.named_parameters():
            if name.endswith("k_layernorm.weight") or name not in of_trunk:
                assert bool((parameter == 1).all()), name
            else:
                assert torch.equal(parameter, of_trunk[name]), name
    assert torch.equal(drafter.final_layernorm.weight, decoder.final_layernorm.weight)
    assert torch.equal(drafter.hidden_norm.weight, decoder.layers[-1].input_layernorm.weight)
    features = torch.randn(2, 3 * 64)
    assert torch.equal(drafter.fc(features), features[:, -64:])
    assert report.initialized["mtp.layers.0.fc.weight"] == "copy_last_layer"


def test_names_are_those_of_published_files(tmp_path):
    """The tensors of `z-lab/Qwen3-8B-DFlash-b16`, with another number of layers."""
    model = resolve(make(tmp_path, layers=1))
    layer = [f"{name}_layernorm" for name in ("input", "post_attention")]
    layer += [f"mlp.{name}_proj" for name in ("down", "gate", "up")] + [f"self_attn.{name}_proj" for name in "kqvo"]
    layer += [f"self_attn.{name}_norm" for name in "qk"]
    names = {f"{name}.weight" for name in ("fc", "hidden_norm", "norm", *(f"layers.0.{part}" for part in layer))}
    assert shapes_of(model.family.head_rows(model.config, 0)).keys() == names


@pytest.mark.parametrize("family", ["exaone4_5", "gemma3_text", "granite", "mistral3", "qwen3_vl"])
def test_models_without_this_drafter_are_refused(family, tmp_path):
    """Vision-language models, other activations and norms, and factors of embeddings."""
    hf_dir = make_tiny_vision_hf(tmp_path, family) if family == "qwen3_vl" else make_tiny_hf(tmp_path, family)
    model = resolve(hf_dir)
    assert dflash.why_not(model.family, with_drafter(model.config, DrafterOptions("dflash")))


def test_settings_in_config_json_are_kept():
    """A user can set the mask token; the trained drafter stays if its number of layers is not given again."""
    plain = {"num_hidden_layers": 4, "vocab_size": 100}
    chosen = plain | {"drafter": {"kind": "dflash", "mask_token_id": 5}}
    new = with_drafter(chosen, DrafterOptions("dflash", 2))
    assert new["drafter"] == dflash.declaration(plain) | {"mask_token_id": 5, "decoder_layers": 2}
    trained = plain | {"drafter": {**new["drafter"], "layers": 1}}
    assert with_drafter(trained, DrafterOptions("dflash")) == trained
    assert with_drafter(trained, DrafterOptions("dflash", 3))["drafter"] == {**new["drafter"], "decoder_layers": 3}
    assert with_drafter(trained, DrafterOptions("eagle3"))["drafter"]["kind"] == "eagle3"
    for size in ({}, {"vocab_size": "abc"}):
        unknown = {"num_hidden_layers": 4, **size}
        assert with_drafter(unknown, DrafterOptions("dflash")) == unknown


@pytest.mark.parametrize(
    ("num_layers", "features"),
    [
        (2, [1]),
        (4, [1, 2, 3]),
        (7, [2, 3, 4, 5, 6]),
        (8, [2, 3, 4, 5, 6]),
        (9, [2, 3, 4, 6, 7]),
        (36, [2, 10, 18, 26, 34]),
    ],
)
def test_features_are_spread_over_the_trunk(num_layers, features):
    """Those of 36 layers are the published ones of Qwen3-8B: outputs of layers 1, 9, 17, 25 and 33."""
    found = dflash.declaration({"num_hidden_layers": num_layers, "vocab_size": 100})["feature_layers"]
    assert found == features
