"""Test heads that are trained on a quantized trunk: exports keep the files of the trunk, and all commands read them."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from swiftlite.args.commands import ExportArgs
from swiftlite.base.errors import UserError
from swiftlite.base.json_file import read_json
from swiftlite.bridge.audit import audit_hf
from swiftlite.bridge.carry import TRUNK_NAME
from swiftlite.bridge.encoding.index import format_of
from swiftlite.bridge.hf_config import MODELOPT_FILE, read_config
from swiftlite.bridge.tensors import Checkpoint
from swiftlite.export.run import convert
from swiftlite.families.resolved import resolve
from swiftlite.plan.heads import LR_ON_QUANTIZED_TRUNK
from swiftlite.train.checkpoint.base_digest import shared_digest_of
from tests.messages import naming
from tests.tiers import some_of
from tests.tiny import make_tiny_hf
from tests.train.test_sft import metrics, train

quantized = pytest.importorskip("tests.quantized", exc_type=ImportError)

HEADS = {"mtp_mode": "heads_only", "torch_dtype": "bfloat16", "train_iters": 1}
NEW = HEADS | {"mtp_num_layers": 1, "mtp_init": "fit_last_layer"}
HEADS_FILE = "model-mtp.safetensors"


def make(tmp_path: Path, name: str, family: str = "qwen3", depth: int = 0, **options: Any) -> Path:
    """Write a quantized model, whose heads, if any, are quantized as well."""
    plain = make_tiny_hf(tmp_path / "plain", family, depth=depth, dtype=torch.bfloat16, with_tokenizer=True)
    directory = quantized.quantize_hf(plain, tmp_path / name, name, block=True, **options)
    content = read_config(directory)["quantization_config"]
    if content["quant_method"] == "modelopt":
        file = {"quantization": {"quant_algo": content["quant_algo"], "exclude_modules": content["ignore"]}}
        (directory / MODELOPT_FILE).write_text(json.dumps(file))
    return directory


def export(run: Path, mesh, **options: Any) -> Path:
    directory = run.with_name(f"{run.name}-hf")
    convert(ExportArgs(model=str(run), output_dir=str(directory), to_hf=True, **options), mesh)
    return directory


def digest(path: Path) -> bytes:
    return hashlib.sha256(path.read_bytes()).digest()


def stored(directory: Path) -> dict[str, torch.Tensor]:
    return {key: tensor for file in directory.glob("*.safetensors") for key, tensor in load_file(file).items()}


def decoded(directory: Path) -> dict[str, torch.Tensor]:
    with Checkpoint(directory, format_of(read_config(directory))) as checkpoint:
        return {key: checkpoint.read(key, torch.bfloat16) for key in checkpoint.entries}


def assert_same_bits(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for key, tensor in expected.items():
        assert found[key].dtype is tensor.dtype, key
        assert torch.equal(found[key].view(torch.uint8), tensor.view(torch.uint8)), key


def split_by_mtp(directory: Path, tensors: dict[str, torch.Tensor]) -> tuple[dict, dict]:
    """Return the tensors of the trunk, and those of the heads."""
    model = resolve(directory)
    heads = {key: tensor for key, tensor in tensors.items() if model.family.is_mtp(model.config, key)}
    return {key: tensor for key, tensor in tensors.items() if key not in heads}, heads


@pytest.mark.parametrize("name", some_of(["int4_asym", "fp8_blocks_bf16", "gptq", "modelopt_nvfp4"], "modelopt_nvfp4"))
def test_the_file_of_the_trunk_is_kept(options, mesh, tmp_path, name):
    model = make(tmp_path, name)
    hf = export(train(options(model=str(model), **NEW), mesh), mesh)
    assert sorted(path.name for path in hf.glob("*.safetensors")) == [HEADS_FILE, TRUNK_NAME]
    assert digest(model / "model.safetensors") == digest(hf / TRUNK_NAME)
    heads = load_file(hf / HEADS_FILE)
    assert heads
    assert all(key.startswith("mtp.") and tensor.dtype is torch.bfloat16 for key, tensor in heads.items())
    assert audit_hf(hf, resolve(hf).family) == []
    assert resolve(hf).heads.layers == 1
    old, new = (read_config(directory)["quantization_config"] for directory in (model, hf))
    changed = {key for key in old.keys() | new.keys() if old.get(key) != new.get(key)}
    assert changed <= {"ignore", "modules_to_not_convert", "dynamic"}
    assert changed
    if name == "modelopt_nvfp4":  # TensorRT-LLM reads this file
        assert read_json(hf / MODELOPT_FILE)["quantization"]["exclude_modules"] == new["ignore"]


@pytest.mark.parametrize(
    ("family", "name"), some_of([("deepseek_v3", "int8"), ("mimo", "gptq")], ("deepseek_v3", "int8"))
)
def test_trained_heads_replace_quantized_ones(options, mesh, tmp_path, family, name):
    """The trunk's tensors keep their bytes, although they share a file with the old heads."""
    model = make(tmp_path, name, family, depth=1)
    hf = export(train(options(model=str(model), **HEADS), mesh), mesh)
    trunk, old_heads = split_by_mtp(model, stored(model))
    new_trunk, heads = split_by_mtp(hf, stored(hf))
    assert_same_bits(new_trunk, trunk)
    assert any(not tensor.is_floating_point() or tensor.itemsize == 1 for tensor in old_heads.values())
    assert all(tensor.is_floating_point() and tensor.itemsize > 1 for tensor in heads.values())
    assert audit_hf(hf, resolve(hf).family) == []
    old, new = decoded(model), decoded(hf)
    assert new.keys() == old.keys()
    changed = {key for key in heads if not torch.equal(old[key], new[key])}
    assert any("layers" in key for key in changed)


