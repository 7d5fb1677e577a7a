"""Test the report of `doctor` about this machine, and about valid and invalid models."""

import importlib.metadata
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from swiftlite.args.commands import DoctorArgs
from swiftlite.cli import doctor, installed
from swiftlite.cli.installed import TESTED
from swiftlite.runtime.environment import torch_cuda
from tests.messages import has_line, mention_each, mentions
from tests.tiny import make_tiny_hf, make_tiny_tokenizer


@pytest.fixture
def model(tmp_path):
    return make_tiny_hf(tmp_path / "model", "qwen3", depth=1)


def examine(model, capsys) -> tuple[int, str]:
    """Return the exit code, and the part of the report about the model."""
    code = doctor.run(DoctorArgs(model=str(model)))
    return code, capsys.readouterr().out.split(f"\n\n{model}\n")[1]


def test_versions_are_those_installed(capsys):
    doctor.run(DoctorArgs())
    lines = dict(line.split(None, 1) for line in capsys.readouterr().out.splitlines() if len(line.split(None, 1)) == 2)
    for name in ("torch", "megatron-core", "transformers", "numpy", "safetensors"):
        assert lines[name] == importlib.metadata.version(name)


def test_every_part_has_a_line(capsys):
    code = doctor.run(DoctorArgs())
    report = capsys.readouterr().out.split("\n\n")[1]
    names = [
        "train",
        "export",
        "transformers",
        "images, transformers",
        "vllm",
        "images, vllm",
        "sglang",
        "llamacpp",
        "--optimizer adamw_8bit",
        "--checkpoint_store",
        "ModelScope",
        "tensorboard",
        "wandb",
        "swanlab",
        "mlflow",
        "trackio",
    ]
    assert mention_each([line.split("  ")[0] for line in report.splitlines()], names)
    # These tests need every core package, so a doctor that misses one is wrong.
    assert code == 0
    assert len({line.split()[-1] for line in report.splitlines()[:3]}) == 1


def test_images_require_torchvision_in_vllm(monkeypatch, capsys):
    found = installed.installed_version
    versions = {"vllm": "0.32.0", "torchvision": None}
    monkeypatch.setattr(
        installed,
        "installed_version",
        lambda names: versions[names[0]] if names[0] in versions else found(names),
    )
    lines = {}
    for version in (None, "0.28.0"):
        versions["torchvision"] = version
        doctor.run(DoctorArgs())
        table = capsys.readouterr().out.split("\n\n")[1]
        lines[version] = dict(line.split("  ", 1) for line in table.splitlines())
    assert mentions(lines[None]["infer with images, vllm"], "torchvision pip install torchvision")
    for name in ("infer, vllm", "infer with images, transformers"):
        assert lines[None][name].split() == ["works"]
    assert lines["0.28.0"]["infer with images, vllm"].split() == ["works"]


@pytest.mark.parametrize("row", TESTED, ids=lambda row: row.megatron_core)
def test_the_tested_environment_of_this_machine_is_marked(monkeypatch, row):
    versions = {"torch": f"{row.torch}+cpu", "megatron-core": row.megatron_core, "transformers": row.transformers}
    monkeypatch.setattr(installed, "installed_version", lambda names: versions[names[0]])
    monkeypatch.setattr(installed.platform, "python_version", lambda: f"{row.python}.7")
    title, _, *rows = installed.tested_table().splitlines()
    assert [line.split()[1:5] == list(row[:4]) for line in rows if line.startswith(">")] == [True]
    assert len(rows) == len(TESTED)

    versions["transformers"] = "5.0.0"
    other_title, _, *rows = installed.tested_table().splitlines()
    assert other_title.startswith(title)
    assert len(other_title) > len(title)
    assert not any(line.startswith(">") for line in rows)


def test_unmet_requirements_name_the_fix():
    assert mention_each(
        installed.unmet_requirements(["pytest", "no-such-package>=2", "numpy<1", "absent; extra == 'gpu'"]),
        [
            "no-such-package pip install 'no-such-package>=2'",
            f"numpy {importlib.metadata.version('numpy')} <1 pip install 'numpy<1'",
        ],
    )


def test_the_cuda_version_is_torch_s_own():
    assert torch_cuda() == torch.version.cuda


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mimo"])
@pytest.mark.parametrize("depth", [0, 2])
def test_a_whole_model(tmp_path, capsys, family, depth):
    code, report = examine(make_tiny_hf(tmp_path / "model", family, depth=depth), capsys)
    assert code == 0
    assert has_line(report, f"family {family}")
    assert has_line(report, f"MTP {depth} config.json")


def change_tensors(model: Path, change) -> None:
    tensors = load_file(model / "model.safetensors")
    change(tensors)
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})


def test_lost_heads(model, capsys):
    change_tensors(model, lambda tensors: [tensors.pop(key) for key in list(tensors) if key.startswith("mtp.")])
    code, report = examine(model, capsys)
    assert code == 1
    lines = [line for line in report.splitlines() if mentions(line, "config.json 1 0")]
    assert len(lines) == 2  # what was found, and that it is a problem


@pytest.mark.parametrize("key", ["mtp.fc.weight", "model.layers.1.mlp.up_proj.weight"])
def test_one_missing_tensor_is_named(model, capsys, key):
    change_tensors(model, lambda tensors: tensors.pop(key))
    code, report = examine(model, capsys)
    assert code == 1
    assert key in report


def test_a_number_that_is_not_finite(model, capsys):
    change_tensors(model, lambda tensors: tensors["mtp.norm.weight"].fill_(float("nan")))
    code, report = examine(model, capsys)
    assert code == 1
    assert has_line(report, "mtp.norm.weight 64")


def test_a_missing_tokenizer_is_said(model, capsys):
    assert has_line(examine(model, capsys)[1], "tokenizer.json tokenizer_config.json")
    (model / "tokenizer.model").write_bytes(b"")
    assert not has_line(examine(model, capsys)[1], "tokenizer.json")


def test_a_directory_without_a_model(tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    code, report = examine(tmp_path / "empty", capsys)
    assert code == 1
    assert has_line(report, f"{tmp_path / 'empty'} config.json")


def test_a_tokenizer_with_more_tokens_than_the_model(tmp_path, capsys):
    model = make_tiny_hf(tmp_path / "model", "qwen3", with_tokenizer=True, vocab_size=300)
    largest = len(make_tiny_tokenizer()) - 1
    code, report = examine(model, capsys)
    assert code == 1
    assert has_line(report, f"tokenizer.json {largest} config.json vocab_size 300")
    code, report = examine(make_tiny_hf(tmp_path / "good", "qwen3", with_tokenizer=True), capsys)
    assert code == 0
    (tmp_path / "good" / "tokenizer.json").write_text("{")
    code, report = examine(tmp_path / "good", capsys)
    assert code == 1
    assert has_line(report, f"{tmp_path / 'good' / 'tokenizer.json'}")
