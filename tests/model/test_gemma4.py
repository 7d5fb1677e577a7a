"""Test Gemma 4 with packed rows, and the gradients of all its tensors, against transformers."""

from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from swiftlite.args.commands import ExportArgs
from swiftlite.args.fields import RecomputeArgs
from swiftlite.bridge.audit import audit_hf
from swiftlite.bridge.hf_config import read_config
from swiftlite.export.run import convert
from swiftlite.families import index
from swiftlite.model.inputs import ModelInputs
from tests.model.logits import check_packed_rows, ids_and_positions, load_megatron, load_transformers
from tests.tiny import GEMMA4, GEMMA4_E, make_tiny_hf

LENGTHS = [5, 21, 13]
E_MODELS = [("gemma4_text", GEMMA4_E), ("gemma4", GEMMA4_E)]  # the second has experts as well
SIZES = {"num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "final_logit_softcapping": 4.0}


@pytest.mark.parametrize(("family", "sizes"), [*((family, SIZES) for family in GEMMA4), *E_MODELS])
def test_gradients_of_packed_rows(tmp_path, mesh, family, sizes):
    """The whole vocabulary is near the cap, and two sequences are longer than the windows."""
    directory = make_tiny_hf(tmp_path / "hf", family, **sizes)
    # Float32 sums in another order.
    check_packed_rows(directory, family, mesh, LENGTHS, tolerance=2e-5, in_chunks=True)


@pytest.mark.parametrize(("family", "sizes"), E_MODELS)
def test_logits_of_layers_that_share(tmp_path, mesh, family, sizes):
    """On a CPU they are bitwise those of transformers, except for sums over experts."""
    directory = make_tiny_hf(tmp_path / "hf", family, **sizes)
    reference = load_transformers(directory, family, torch.float32)
    model = load_megatron(directory, mesh, torch.float32)
    ids, positions = ids_and_positions(30)
    with torch.no_grad():
        found, expected = model(ModelInputs(ids, positions)).main, reference(ids).logits
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-5 * float(expected.abs().max()))


@pytest.mark.parametrize("recompute", [("uniform", 1), ("uniform", 4), ("block", 2)])
def test_recomputation_of_shared_states(tmp_path, mesh, recompute):
    """With 4 layers at once, layer 3 reads keys that its own group computes, and layer 5 those of another group."""
    directory = make_tiny_hf(tmp_path / "hf", "gemma4_text", **GEMMA4_E)
    method, number = recompute
    full = RecomputeArgs(recompute_granularity="full", recompute_method=method, recompute_num_layers=number)
    ids, positions = ids_and_positions(30)
    gradients = []
    for options in ({}, {"recompute": full}):
        model: Any = load_megatron(directory, mesh, torch.float32, **options).train()
        model(ModelInputs(ids, positions)).main.square().mean().backward()
        gradients.append({name: parameter.grad for name, parameter in model.named_parameters()})
    for name, gradient in gradients[0].items():
        assert gradient is not None, name
        # Gradients of keys are sums over the layers that read them, here in another order.
        atol = 2e-6 * float(gradient.abs().max())
        torch.testing.assert_close(gradients[1][name], gradient, rtol=0, atol=atol, msg=name)


def test_unused_matrices_of_published_files_are_copied(tmp_path, mesh):
    """Files of E2B have keys and values also for layers that read those of others; transformers does not read them."""
    sizes: dict[str, Any] = GEMMA4_E | {"vocab_size_per_layer_input": 320}  # that of the tokenizer
    directory = make_tiny_hf(tmp_path / "hf", "gemma4_text", with_tokenizer=True, **sizes)
    tensors = load_file(directory / "model.safetensors")
    unused = {
        f"model.layers.{layer}.self_attn.{name}.weight": torch.randn(shape)
        for layer in (3, 4, 5)
        for name, shape in (("k_proj", (64, 64)), ("v_proj", (64, 64)), ("k_norm", (32,)))
    }
    save_file(tensors | unused, directory / "model.safetensors", {"format": "pt"})
    assert audit_hf(directory, index.get(read_config(directory))) == []
    run, out = tmp_path / "run", tmp_path / "out"
    convert(ExportArgs(model=str(directory), output_dir=str(run), to_mcore=True), mesh)
    convert(ExportArgs(model=str(run), output_dir=str(out), to_hf=True), mesh)
    found = load_file(out / "model.safetensors")
    assert found.keys() == tensors.keys() | unused.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in (tensors | unused).items())
