"""Test assistants of Gemma 4 against transformers (`tests/engines/gemma4_assistant_reference.py`)."""

import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from swiftlite.base.errors import UserError
from swiftlite.families.drafters import DrafterOptions, with_drafter
from swiftlite.families.resolved import own_settings_of, resolve
from swiftlite.model.gpt import GPTModel, Logits
from swiftlite.model.inputs import ModelInputs
from swiftlite.model.open import open_model
from tests.engines.gemma4_assistant_reference import AssistantReference, make_assistant, make_trunk
from tests.messages import naming
from tests.model.test_eagle3 import check_packed_row, check_recomputation, sum_of
from tests.model_tensors import tensor_of

STEPS = 3
IDS = torch.randint(0, 128, (20,), generator=torch.Generator().manual_seed(0)).tolist()


@pytest.fixture(scope="module", params=["gemma4_text", "gemma4", "gemma4_unified"])
def made(request, tmp_path_factory):
    """Return the directories of a trunk and an assistant, and the family of the trunk; `gemma4` has experts."""
    home = tmp_path_factory.mktemp("gemma4")
    trunk = make_trunk(home / "trunk", request.param)
    return trunk, make_assistant(home / "assistant", trunk), request.param


def load(made: tuple[Path, Path, str], mesh, **options) -> GPTModel:
    trunk, assistant, _ = made
    model = resolve(trunk)
    model = replace(model, config=with_drafter(model.config, DrafterOptions(own=own_settings_of(assistant))))
    grafted = replace(model, directory=assistant)
    heads = replace(model.heads, unroll=STEPS)
    options |= {"mtp_init": "graft", "graft_from": grafted, "freeze_trunk": True}
    (chunk,), _ = open_model(model, mesh, dtype=torch.float32, heads=heads, **options)
    return chunk


def logits(model: GPTModel) -> list[torch.Tensor]:
    ours = model(ModelInputs(torch.tensor([IDS]), torch.arange(len(IDS))[None]))
    assert isinstance(ours, Logits)
    return [each[0, : len(IDS) - step] for step, each in enumerate(ours.mtp, start=1)]


def logits_of_reference(reference: AssistantReference) -> list[torch.Tensor]:
    """Return the logits of each step at the positions of `logits`."""
    row = torch.tensor([[*IDS, 0]])
    return [logits[0] for logits, _ in reference.trained_logits(row, torch.empty(0), STEPS)]


def one_draft_of_transformers(reference: AssistantReference, place: int) -> torch.Tensor:
    """Return the logits of the first draft from a position, from the whole forward pass of transformers' class."""
    state, shared = reference.shared_keys(torch.tensor([IDS]))
    first = {"full_attention": 0, "sliding_attention": max(0, place - 7)}
    seen = {kind: tuple(each[:, :, start : place + 1] for each in shared[kind]) for kind, start in first.items()}
    embedding = reference.trunk.get_input_embeddings()(torch.tensor([[IDS[place + 1]]]))
    made = reference.assistant(
        inputs_embeds=torch.cat((embedding, state[:, place : place + 1]), dim=-1),
        position_ids=torch.tensor([[place]]),
        shared_kv_states=seen,
    )
    return made.logits[0, 0]


@torch.no_grad()
def test_drafts_are_those_of_transformers_for_the_keys_up_to_a_position(made, mesh):
    model, reference = load(made, mesh), AssistantReference.load(*made)
    first = logits(model)[0]
    for place in (0, 3, 7, 8, 15, 18):
        wanted = one_draft_of_transformers(reference, place)
        torch.testing.assert_close(first[place], wanted, rtol=0, atol=2e-5 * float(wanted.abs().max()))


def test_three_drafts_and_their_gradients(made, mesh):
    model, reference = load(made, mesh), AssistantReference.load(*made)
    reference.trunk.requires_grad_(False)
    found, expected = logits(model.train()), logits_of_reference(reference)
    for ours, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, wanted, rtol=0, atol=2e-5 * float(wanted.abs().max()))
    sum_of(found).backward()
    sum_of(expected).backward()
    gradients = {name: each.grad for name, each in reference.assistant.named_parameters()}
    config = with_drafter(resolve(made[0]).config, DrafterOptions(own=own_settings_of(made[1])))
    compared = 0
    for row in resolve(made[0]).family.head_rows(config, 0):
        if len(row.hf) > 1 or row.mcore.endswith("layer_scalar"):
            continue
        wanted = gradients[next(iter(row.hf)).removeprefix("mtp.assistant.")]
        assert wanted is not None
        ours = tensor_of(model, row.mcore).grad
        assert ours is not None, row.mcore
        torch.testing.assert_close(ours, wanted, rtol=0, atol=5e-5 * float(wanted.abs().max()), msg=row.mcore)
        compared += 1
    assert compared > 20
    assert all(parameter.grad is None for parameter in model.decoder.parameters())


def test_a_tensor_that_the_assistant_does_not_have_is_refused(made, mesh, tmp_path):
    trunk, assistant, family = made
    other = shutil.copytree(assistant, tmp_path / "other")
    tensors = load_file(other / "model.safetensors")
    save_file(tensors | {"centroids.weight": torch.ones(2)}, other / "model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match=naming("centroids.weight")):
        load((trunk, other, family), mesh)


def test_a_packed_row_is_its_sequences(made, mesh):
    check_packed_row(load(made, mesh))


def test_recomputation_changes_no_bit(made, mesh):
    check_recomputation(partial(load, made, mesh))
