"""Test models of gpt-oss with experts in MXFP4 against the decoding of transformers."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from swiftlite.base.errors import UserError
from swiftlite.bridge.encoding.index import format_of
from swiftlite.bridge.hf_config import read_config
from swiftlite.bridge.tensors import Checkpoint, describe
from tests.bridge.test_transfer import assert_same_tensors, build, load, read_all, save
from tests.messages import naming
from tests.tiny import make_tiny_hf

MATRICES = ("gate_up_proj", "down_proj")


def encode(directory: Path) -> dict[str, torch.Tensor]:
    """Replace the experts of the trunk by random codes and scales; return all tensors as transformers decodes them.

    Scales include exponents at which decoded numbers are subnormal, and the largest finite ones.
    """
    tensors = load_file(directory / "model.safetensors")
    decoded = dict(tensors)
    generator = torch.Generator().manual_seed(0)
    for name in [name for name in tensors if name.startswith("model.") and name.endswith(MATRICES)]:
        experts, columns, rows = tensors.pop(name).shape
        shape = (experts, rows, columns // 32)
        tensors[f"{name}_blocks"] = torch.randint(0, 256, (*shape, 16), generator=generator, dtype=torch.uint8)
        scales = torch.randint(110, 130, shape, generator=generator, dtype=torch.uint8)
        scales.view(-1)[:6] = torch.tensor([0, 1, 2, 127, 250, 252], dtype=torch.uint8)
        tensors[f"{name}_scales"] = scales
        decoded[name] = convert_moe_packed_tensors(tensors[f"{name}_blocks"], scales)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (directory / "config.json").write_text(json.dumps(config))
    return decoded


@pytest.mark.parametrize("depth", [0, 1])
def test_decoded_numbers_are_those_of_transformers(tmp_path, mesh, depth):
    """The export has the decoded numbers, bit for bit, in the stacks of unquantized files."""
    source = make_tiny_hf(tmp_path / "in", "gpt_oss", depth, dtype=torch.bfloat16)
    decoded = encode(source)
    load(model := build(source, mesh, depth, torch.bfloat16), source)
    save(model, source, tmp_path / "out")
    assert_same_tensors(read_all(tmp_path / "out"), decoded)
    assert {name: entry["shape"] for name, entry in describe(source).items()} == {
        name: list(tensor.shape) for name, tensor in decoded.items()
    }


def test_slices(tmp_path):
    """Slices across words and groups are read like whole matrices."""
    source = make_tiny_hf(tmp_path, "gpt_oss", dtype=torch.bfloat16)
    encode(source)
    with Checkpoint(source, format_of(read_config(source))) as checkpoint:
        key = "model.layers.1.mlp.experts.2.gate_up_proj"
        whole = checkpoint.read(key)
        assert whole.shape == (192, 64)
        for index in ((slice(3, 50), slice(None)), (slice(5, 6), slice(31, 34)), (slice(None), slice(7, 64))):
            part = torch.empty_like(whole[index])
            checkpoint.read_into(part, key, index)
            assert torch.equal(part, whole[index])


@pytest.mark.parametrize("ending", ["_blocks", "_scales"])
def test_a_part_that_does_not_fit_is_refused(tmp_path, ending):
    source = make_tiny_hf(tmp_path, "gpt_oss", dtype=torch.bfloat16)
    encode(source)
    tensors = load_file(source / "model.safetensors")
    name = f"model.layers.0.mlp.experts.down_proj{ending}"
    tensors[name] = tensors[name][:, 1:].contiguous()
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=naming("model.layers.0.mlp.experts.3.down_proj_scales")):
        Checkpoint(source, format_of(read_config(source)))
