"""Test assistants of Gemma 4 against transformers (`tests/engines/gemma4_assistant_reference.py`)."""

import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn.functional import cross_entropy

from swiftlite.base.errors import UserError
from swiftlite.base.heads import Heads
from swiftlite.bridge.saving import streamed_tensors
from swiftlite.families.drafters import DrafterOptions, with_drafter
from swiftlite.families.gemma4_assistant import PREFIX
from swiftlite.families.index import architecture_of
from swiftlite.families.rank import Rank
from swiftlite.families.resolved import own_settings_of, resolve
from swiftlite.model.gpt import GPTModel, Logits, Losses
from swiftlite.model.inputs import ModelInputs, Target
from swiftlite.model.loss.losses import IGNORE_INDEX
from swiftlite.model.open import open_model
from swiftlite.plan.trainable import is_head_parameter
from tests.engines.gemma4_assistant_reference import CLUSTERS, AssistantReference, make_assistant, make_trunk
from tests.messages import naming
from tests.model.test_eagle3 import check_packed_row, check_recomputation, sum_of
from tests.model_tensors import tensor_of

STEPS = 3
IDS = torch.randint(0, 128, (20,), generator=torch.Generator().manual_seed(0)).tolist()


@pytest.fixture(scope="module", params=["gemma4_text", "gemma4", "gemma4_unified", "clusters"])
def made(request, tmp_path_factory):
    """Return the directories of a trunk and an assistant, and the family of the trunk; `gemma4` has experts."""
    if request.param == "clusters":
        return request.getfixturevalue("with_clusters")
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


def states_of_reference(reference: AssistantReference) -> list[torch.Tensor]:
    """Return the states [1, S, A] of each step at the positions of `logits`."""
    state, shared = reference.shared_keys(torch.tensor([IDS]))
    states, ids = [], torch.tensor([[*IDS, *[0] * STEPS]])
    for step in range(1, STEPS + 1):
        read = reference.trunk.get_input_embeddings()(ids[:, step : step + len(IDS)])
        state, drafted = reference.step(read, state, shared)
        states.append(drafted[:, : len(IDS) - step])
    return states


def logits_of_reference(reference: AssistantReference) -> list[torch.Tensor]:
    """Return the logits of each step at the positions of `logits`."""
    return [reference.drafted_logits(states)[0] for states in states_of_reference(reference)]


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
        if len(row.hf) > 1 or row.mcore.endswith("layer_scalar") or ".clusters." in row.mcore:
            continue
        wanted = gradients[next(iter(row.hf)).removeprefix("mtp.assistant.")]
        assert wanted is not None
        ours = tensor_of(model, row.mcore).grad
        assert ours is not None, row.mcore
        torch.testing.assert_close(ours, wanted, rtol=0, atol=5e-5 * float(wanted.abs().max()), msg=row.mcore)
        compared += 1
    assert compared > 20
    assert all(parameter.grad is None for parameter in model.decoder.parameters())


@pytest.fixture(scope="module")
def with_clusters(tmp_path_factory):
    """Return the same for an assistant with clusters of tokens."""
    home = tmp_path_factory.mktemp("clusters")
    trunk = make_trunk(home / "trunk")
    return trunk, make_assistant(home / "assistant", trunk, **CLUSTERS), "gemma4_text"


@pytest.mark.parametrize(("kind", "in_chunks"), [("ce", True), ("kl", True), ("kl", False)])
def test_the_loss_of_clusters(with_clusters, mesh, kind, in_chunks):
    """It is added to that of all logits, and trains only centroids. Predictions are tokens of selected clusters."""
    model, reference = load(with_clusters, mesh, mtp_loss=kind), AssistantReference.load(*with_clusters)
    model.loss_in_chunks = in_chunks
    reference.trunk.requires_grad_(False)
    row = torch.tensor([[*IDS, *[IGNORE_INDEX] * (STEPS + 1)]])
    labels = [row[:, depth + 1 : depth + 1 + len(IDS)] for depth in range(STEPS + 1)]
    weights = [torch.rand(each.shape) for each in labels] if in_chunks else None
    inputs = ModelInputs(torch.tensor([IDS]), torch.arange(len(IDS))[None])
    found = model.train()(inputs, Target(labels[0], labels[1:], weights=weights))
    assert isinstance(found, Losses)
    ours, theirs = [], []
    trunk_logits = reference.trunk(torch.tensor([IDS])).logits[0].detach()
    for step, (of_step, states) in enumerate(zip(found.mtp, states_of_reference(reference), strict=True), start=1):
        known = len(IDS) - step - 1  # positions with a label
        loss = loss_of(reference, states[:, :known], labels[step][:, :known], trunk_logits[step:][:known], kind)
        torch.testing.assert_close(of_step.loss_BS[0, :known], loss, rtol=0, atol=1e-4)
        assert torch.equal(of_step.prediction_BS[:, :known], reference.drafted_logits(states[:, :known]).argmax(-1))
        share_N = weights[step][0, :known] if weights else torch.ones(known)
        assert (of_step.total is not None) == in_chunks
        ours.append(of_step.loss_BS.sum() if of_step.total is None else of_step.total)
        theirs.append((loss * share_N).sum())
    torch.stack(ours).sum().backward()
    torch.stack(theirs).sum().backward()
    for name, module in (
        ("clusters.centroids", reference.assistant.masked_embedding.centroids),
        ("output_layer", reference.assistant.lm_head),
        ("pre_projection", reference.assistant.pre_projection),
    ):
        gradient, wanted = model.get_parameter(f"mtp.layers.0.{name}.weight").grad, module.weight.grad
        torch.testing.assert_close(gradient, wanted, rtol=0, atol=5e-5 * float(wanted.abs().max()), msg=name)


