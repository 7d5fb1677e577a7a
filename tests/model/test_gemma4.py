"""Test Gemma 4 with packed rows, and the gradients of all its tensors, against transformers."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from swiftlite.bridge.hf_config import read_config
from swiftlite.bridge.transfer import save_hf
from swiftlite.families import index
from swiftlite.model.context_parallel import describe_packed
from swiftlite.model.inputs import ModelInputs, Target
from tests.model.logits import load_megatron, load_transformers
from tests.tiny import GEMMA4, hub_name, make_tiny_hf, per_expert

LENGTHS = [5, 21, 13]
SIZES = {"num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "final_logit_softcapping": 4.0}


def gradients(model: Any, directory: Path, out: Path) -> dict[str, torch.Tensor]:
    """Return the gradients of a model by the names of files. The weights are overwritten."""
    for parameter in model.parameters():
        parameter.data.copy_(parameter.grad)
    out.mkdir()
    hf_config = read_config(directory)
    save_hf([model], out, index.get(hf_config, directory), hf_config)
    return per_expert(load_file(out / "model.safetensors"))


@pytest.mark.parametrize("family", GEMMA4)
def test_gradients_of_packed_rows(tmp_path, mesh, family):
    """The whole vocabulary is near the cap, and two sequences are longer than the windows."""
    directory = make_tiny_hf(tmp_path / "hf", family, **SIZES)
    hf = load_transformers(directory, family, torch.float32)
    rows = [torch.randint(0, 128, (length,)) for length in LENGTHS]
    loss: Any = 0.0
    for row in rows:
        loss += F.cross_entropy(hf(row[None]).logits[0, :-1], row[1:], reduction="sum")
    loss.backward()
    expected = {
        hub_name(family, name): tensor.grad for name, tensor in hf.named_parameters() if tensor.grad is not None
    }

    model: Any = load_megatron(directory, mesh, torch.float32)
    model.loss_in_chunks = True
    starts = torch.tensor([0, *torch.tensor(LENGTHS).cumsum(0)], dtype=torch.int32)
    positions = torch.cat([torch.arange(length) for length in LENGTHS])[None]
    labels = torch.cat([torch.cat([row[1:], torch.tensor([-100])]) for row in rows])[None]
    inputs = ModelInputs(torch.cat(rows)[None], positions, packed_seq_params=describe_packed(starts))
    found = model(inputs, Target(labels)).main.loss_BS.sum()
    torch.testing.assert_close(found, loss, rtol=1e-5, atol=0)
    found.backward()
    ours = gradients(model, directory, tmp_path / "gradients")
    for name, gradient in per_expert(expected).items():
        # Float32 sums in another order.
        torch.testing.assert_close(ours[name], gradient, rtol=0, atol=2e-5 * float(gradient.abs().max()))
