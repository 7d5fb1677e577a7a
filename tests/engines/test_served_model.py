"""Test what is rejected before an engine starts."""

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from swiftlite.base.errors import UserError
from swiftlite.bridge.audit import audit_hf
from swiftlite.engines.index import ENGINES
from swiftlite.engines.served_model import log_fed_otherwise, require_heads, resolve_served
from swiftlite.families import FAMILIES
from tests.messages import mentions, naming
from tests.tiny import CLASSES, make_tiny_hf


def edit(directory, drop=(), add=None):
    tensors = load_file(directory / "model.safetensors")
    tensors = {name: tensor for name, tensor in tensors.items() if name not in drop} | (add or {})
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("family", sorted(CLASSES))
def test_whole_heads_pass(family, depth, tmp_path):
    model = resolve_served(make_tiny_hf(tmp_path, family, depth))
    require_heads(model)
    assert model.heads.layers == depth


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
@pytest.mark.parametrize("family", ["mimo", "glm4_moe"])
def test_an_engine_that_feeds_heads_otherwise_is_named(family, engine, tmp_path, caplog):
    for_sglang = ENGINES["sglang"].convention_for(FAMILIES[family]).drafting
    model = resolve_served(make_tiny_hf(tmp_path, family, 1, mtp_drafting=for_sglang.to_json()))
    log_fed_otherwise(model, ENGINES[engine])
    difference = for_sglang.difference(ENGINES[engine].convention_for(FAMILIES[family]).drafting)
    assert bool(difference) is bool(caplog.text) is (engine == "vllm")
    assert difference in caplog.text


def test_heads_for_vllm_in_another_engine(tmp_path, caplog):
    log_fed_otherwise(resolve_served(make_tiny_hf(tmp_path / "mimo", "mimo", 1)), ENGINES["sglang"])
    assert mentions(caplog.text, "SGLang --draft_for sglang")
    caplog.clear()
    log_fed_otherwise(resolve_served(make_tiny_hf(tmp_path / "qwen3", "qwen3", 1)), ENGINES["sglang"])
    log_fed_otherwise(resolve_served(make_tiny_hf(tmp_path / "none", "mimo", 0)), ENGINES["sglang"])
    assert not caplog.text


def test_a_path_that_is_no_directory(tmp_path):
    with pytest.raises(UserError, match=naming(f"{tmp_path / 'absent'}: config.json")):
        resolve_served(tmp_path / "absent")


@pytest.mark.parametrize("part", ["", "checkpoint-20"])
def test_a_training_run_is_told_to_export(part, tmp_path):
    (tmp_path / "args.json").write_text("{}")
    (tmp_path / "checkpoint-20").mkdir()
    with pytest.raises(UserError) as error:
        resolve_served(tmp_path / part)
    assert f"swiftlite export --to_hf --model {tmp_path / part}" in error.value.hint


def test_a_model_exported_into_the_run_is_a_model(tmp_path):
    (tmp_path / "args.json").write_text("{}")
    assert resolve_served(make_tiny_hf(tmp_path / "hf", "qwen3", 1)).heads.layers == 1


def test_no_heads_promised(tmp_path):
    with pytest.raises(UserError) as error:
        require_heads(resolve_served(make_tiny_hf(tmp_path, "qwen3")))
    assert mentions(str(error.value), "--speculative mtp config.json")
    assert "--mtp_num_layers 1" in error.value.hint


def test_a_missing_tensor_of_a_head_is_named(tmp_path):
    directory = make_tiny_hf(tmp_path, "qwen3", 2)
    edit(directory, drop=["mtp.heads.1.fc.weight", "mtp.layers.0.mlp.up_proj.weight"])
    with pytest.raises(UserError) as error:
        require_heads(resolve_served(directory))
    assert mentions(str(error.value), "mtp.heads.1.fc.weight mtp.layers.0.mlp.up_proj.weight")


def test_an_adapter_beside_the_weights(tmp_path):
    """If PEFT is installed, transformers applies the adapter, so its logits differ from those of the weights."""
    from peft import LoraConfig, get_peft_model  # which takes seconds, in every process that collects this test

    directory = make_tiny_hf(tmp_path, "qwen3", depth=1)
    ids = torch.arange(8)[None]
    model = AutoModelForCausalLM.from_pretrained(directory)
    own = model(ids).logits
    adapted = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    adapted.save_pretrained(str(directory))
    assert not torch.equal(AutoModelForCausalLM.from_pretrained(directory)(ids).logits, own)
    with pytest.raises(UserError) as refused:
        resolve_served(directory)
    assert "adapter_config.json" in refused.value.problem
    assert "adapter_config.json" in "".join(audit_hf(directory, FAMILIES["qwen3"]))
    (directory / "adapter_config.json").unlink()
    resolve_served(directory)