def loss_of(
    reference: AssistantReference, states: torch.Tensor, labels: torch.Tensor, trunk_logits: torch.Tensor, kind: str
) -> torch.Tensor:
    """Return the loss [N] of a draft at the positions of `states` [1, N, A]."""
    logits = reference.assistant.lm_head(states)[0]
    of_tokens = cross_entropy(logits, labels[0], reduction="none")
    if kind == "kl":
        log_p = trunk_logits.log_softmax(-1)
        of_tokens = (log_p.exp() * (log_p - logits.log_softmax(-1))).sum(-1)
    scores, clusters = reference.cluster_scores(states.detach(), labels)
    return of_tokens + cross_entropy(scores[0], clusters[0], reduction="none")


def test_clusters_are_in_the_estimate(with_clusters, mesh):
    config = with_drafter(resolve(with_clusters[0]).config, DrafterOptions(own=own_settings_of(with_clusters[1])))
    sizes = architecture_of(config).drafter_of(Heads.from_config(config))
    assert sizes is not None
    held = load(with_clusters, mesh).state_dict().items()
    assert sizes.parameters(Rank()).total == sum(
        each.numel() for key, each in held if each is not None and is_head_parameter(key)
    )


def test_a_tensor_that_the_assistant_does_not_have_is_refused(made, mesh, tmp_path):
    trunk, assistant, family = made
    other = shutil.copytree(assistant, tmp_path / "other")
    tensors = load_file(other / "model.safetensors")
    save_file(tensors | {"centroids.weight": torch.ones(2)}, other / "model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match=naming("centroids.weight")):
        load((trunk, other, family), mesh)


def test_ids_of_tokens_are_integers(with_clusters, mesh, tmp_path):
    """They are not cast to the dtype of weights, and files with other numbers are refused."""
    config = with_drafter(resolve(with_clusters[0]).config, DrafterOptions(own=own_settings_of(with_clusters[1])))
    name, family = "masked_embedding.token_ordering", resolve(with_clusters[0]).family
    for dtypes in ("bfloat16", {"lm_head.weight": "bfloat16"}):
        streamed = streamed_tensors([load(with_clusters, mesh)], family, config, "heads", dtypes=dtypes)
        found = {key.removeprefix(PREFIX): dtype for key, (dtype, _) in streamed.items()}
        assert (found.pop(name), *set(found.values())) == (torch.int64, torch.bfloat16)
    other = shutil.copytree(with_clusters[1], tmp_path / "other")
    tensors = load_file(other / "model.safetensors")
    save_file(tensors | {name: tensors[name].float()}, other / "model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match=naming(PREFIX + name)):
        load((with_clusters[0], other, "gemma4_text"), mesh)


@pytest.mark.parametrize("wrong", [0, -1, 100_000])
def test_clusters_that_do_not_have_each_token_once_are_refused(with_clusters, mesh, tmp_path, wrong):
    other = shutil.copytree(with_clusters[1], tmp_path / "other")
    tensors, name = load_file(other / "model.safetensors"), "masked_embedding.token_ordering"
    tensors[name][tensors[name].argmax()] = wrong
    save_file(tensors, other / "model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match=naming(f"other {name}")):
        load((with_clusters[0], other, "gemma4_text"), mesh)


def test_a_packed_row_is_its_sequences(made, mesh):
    check_packed_row(load(made, mesh))


def test_recomputation_changes_no_bit(made, mesh):
    check_recomputation(partial(load, made, mesh))
