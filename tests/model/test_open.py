"""Test loading a model from a Hugging Face directory: with its heads, with other heads, and without heads."""

import pytest
import torch
from safetensors.torch import load_file

from swiftlite.base.errors import UserError
from swiftlite.base.heads import Heads
from swiftlite.families.resolved import resolve
from swiftlite.model.open import open_model
from tests.engines.reference import convention
from tests.messages import naming
from tests.model_tensors import tensors_of
from tests.tiny import make_tiny_hf

PROJECTION = "mtp.layers.0.eh_proj.weight"


@pytest.fixture
def hf_dir(tmp_path):
    return make_tiny_hf(tmp_path / "hf", "qwen3", depth=1)


def test_what_a_directory_says(hf_dir):
    hf_model = resolve(str(hf_dir))
    assert (hf_model.directory, hf_model.family.name, hf_model.heads) == (hf_dir, "qwen3", Heads(1))


def test_a_directory_without_a_model_is_named(tmp_path):
    with pytest.raises(UserError, match=naming("config.json")):
        resolve(tmp_path)


def test_the_model_has_the_numbers_of_the_directory(hf_dir, mesh):
    (model,), report = open_model(resolve(hf_dir), mesh, dtype=torch.bfloat16)
    parameters = dict(tensors_of(model))
    assert set(report.loaded) == set(parameters)
    assert {parameter.dtype for parameter in parameters.values()} == {torch.bfloat16}
    tensors = load_file(hf_dir / "model.safetensors")
    assert parameters[PROJECTION].equal(tensors["mtp.fc.weight"].bfloat16())
    assert parameters["embedding.word_embeddings.weight"].equal(tensors["model.embed_tokens.weight"].bfloat16())


def test_heads_may_be_dropped_drawn_or_taken_from_another_model(hf_dir, mesh, tmp_path):
    hf_model = resolve(hf_dir)
    (without,), report = open_model(hf_model, mesh, dtype=torch.float32, heads=Heads())
    assert not [name for name, _ in without.named_parameters() if name.startswith("mtp.")]
    assert all(key.startswith("mtp.") for key in report.dropped)

    (drawn,), report = open_model(hf_model, mesh, dtype=torch.float32, heads=Heads(2), mtp_init="random", seed=7)
    assert report.initialized[PROJECTION] == "random"
    (again,), _ = open_model(hf_model, mesh, dtype=torch.float32, heads=Heads(2), mtp_init="random", seed=7)
    assert drawn.state_dict()[PROJECTION].equal(again.state_dict()[PROJECTION])

    other = make_tiny_hf(tmp_path / "other", "qwen3", depth=1, seed=1)
    (grafted,), _ = open_model(hf_model, mesh, dtype=torch.float32, mtp_init="graft", graft_from=resolve(other))
    assert grafted.state_dict()[PROJECTION].equal(load_file(other / "model.safetensors")["mtp.fc.weight"])


def test_heads_are_fed_what_their_engine_feeds_them(tmp_path, mesh):
    hf_model = resolve(make_tiny_hf(tmp_path, "mimo", depth=1))
    for engine, before_norm in (("vllm", True), ("sglang", False)):
        fed = convention(engine, "mimo").drafting
        (model,), _ = open_model(hf_model, mesh, dtype=torch.float32, heads=Heads(1, drafting=fed))
        assert model.drafting == fed
        assert model.drafting.takes_before_norm is before_norm


def test_further_options_reach_the_model(hf_dir, mesh):
    (model,), _ = open_model(resolve(hf_dir), mesh, dtype=torch.float32, mtp_loss="kl")
    assert model.mtp_loss == "kl"
