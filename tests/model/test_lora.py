"""Test the activation bytes of adapters against the estimate of `doctor --plan`."""

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from swiftlite import families
from swiftlite.base.lora import Lora, is_adapter
from swiftlite.bridge.hf_config import read_config
from swiftlite.families.rank import Rank
from swiftlite.model.inputs import ModelInputs
from swiftlite.model.layers.lora import add_adapters
from swiftlite.plan.cost.adapters import adapter_activation_bytes
from tests.model.test_logits import ids_and_positions, load_megatron
from tests.tiny import make_tiny_hf

LORA, DORA = Lora(4, 8.0), Lora(4, 8.0, has_magnitudes=True)


def activation_bytes(hf_dir, mesh, lora: Lora) -> int:
    """Return the bytes of states that autograd saves in a forward pass, each storage once.

    Parameters, and vectors that exist once per layer and not once per token, are not counted.
    """
    model = load_megatron(hf_dir, mesh, torch.bfloat16)
    hf_config = read_config(hf_dir)
    add_adapters([model], lora, families.get(hf_config).rows(hf_config, 0))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(is_adapter(name))
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    saved: dict[int, torch.Tensor] = {}  # holds them, so that no address is used twice

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        address = tensor.untyped_storage().data_ptr()
        if tensor.dim() > 1 and address not in own:
            saved[address] = tensor
        return tensor

    ids, positions = ids_and_positions(24, rows=2)
    with saved_tensors_hooks(pack, lambda tensor: tensor):
        model(ModelInputs(ids, positions))
    return sum(tensor.untyped_storage().nbytes() for tensor in saved.values())


@pytest.mark.parametrize("family", ["qwen2", "qwen3_moe"])
def test_dora_keeps_one_tensor_for_each_layer_beside_what_lora_keeps(tmp_path, mesh, family):
    hf_dir = make_tiny_hf(tmp_path, family)
    architecture = families.get(read_config(hf_dir)).architecture(read_config(hf_dir))
    rank = Rank(rows=2, length=24)
    counted = [
        adapter_activation_bytes(layer, architecture.layer_rows(number), DORA, rank)
        for number, layer in enumerate(architecture.layers)
    ]
    found = activation_bytes(hf_dir, mesh, DORA) - activation_bytes(hf_dir, mesh, LORA)
    assert found == sum(counted)
    assert sum(counted) > 0
