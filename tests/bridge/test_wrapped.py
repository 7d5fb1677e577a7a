"""Test language models inside vision-language models.

Their settings are read and changed under `text_config`. The number of heads is counted from tensors if config.json does
not declare it. Everything outside of the language model is exported unchanged.
"""

import json
from collections.abc import Mapping
from itertools import product
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText, Gemma3TextConfig

from swiftlite import families
from swiftlite.args.commands import ExportArgs
from swiftlite.base.heads import Heads
from swiftlite.bridge.audit import audit_hf
from swiftlite.bridge.hf_config import read_config, write_patched
from swiftlite.export.run import convert
from swiftlite.families.resolved import resolve
from swiftlite.model.inputs import ModelInputs
from swiftlite.model.open import open_model
from swiftlite.plan.facts import read_hf_config
from swiftlite.train.checkpoint.source import CARRIED_FILE
from tests.tiny import COPIED_TOWER, WRAPPED, carried_tensors, make_tiny_hf, make_tiny_vision_hf


@pytest.fixture
def hf_dir(tmp_path):
    return make_tiny_hf(tmp_path / "hf", "qwen3_5", depth=1, dtype=torch.bfloat16, with_tokenizer=True)


def on_disk(directory) -> dict:
    return json.loads((directory / "config.json").read_text())


def test_settings_stand_at_the_top_for_whoever_asks(hf_dir):
    config, text = read_config(hf_dir), on_disk(hf_dir)["text_config"]
    assert (config["model_type"], config["hidden_size"]) == ("qwen3_5", text["hidden_size"])
    assert config["architectures"] == ["Qwen3_5ForConditionalGeneration"]
    assert Heads.from_config(config) == Heads(1)
    assert read_hf_config(hf_dir) == config
    assert families.get(config).name == "qwen3_5"


def test_settings_that_gemma_3_leaves_out_are_those_of_transformers(tmp_path):
    stated: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 6, "sliding_window": 8}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gemma3", "text_config": stated}))
    config, reference = read_config(tmp_path), Gemma3TextConfig(**stated)
    assert config.keys() - stated.keys() - {"model_type", "text_config"}
    for key in config.keys() - {"model_type", "text_config"}:
        assert config[key] == getattr(reference, key), key
    assert families.get(config).name == "gemma3"


@pytest.mark.parametrize("family", COPIED_TOWER)
def test_names_that_transformers_saves_since_4_52(tmp_path, mesh, family):
    """Heads named as decoder layers follow those of the language model. An export has the names of its source."""
    hf_dir = make_tiny_hf(tmp_path / "renamed", family, depth=1, with_tokenizer=True)
    names = {"language_model.model.": "model.language_model.", "language_model.lm_head.": "lm_head."}
    names |= {"vision_tower.": "model.vision_tower."}
    before = load_file(hf_dir / "model.safetensors")
    after = {rename(key, names): tensor for key, tensor in before.items()}
    tokens, positions = torch.arange(20, 40)[None], torch.arange(20)[None]
    logits = []
    for tensors in (before, after):
        save_file(tensors, hf_dir / "model.safetensors", metadata={"format": "pt"})
        model = resolve(hf_dir)
        assert audit_hf(hf_dir, model.family) == []
        (built,), report = open_model(model, mesh, dtype=torch.float32)
        assert len(report.carried) == len(carried_tensors(family))
        with torch.no_grad():
            found = built.eval()(ModelInputs(tokens, positions))
        logits.append(torch.stack([found.main, *found.mtp]))
    assert torch.equal(*logits)
    convert(ExportArgs(model=str(hf_dir), output_dir=str(tmp_path / "run"), to_mcore=True), mesh)
    convert(ExportArgs(model=str(tmp_path / "run"), output_dir=str(tmp_path / "out"), to_hf=True), mesh)
    exported = load_file(tmp_path / "out" / "model.safetensors")
    assert exported.keys() == after.keys()
    assert all(torch.equal(exported[key], tensor) for key, tensor in after.items())


def rename(key: str, names: Mapping[str, str]) -> str:
    for old, new in names.items():
        if key.startswith(old):
            return new + key.removeprefix(old)
    return key


