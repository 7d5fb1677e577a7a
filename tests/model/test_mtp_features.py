"""Test MTP heads with features against an implementation in plain torch (`tests/engines/feature_reference.py`)."""

from copy import deepcopy
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from swiftlite.families.mtp_features import own_config
from swiftlite.families.resolved import resolve
from swiftlite.model.gpt import GPTModel
from swiftlite.model.open import open_model
from tests.engines.feature_reference import FeatureReference, add_head, declare
from tests.model.test_eagle3 import IDS, STEPS, check_packed_row, check_recomputation, logits_of, sum_of
from tests.model.test_unroll import drafted_logits
from tests.model_tensors import tensor_of
from tests.tiers import all_but
from tests.tiny import make_tiny_hf

FEATURES = [1, 3]


def make(directory: Path, family: str = "llama") -> Path:
    return add_head(make_tiny_hf(directory, family, num_hidden_layers=4), family, FEATURES)


def load(directory: Path, mesh, unroll: int = STEPS, **options) -> GPTModel:
    model = resolve(directory)
    heads = replace(model.heads, unroll=unroll)
    (chunk,), _ = open_model(model, mesh, dtype=torch.float32, heads=heads, freeze_trunk=True, **options)
    return chunk


@pytest.mark.parametrize(
    "family", all_but(["llama", "qwen2", "granite", "qwen3_moe", "deepseek_v3"], "qwen2", "qwen3_moe")
)
def test_three_steps_and_their_gradients(family, tmp_path, mesh):
    directory = make(tmp_path, family)
    model, reference = load(directory, mesh), FeatureReference.load(directory, family)
    reference.trunk.requires_grad_(False)
    exact = deepcopy(reference).double()
    expected = [torch.stack(of_step) for of_step in drafted_logits(reference, IDS)]
    found = logits_of(model.train())
    for ours, wanted in zip(found, expected, strict=True):
        # Float32 sums in another order, as in test_unroll.py.
        torch.testing.assert_close(ours, wanted, rtol=0, atol=2e-5 * float(wanted.abs().max()))
    sum_of(found).backward()
    sum_of([torch.stack(of_step) for of_step in drafted_logits(exact, IDS)]).backward()
    gradients = {f"mtp.layers.0.{name}": each.grad for name, each in exact.block.named_parameters()}
    gradients |= {name.replace("/", "."): each.grad for name, each in exact.own.items()}
    resolved = resolve(directory)
    for row in resolved.family.head_rows(resolved.config, 0):
        if not tensor_of(model, row.mcore).requires_grad:
            continue  # a buffer
        if len(row.hf) > 1 or ".experts." in row.mcore:
            continue  # joined or stacked; the comparison of layouts covers them
        wanted, ours = gradients[next(iter(row.hf))], tensor_of(model, row.mcore).grad
        assert wanted is not None
        assert ours is not None
        torch.testing.assert_close(ours.double(), wanted, rtol=0, atol=1e-4 * float(wanted.abs().max()), msg=row.mcore)
    assert all(parameter.grad is None for parameter in model.decoder.parameters())


def test_another_layer_is_noticed(tmp_path, mesh):
    """Layers that are off by one change the first draft, and through it all others."""
    directory = make(tmp_path)
    before = logits_of(load(directory, mesh))
    after = logits_of(load(declare(directory, [1, 2]), mesh))
    assert all(float((one - other).abs().max()) > 0.1 for one, other in zip(before, after, strict=True))


def test_a_packed_row_is_its_sequences(tmp_path, mesh):
    check_packed_row(load(make(tmp_path), mesh))


def test_recomputation_changes_no_bit(tmp_path, mesh):
    check_recomputation(partial(load, make(tmp_path), mesh))


def test_a_single_draft_trains_no_projection_of_later_ones(tmp_path, mesh):
    model = load(make(tmp_path), mesh, unroll=1).train()
    sum_of(logits_of(model)).backward()
    trained = {name for name, each in model.mtp.named_parameters() if each.requires_grad}
    assert trained == {name for name, each in model.mtp.named_parameters() if each.grad is not None}
    assert "layers.0.eh_proj.first.weight" in trained
    assert "layers.0.eh_proj.later.weight" not in trained


def test_layers_in_vllm_are_counted_by_their_inputs(tmp_path):
    """The number of all layers is the output of the last one."""
    model = resolve(make(tmp_path))
    assert own_config(model.family, model.config)["eagle_aux_hidden_state_layer_ids"] == [*FEATURES, 4]