# Sizes of a model with latent attention whose matrices consist of whole groups of 32.
IN_GROUPS: dict[str, Any] = {"q_lora_rank": 32, "v_head_dim": 16}
CASES = [("qwen3", "int4"), ("qwen3", "modelopt_fp8"), ("qwen3", "modelopt_nvfp4"), ("kimi_k25", "int4")]


@pytest.mark.parametrize(("family", "name"), some_of(CASES, *(case for case in CASES if case[1] != "modelopt_fp8")))
def test_training_is_that_on_the_dequantized_model(options, mesh, tmp_path, family, name):
    """A run on the codes has the same bits as a run on a plain model with the decoded numbers.

    Kimi-K2.5 is published with 4-bit experts in a wrapper.
    """
    sizes = IN_GROUPS if family == "kimi_k25" else {}
    plain = make_tiny_hf(tmp_path / "plain", family, depth=1, dtype=torch.bfloat16, with_tokenizer=True, **sizes)
    model = quantized.quantize_hf(plain, tmp_path / "codes", name, block=False)
    reference = quantized.dequantize_hf(plain, tmp_path / "reference", name, block=False)
    runs = [
        train(options(model=str(directory), output_dir=str(tmp_path / f"run-{directory.name}"), **HEADS), mesh)
        for directory in (model, reference)
    ]
    assert metrics(runs[0]) == metrics(runs[1])
    written = [export(run, mesh) for run in runs]
    assert_same_bits(split_by_mtp(written[0], stored(written[0]))[1], split_by_mtp(written[1], stored(written[1]))[1])
    assert_same_bits(decoded(written[0]), decoded(written[1]))
    assert_same_bits(stored(export(runs[0].rename(tmp_path / "again"), mesh, dequantize=True)), stored(written[1]))


@pytest.mark.slow
def test_heads_of_a_quantized_model_have_their_own_learning_rate(options, mesh, tmp_path):
    """Without --lr, the existing heads of a quantized model are trained at the rate that was measured for them."""
    rates = {}
    for directory in (make(tmp_path, "int4", depth=1), tmp_path / "plain"):
        output = str(tmp_path / f"run-{directory.name}")
        run = train(options(model=str(directory), output_dir=output, lr=None, lr_decay_style="constant", **HEADS), mesh)
        rates[directory.name] = max(line.get("learning_rate", 0) for line in metrics(run))
    assert rates == {"int4": LR_ON_QUANTIZED_TRUNK, "plain": 1e-5}


@pytest.mark.slow
def test_sharded_files_keep_their_names(options, mesh, tmp_path):
    model = make(tmp_path, "int8", depth=1)
    tensors = load_file(model / "model.safetensors")
    (model / "model.safetensors").unlink()
    first = {key: tensor for key, tensor in tensors.items() if "layers.0" in key and not key.startswith("mtp.")}
    second = {key: tensor for key, tensor in tensors.items() if key not in first}
    save_file(first, model / "model-00001-of-00002.safetensors")
    save_file(second, model / "model-00002-of-00002.safetensors")
    weight_map = {key: f"model-0000{1 + (key in second)}-of-00002.safetensors" for key in tensors}
    index = {"metadata": {}, "weight_map": weight_map}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    hf = export(train(options(model=str(model), **HEADS), mesh), mesh)
    assert digest(hf / "model-00001-of-00002.safetensors") == digest(model / "model-00001-of-00002.safetensors")
    assert sorted(path.name for path in hf.glob("*.safetensors")) == [*sorted(set(weight_map.values())), HEADS_FILE]
    assert_same_bits(split_by_mtp(hf, stored(hf))[0], split_by_mtp(model, stored(model))[0])
    assert audit_hf(hf, resolve(hf).family) == []


def test_exports_of_a_run(options, mesh, tmp_path):
    """Heads can be removed again, and a model that has changed is refused."""
    model = make(tmp_path, "int8")
    run = train(options(model=str(model), **NEW), mesh)
    hf, none = run.with_name("run-hf"), tmp_path / "none"
    with pytest.raises(UserError, match=naming("--torch_dtype --dequantize")):
        export(run, mesh, torch_dtype="bfloat16")
    assert not hf.exists()
    export(run, mesh, mtp="strip").rename(none)
    assert_same_bits(stored(none), stored(model))
    assert read_config(none)["quantization_config"] == read_config(model)["quantization_config"]
    assert audit_hf(none, resolve(none).family) == []

    file, config = model / "model.safetensors", model / "config.json"
    tensors = load_file(file)
    tensors["model.layers.0.mlp.up_proj.weight"][0, 0] += 1
    for change in (lambda: save_file(tensors, file), lambda: (file.unlink(), config.unlink())):
        change()
        shared_digest_of.cache_clear()  # an export is another process
        with pytest.raises(UserError, match=naming(str(model))):
            export(run, mesh)
        assert not hf.exists()
    export(run, mesh, dequantize=True)  # the checkpoint has the decoded trunk
    assert "quantization_config" not in read_config(hf)


@pytest.mark.slow
def test_only_a_quantized_model_is_dequantized(options, mesh, tmp_path):
    model = make_tiny_hf(tmp_path / "plain", "qwen3", with_tokenizer=True)
    run = train(options(model=str(model), **NEW), mesh)
    with pytest.raises(UserError, match=naming("--dequantize")):
        export(run, mesh, dequantize=True)
    assert not run.with_name("run-hf").exists()