@pytest.mark.parametrize("is_tied", [False, True])
def test_the_output_layer_belongs_to_the_whole_model(tmp_path, is_tied):
    """transformers 5 writes the default of Qwen3-VL's language model under text_config."""
    config = {"tie_word_embeddings": is_tied, "text_config": {"tie_word_embeddings": not is_tied}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_config(tmp_path)["tie_word_embeddings"] is is_tied


def test_a_change_is_made_where_the_key_stands(hf_dir, tmp_path):
    (tmp_path / "out").mkdir()
    changes = Heads(2).config_change(read_config(hf_dir)) | {"new": 1}
    difference = write_patched(hf_dir, tmp_path / "out", changes)
    assert difference == ["text_config.mtp_num_hidden_layers: 1 -> 2", "text_config.new: (none) -> 1"]
    before, after = on_disk(hf_dir), on_disk(tmp_path / "out")
    before["text_config"] |= {"mtp_num_hidden_layers": 2, "new": 1}
    assert after == before


def forget_depth(hf_dir) -> None:
    """Remove the number of MTP layers from config.json, as in Qwen3-Next-80B."""
    config = on_disk(hf_dir)
    config.pop("num_nextn_predict_layers", None)
    config.get("text_config", config).pop("mtp_num_hidden_layers", None)
    (hf_dir / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("has_index", [False, True])
@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_next"])
def test_a_silent_config_has_the_depth_of_the_tensors(tmp_path, family, depth, has_index):
    hf_dir = make_tiny_hf(tmp_path, family, depth=depth)
    forget_depth(hf_dir)
    if has_index:
        names = load_file(hf_dir / "model.safetensors")
        (hf_dir / "model.safetensors").rename(hf_dir / "model-00001-of-00001.safetensors")
        index = {"weight_map": dict.fromkeys(names, "model-00001-of-00001.safetensors")}
        (hf_dir / "model.safetensors.index.json").write_text(json.dumps(index))
    assert Heads.from_config(read_config(hf_dir)).layers == depth
    assert audit_hf(hf_dir, families.FAMILIES[family]) == []


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_next"])
def test_an_export_says_what_its_source_leaves_to_be_counted(tmp_path, mesh, family):
    """If config.json does not declare the number of heads, engines use different defaults."""
    hf_dir = make_tiny_hf(tmp_path / "hf", family, depth=1, dtype=torch.bfloat16)
    forget_depth(hf_dir)
    run, out = tmp_path / "run", tmp_path / "out"
    convert(ExportArgs(model=str(hf_dir), output_dir=str(run), to_mcore=True), mesh)
    assert Heads.from_config(read_config(run / "source")) == Heads(1)
    convert(ExportArgs(model=str(run), output_dir=str(out), to_hf=True), mesh)
    found, expected = load_file(out / "model.safetensors"), load_file(hf_dir / "model.safetensors")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], tensor) for key, tensor in expected.items())
    (out / "model.safetensors").unlink()
    assert Heads.from_config(read_config(out)) == Heads(1)


def test_without_tensors_nothing_is_promised(hf_dir):
    forget_depth(hf_dir)
    (hf_dir / "model.safetensors").write_bytes(b"no header")
    assert Heads.from_config(read_hf_config(hf_dir)).layers == 0


STACKED = [family for family in WRAPPED if family != "step3p7"]  # whose files always have stacks of single matrices


@pytest.mark.parametrize(("family", "packed_experts"), [*product(WRAPPED, (False,)), *product(STACKED, (True,))])
def test_there_and_back_changes_no_byte(tmp_path, mesh, family, packed_experts):
    """The vision tower and the config.json of the whole model are included."""
    hf_dir = make_tiny_hf(
        tmp_path / "hf", family, 1, dtype=torch.bfloat16, with_tokenizer=True, packed_experts=packed_experts
    )
    run, out = tmp_path / "run", tmp_path / "out"
    convert(ExportArgs(model=str(hf_dir), output_dir=str(run), to_mcore=True), mesh)
    assert load_file(run / "source" / CARRIED_FILE).keys() == carried_tensors(family).keys()
    convert(ExportArgs(model=str(run), output_dir=str(out), to_hf=True), mesh)
    found, expected = load_file(out / "model.safetensors"), load_file(hf_dir / "model.safetensors")
    assert found.keys() == expected.keys() >= carried_tensors(family).keys()
    for key, tensor in expected.items():
        assert found[key].dtype == tensor.dtype, key
        assert torch.equal(found[key], tensor), key
    assert (out / "config.json").read_bytes() == (hf_dir / "config.json").read_bytes()
    assert {path.name for path in out.iterdir()} == {path.name for path in hf_dir.iterdir()}


@pytest.fixture
def renamed(tmp_path):
    """Qwen2.5-VL with the names that transformers saves since 4.52."""
    hf_dir = make_tiny_vision_hf(tmp_path / "renamed", "qwen2_5_vl", depth=1, with_tokenizer=True, vocab_size=336)
    names = {"visual.": "model.visual.", "model.": "model.language_model."}
    tensors = {}
    for key, tensor in load_file(hf_dir / "model.safetensors").items():
        (new,) = [key.replace(old, new, 1) for old, new in names.items() if key.startswith(old)] or [key]
        tensors[new] = tensor
    save_file(tensors, hf_dir / "model.safetensors", metadata={"format": "pt"})
    return hf_dir


def test_both_names_of_qwen2_5_vl(tmp_path, mesh, renamed):
    """Logits equal those of transformers, and an export has the names of its source."""
    tokens = torch.arange(20, 60)[None]
    reference = AutoModelForImageTextToText.from_pretrained(renamed, dtype=torch.float32).eval()
    for model in (resolve(renamed), resolve(renamed).with_images()):
        assert audit_hf(renamed, model.family) == []
        (built,), report = open_model(model, mesh, dtype=torch.float32)
        assert bool(report.carried) is not model.computes_images
    (built,), _ = open_model(resolve(renamed), mesh, dtype=torch.float32)
    with torch.no_grad():
        ours = built.eval()(ModelInputs(tokens, torch.arange(40)[None])).main
        assert torch.equal(ours, reference(tokens).logits)
    run, out = tmp_path / "run", tmp_path / "out"
    convert(ExportArgs(model=str(renamed), output_dir=str(run), to_mcore=True), mesh)
    convert(ExportArgs(model=str(run), output_dir=str(out), to_hf=True), mesh)
    found, expected = load_file(out / "model.safetensors"), load_file(renamed / "model.safetensors")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], tensor) for key, tensor in expected.items())


def test_a_part_that_is_nobodys_is_named(hf_dir):
    """Tensors outside of the language model are copied. Inside the language model, every tensor must be known."""
    tensors = load_file(hf_dir / "model.safetensors") | {"model.language_model.layers.0.new.weight": torch.ones(2)}
    save_file(tensors, hf_dir / "model.safetensors", metadata={"format": "pt"})
    (problem,) = audit_hf(hf_dir, families.FAMILIES["qwen3_5"])
    assert "model.language_model.layers.0.new.weight" in problem
