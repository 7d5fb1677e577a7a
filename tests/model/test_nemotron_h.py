"""Test Nemotron-H with packed rows, and the gradients of all its tensors, against transformers; and its time steps."""

from typing import Any

import pytest
import torch

from swiftlite.bridge.hf_config import read_config
from swiftlite.families import index
from swiftlite.families.rank import Rank
from swiftlite.model.inputs import ModelInputs
from tests.model.logits import check_packed_rows, ids_and_positions, load_megatron, load_transformers
from tests.tiny import make_tiny_hf

LENGTHS = [5, 90, 13]
M, A, E, P = "linear_attention", "full_attention", "moe", "mlp"
KINDS = {
    "56B": {"layers_block_type": [M, P, M, A, P]},
    "Nano": {"layers_block_type": [M, E, M, A, E, M, E], "moe_latent_size": None},
    "Super": {"layers_block_type": [M, E, M, A, E], "n_routed_experts": 8, "num_experts_per_tok": 5},
}


@pytest.mark.parametrize("name", KINDS)
def test_gradients_of_packed_rows(tmp_path, mesh, name):
    """The second sequence is longer than a chunk."""
    directory = make_tiny_hf(tmp_path / "hf", "nemotron_h", num_attention_heads=4, num_key_value_heads=2, **KINDS[name])
    # Sums in another order. If each weight is changed by one rounding, transformers' gradients change by 5e-5.
    check_packed_rows(directory, "nemotron_h", mesh, LENGTHS, tolerance=1e-4)


@pytest.mark.parametrize("name", KINDS)
def test_parameters_of_all_kinds_of_layers(tmp_path, mesh, name):
    directory = make_tiny_hf(tmp_path, "nemotron_h", depth=1, **KINDS[name])
    hf_config = read_config(directory)
    architecture = index.get(hf_config).architecture(hf_config)
    model: Any = load_megatron(directory, mesh, torch.float32)
    for layer, module in zip(architecture.layers, model.decoder.layers, strict=True):
        assert layer.parameters(Rank()).total == sum(parameter.numel() for parameter in module.parameters())


def test_time_steps_have_no_lower_limit(tmp_path, mesh):
    """Engines and megatron-core have none. transformers has `time_step_min`, so its logits are compared without it."""
    directory = make_tiny_hf(tmp_path, "nemotron_h", time_step_min=0.5)
    input_ids, position_ids = ids_and_positions(20)
    hf = load_transformers(directory, "nemotron_h", torch.float32)
    with torch.no_grad():
        ours = load_megatron(directory, mesh, torch.float32)(ModelInputs(input_ids, position_ids)).main
        limited = hf(input_ids, use_cache=False).logits
        for layer in hf.model.layers:
            if layer.block_type == M:
                layer.mixer.time_step_limit = (0.0, float("inf"))
        unlimited = hf(input_ids, use_cache=False).logits
    torch.testing.assert_close(ours, unlimited, rtol=0, atol=1e-4)
    assert (ours - limited).abs().max() > 0.1
