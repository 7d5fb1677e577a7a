"""Test that the heads of one checkpoint are copied to the trunk of another, bitwise."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from swiftlite.base.errors import UserError
from swiftlite.bridge.tensors import describe
from tests.bridge.test_transfer import build, load, read_all, save
from tests.messages import has_line, mentions
from tests.tiny import make_tiny_hf


@pytest.mark.parametrize("own", [0, 2], ids=["without heads", "with heads of its own"])
@pytest.mark.parametrize("family", ["qwen3", "mimo", "glm4_moe"])
def test_heads_are_the_base_s_and_the_trunk_is_the_model_s(family, own, tmp_path, mesh):
    tuned = make_tiny_hf(tmp_path / "tuned", family, depth=own, seed=0, dtype=torch.bfloat16)
    base = make_tiny_hf(tmp_path / "base", family, depth=2, seed=1, dtype=torch.bfloat16)
    model = build(tuned, mesh, depth=2, dtype=torch.bfloat16)
    report = load(model, tuned, mtp_init="graft", graft_from=base)
    assert set(report.initialized.values()) == {"graft"}
    dtypes = {key: tensor["dtype"] for directory in (base, tuned) for key, tensor in describe(directory).items()}
    save(model, tuned, tmp_path / "out", dtypes=dtypes)
    result, trunk, heads = (read_all(directory) for directory in (tmp_path / "out", tuned, base))
    assert result.keys() == heads.keys()
    from_trunk, from_base = [], []
    for key, tensor in result.items():
        is_head = key.startswith(("mtp.", "model.mtp_", "model.layers.2.", "model.layers.3."))
        if is_head and key.endswith(("embed_tokens.weight", "shared_head.head.weight")):  # copies of the trunk's
            assert torch.equal(tensor, trunk["lm_head.weight" if "head.head" in key else "model.embed_tokens.weight"])
        elif is_head:
            from_base.append(torch.equal(tensor, heads[key]))
        else:
            from_trunk.append(torch.equal(tensor, trunk[key]))
            assert not torch.equal(tensor, heads[key])
    assert len(from_base) > 20
    assert len(from_trunk) > 20
    assert all(from_base + from_trunk)


def graft(tmp_path: Path, mesh, base: Path, depth: int = 1) -> str:
    tuned = make_tiny_hf(tmp_path / "tuned", "qwen3", depth=0)
    with pytest.raises(UserError) as caught:
        load(build(tuned, mesh, depth), tuned, mtp_init="graft", graft_from=base)
    return str(caught.value)


def test_other_shapes_are_named(tmp_path, mesh):
    message = graft(tmp_path, mesh, make_tiny_hf(tmp_path / "base", "qwen3", depth=1, intermediate_size=80))
    assert mentions(message, "mtp.layers.0.mlp.gate_proj.weight [80, 64] [96, 64]")
    assert "q_proj" not in message


def test_another_number_of_heads_is_refused(tmp_path, mesh):
    message = graft(tmp_path, mesh, make_tiny_hf(tmp_path / "base", "qwen3", depth=2))
    assert has_line(message, "--mtp_num_layers 1 config.json 2")


def test_another_family_is_refused(tmp_path, mesh):
    message = graft(tmp_path, mesh, make_tiny_hf(tmp_path / "base", "llama", depth=1))
    assert mentions(message, "llama qwen3")


def test_missing_tensors_are_named(tmp_path, mesh):
    base = make_tiny_hf(tmp_path / "base", "qwen3", depth=1)
    tensors = load_file(base / "model.safetensors")
    del tensors["mtp.fc.weight"]
    save_file(tensors, base / "model.safetensors", metadata={"format": "pt"})
    assert "mtp.fc.weight" in graft(tmp_path, mesh, base)


def test_a_format_that_cannot_be_read_is_named(tmp_path, mesh):
    base = make_tiny_hf(tmp_path / "base", "qwen3", depth=1)
    config = json.loads((base / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "gptq", "bits": 4}
    (base / "config.json").write_text(json.dumps(config))
    assert mentions(graft(tmp_path, mesh, base), "config.json quantization_config gptq")
