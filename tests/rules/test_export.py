"""Test the rules of `export`."""

import dataclasses
import json
import shlex
import subprocess
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants

from swiftlite import rules
from swiftlite.args.commands import ExportArgs
from tests.messages import mentions
from tests.rules.good import EXPORT, problems_of


@pytest.mark.parametrize(
    "args",
    [
        dataclasses.replace(EXPORT, mtp_graft_from="mtp2"),
        EXPORT,
        dataclasses.replace(EXPORT, model="run/checkpoint-5"),
        ExportArgs(model="plain", output_dir="new", to_mcore=True),
    ],
)
def test_good_options_pass_without_a_note(here, args):
    assert rules.check(args) == []


@pytest.mark.parametrize(
    ("change", "problem", "hint"),
    [
        ({"to_hf": False}, "--to_hf --to_mcore", ""),
        ({"to_mcore": True}, "--to_hf --to_mcore", ""),
        ({"model": ""}, "--model", "--output_dir"),
        ({"model": "rum"}, "--model rum", "run"),
        ({"model": "run/args.json"}, "--model run/args.json", "--model run"),
        ({"model": "plain"}, "--model plain", ""),
        ({"model": "."}, "--model .", "--output_dir"),
        ({"output_dir": ""}, "--output_dir", ""),
        ({"output_dir": "plain"}, "--output_dir plain", ""),
        ({"max_shard_size_gb": 0.0}, "--max_shard_size_gb 0.0 0", ""),
        ({"tensor_model_parallel_size": 2}, "--tensor_model_parallel_size 2 1", "NPROC_PER_NODE=2"),
    ],
)
def test_export(here, change, problem, hint):
    problems = problems_of(dataclasses.replace(EXPORT, **change))
    assert len(problems) == 1
    assert mentions(problems[0][0], problem)
    assert mentions(problems[0][1], hint)


def test_export_into_an_empty_directory_or_beside_checkpoints(here):
    Path("empty").mkdir()
    Path("link").symlink_to("empty")
    for directory in ("empty", "link", "run/hf", "checkpoint-5/hf"):
        assert rules.check(dataclasses.replace(EXPORT, output_dir=directory)) == []


@pytest.mark.parametrize("inside", ["checkpoint-20/hf", "checkpoint-20/a/b", "checkpoint-30", "source/hf"])
def test_export_into_what_is_the_run_s_own(here, inside):
    ((problem, hint),) = problems_of(dataclasses.replace(EXPORT, output_dir=f"run/{inside}"))
    of_the_run = here / "run" / Path(inside).parts[0]
    assert mentions(problem, f"--output_dir run/{inside} {of_the_run}")
    assert mentions(hint, f"{here / 'run' / 'export'}")


def test_export_into_the_working_directory(here, monkeypatch):
    Path("empty").mkdir()
    monkeypatch.chdir("empty")
    ((problem, hint),) = problems_of(dataclasses.replace(EXPORT, model="../run", output_dir="."))
    assert mentions(problem, "--output_dir")
    assert mentions(hint, "--output_dir export")


def test_export_into_a_mount_point(here):
    Path("volume").mkdir()
    Path("link").symlink_to("volume")
    if subprocess.run(["mount", "-t", "tmpfs", "tmpfs", "volume"], capture_output=True).returncode != 0:
        pytest.skip("may not mount")
    try:
        for directory in ("volume", "link"):
            ((problem, hint),) = problems_of(dataclasses.replace(EXPORT, output_dir=directory))
            assert mentions(problem, f"--output_dir {directory}")
            assert mentions(hint, f"--output_dir {directory}/export")
            assert rules.check(dataclasses.replace(EXPORT, output_dir=f"{directory}/export")) == []
    finally:
        subprocess.run(["umount", "volume"], check=True)


def test_export_of_a_run_without_checkpoint(here):
    Path("run/checkpoint-5").rmdir()
    Path("run/checkpoint-20").rmdir()
    ((problem, hint),) = problems_of(EXPORT)
    assert mentions(problem, "--model run")
    assert "--save_steps" in hint


@pytest.mark.parametrize("args", [EXPORT, ExportArgs(model="plain", output_dir="new", to_mcore=True)])
def test_a_drafter_is_not_grafted(here, args):
    ((problem, _),) = problems_of(dataclasses.replace(args, mtp_graft_from="drafted"))
    assert mentions(problem, "--mtp_graft_from drafted eagle3")


def test_a_drafter_is_not_quantized(here):
    args = ExportArgs(model="drafted", output_dir="new", quant_method="rtn")
    ((problem, hint),) = problems_of(args)
    assert mentions(problem, "--quant_method rtn eagle3")
    assert mentions(hint, "remove")


def test_a_limit_of_a_gguf_file_requires_heads(here):
    args = ExportArgs(model="plain", output_dir="new", to_gguf=True, val_dataset=["val.jsonl"], min_acceptance=0.1)
    assert any(mentions(problem, "--min_acceptance 0.1 heads") for problem, _ in problems_of(args))


def test_llamacpp_has_no_eagle3_1(here):
    args = ExportArgs(model="drafted", output_dir="new", to_gguf=True)
    ((problem, _),) = problems_of(args)
    assert mentions(problem, "--to_gguf EAGLE-3.1")
    file = Path("drafted/config.json")
    config = json.loads(file.read_text())
    file.write_text(json.dumps(config | {"drafter": config["drafter"] | {"fc_norm": False, "norm_output": False}}))
    assert rules.check(args) == []


def test_export_reads_what_to_mcore_wrote(here):
    Path("run/args.json").unlink()  # --to_mcore writes source/ and checkpoint-0, and has no options of a run
    assert rules.check(EXPORT) == []


def test_export_to_mcore_wants_a_hugging_face_model(here):
    ((problem, _),) = problems_of(ExportArgs(model="run", output_dir="new", to_mcore=True))
    assert mentions(problem, "--model run")


def test_export_reads_the_run_s_model_for_tensor_parallel(here):
    ((problem, _),) = problems_of(dataclasses.replace(EXPORT, tensor_model_parallel_size=3), world_size=3)
    assert mentions(problem, "--tensor_model_parallel_size 3 num_key_value_heads 2")


@pytest.mark.parametrize(
    ("change", "token", "problem", "hint"),
    [
        ({"push_to_hub": "me/new"}, "", "--push_to_hub me/new", "hf auth login"),
        ({"push_to_hub": "new"}, "hf_x", "--push_to_hub new", "--push_to_hub ORG/NAME"),
        ({"push_to_hub": "me/new@main"}, "hf_x", "--push_to_hub me/new@main", "ORG/NAME"),
        ({"push_to_hub": "me/new"}, "hf_x", "--push_to_hub me/new HF_HUB_OFFLINE", "HF_HUB_OFFLINE"),
        (
            {"push_to_hub": "me/new", "model": "plain", "to_hf": False, "to_mcore": True},
            "hf_x",
            "--push_to_hub me/new --to_hf",
            "--to_hf",
        ),
    ],
)
def test_what_a_push_needs_is_asked_before_the_export(here, monkeypatch, change, token, problem, hint):
    monkeypatch.setenv("HF_TOKEN", token)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(here / "no token"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", "OFFLINE" in problem)
    ((found, next_step),) = problems_of(dataclasses.replace(EXPORT, **change))
    assert mentions(found, problem)
    assert mentions(next_step, hint)


def test_a_private_repository_is_made_by_a_push_alone(here):
    (note,) = rules.check(dataclasses.replace(EXPORT, hub_private_repo=False))
    assert mentions(note, "--hub_private_repo false --push_to_hub")


def test_adapters_alone_are_written_as_they_are(here):
    alone = dataclasses.replace(EXPORT, merge_lora=False)
    rules.check(alone)
    ((problem, _),) = problems_of(dataclasses.replace(alone, torch_dtype="bfloat16"))
    assert mentions(problem, "--torch_dtype --merge_lora false")
    ((problem, _),) = problems_of(ExportArgs(model="plain", output_dir="new", to_mcore=True, merge_lora=False))
    assert mentions(problem, "--merge_lora false --to_hf")


@pytest.mark.parametrize(
    ("change", "heads", "problem"),
    [
        ({"model": "plain", "to_hf": False, "to_mcore": True}, {}, "--draft_vocab 50 --to_hf"),
        ({"mtp": "strip"}, {"num_nextn_predict_layers": 1}, "--draft_vocab 50 --mtp strip"),
        ({"mtp_graft_from": "mtp2"}, {"num_nextn_predict_layers": 1}, "--draft_vocab 50 --mtp_graft_from"),
        ({}, {}, "--draft_vocab 50"),
        ({}, {"num_nextn_predict_layers": 1, "mtp_draft_vocab": "0-40"}, "--draft_vocab 50 41"),
        ({"draft_vocab": 120}, {"num_nextn_predict_layers": 1}, "--draft_vocab 120"),
    ],
)
def test_a_draft_vocabulary_for_heads_that_draft_all(here, change, heads, problem):
    path = Path("run/source/config.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | heads))
    ((found, _),) = problems_of(dataclasses.replace(EXPORT, **{"draft_vocab": 50} | change))
    assert mentions(found, problem)


@pytest.mark.parametrize("model", ["run", "run/checkpoint-5"])
def test_a_draft_vocabulary_for_a_run_of_preferences(here, model):
    Path("run/args.json").write_text('{"loss_type": "sigmoid"}')
    ((problem, hint),) = problems_of(dataclasses.replace(EXPORT, model=model, draft_vocab=50))
    assert mentions(problem, "--draft_vocab 50")
    assert "--mtp_mode heads_only --draft_vocab 50" in hint


QUANTIZED = ExportArgs(model="plain", output_dir="new", quant_method="rtn", val_dataset=["val.jsonl"])


@pytest.mark.parametrize(
    "args",
    [
        QUANTIZED,
        dataclasses.replace(QUANTIZED, baseline="mtp2", max_trunk_loss_increase=0.1),
        dataclasses.replace(QUANTIZED, model="run", to_hf=True, max_regression=0.1),
        dataclasses.replace(EXPORT, val_dataset=["val.jsonl"], max_trunk_loss=2.0),
        dataclasses.replace(EXPORT, val_dataset=["val.jsonl"], max_trunk_loss_increase=0.0, baseline="plain"),
        dataclasses.replace(EXPORT, val_dataset=["val.jsonl"], max_trunk_loss=2.0, mtp="strip"),
    ],
)
def test_limits_that_can_be_measured_pass_without_a_note(here, args):
    assert rules.check(args) == []


@pytest.mark.parametrize(
    ("change", "problem", "hint"),
    [
        ({"val_dataset": ["vla.jsonl"]}, "--val_dataset vla.jsonl", "val.jsonl"),
        ({"val_dataset": [], "max_trunk_loss": 2.0}, "--max_trunk_loss --val_dataset", "--val_dataset FILE"),
        ({"val_dataset": [], "max_trunk_loss_increase": 0.1}, "--max_trunk_loss_increase --val_dataset", ""),
        ({"max_trunk_loss": 0.0}, "--max_trunk_loss 0.0 0", ""),
        ({"max_trunk_loss_increase": -0.1}, "--max_trunk_loss_increase -0.1 0", ""),
        ({"baseline": "nowhere"}, "--baseline nowhere config.json", ""),
    ],
)
def test_a_quantized_export_that_cannot_be_measured(here, change, problem, hint):
    ((found, next_step),) = problems_of(dataclasses.replace(QUANTIZED, **change))
    assert mentions(found, problem)
    assert mentions(next_step, hint)


@pytest.mark.parametrize(
    ("change", "problem", "hint"),
    [
        ({"quant_method": None, "model": "run", "to_hf": True}, "--infer_backend transformers --quant_method", ""),
        ({"val_dataset": []}, "--infer_backend transformers --val_dataset", "--val_dataset FILE"),
        ({"model": "plain"}, "--infer_backend transformers", "--mtp_num_layers 1"),
    ],
)
def test_an_engine_requires_models_to_compare(here, change, problem, hint):
    args = dataclasses.replace(QUANTIZED, model="mtp2", infer_backend="transformers")
    assert rules.check(args) == []
    ((found, next_step),) = problems_of(dataclasses.replace(args, **change))
    assert mentions(found, problem)
    assert mentions(next_step, hint)


def test_an_engine_of_an_export_is_installed(here, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    ((problem, _),) = problems_of(dataclasses.replace(QUANTIZED, model="mtp2", infer_backend="vllm"))
    assert mentions(problem, "--infer_backend vllm")


def test_a_quantized_export_is_measured_by_one_process(here):
    ((problem, _),) = problems_of(QUANTIZED, world_size=2)
    assert mentions(problem, "--val_dataset 2")


def test_the_increase_of_a_run_requires_its_model(here):
    args = dataclasses.replace(EXPORT, val_dataset=["val.jsonl"], max_trunk_loss_increase=0.1)
    ((problem, hint),) = problems_of(args)
    assert mentions(problem, "--max_trunk_loss_increase")
    assert mentions(hint, "--baseline DIR")


def test_limits_of_heads_require_heads(here):
    args = dataclasses.replace(EXPORT, val_dataset=["val.jsonl"], mtp="strip", min_acceptance=0.1, max_trunk_loss=2.0)
    ((problem, hint),) = problems_of(args)
    assert mentions(problem, "--min_acceptance --mtp strip")
    assert hint == "remove --min_acceptance"


@pytest.mark.parametrize(
    ("change", "note"),
    [
        ({"val_dataset": ["val.jsonl"]}, "--val_dataset val.jsonl --max_trunk_loss --max_trunk_loss_increase"),
        ({"val_dataset": ["val.jsonl"], "max_trunk_loss": 2.0, "baseline": "plain"}, "--baseline plain"),
        ({"quant_method": "rtn", "val_dataset": ["val.jsonl"], "force": True}, "--force --min_acceptance"),
    ],
)
def test_rows_and_baselines_without_a_limit(here, change, note):
    (found,) = rules.check(dataclasses.replace(EXPORT, **change))
    assert mentions(found, note)


QUANTIZE = ExportArgs(model="plain", output_dir="new", quant_method="rtn")
CALIBRATED = dataclasses.replace(QUANTIZE, quant_method="gptq", dataset=["train.jsonl"])


@pytest.fixture
def with_llm_compressor(tmp_path, monkeypatch):
    """Have an environment that looks as if it contained llm-compressor."""
    venv = tmp_path / "venv"
    (venv / "bin").mkdir(parents=True)
    (venv / "bin" / "python").touch()
    (venv / "lib/python3.11/site-packages/llmcompressor-0.14.0.1.dist-info").mkdir(parents=True)
    monkeypatch.setenv("SWIFTLITE_LLMCOMPRESSOR_VENV", str(venv))


def test_good_quantizations_pass_without_a_note(here, with_llm_compressor):
    assert rules.check(CALIBRATED) == []
    assert rules.check(dataclasses.replace(CALIBRATED, quant_method="awq", group_size=64, quant_n_samples=8)) == []
    assert rules.check(dataclasses.replace(EXPORT, quant_method="gptq", dataset=["train.jsonl"], quant_bits=8)) == []
    assert rules.check(dataclasses.replace(QUANTIZE, quant_method="nvfp4")) == []
    assert rules.check(dataclasses.replace(QUANTIZE, quant_bits=4)) == []


@pytest.mark.parametrize(
    ("args", "change", "problem"),
    [
        (EXPORT, {"dataset": ["train.jsonl"]}, "--dataset --quant_method"),
        (EXPORT, {"quant_n_samples": 8}, "--quant_n_samples --quant_method"),
        (QUANTIZE, {"dataset": ["train.jsonl"]}, "--dataset gptq awq rtn"),
        (QUANTIZE, {"max_length": 8}, "--max_length gptq awq rtn"),
        (QUANTIZE, {"quant_bits": 3}, "--quant_bits 3"),
        (QUANTIZE, {"torch_dtype": "float32"}, "--torch_dtype --to_hf"),
        (QUANTIZE, {"group_size": 64}, "--group_size --quant_bits 4"),
        (QUANTIZE, {"quant_method": "fp8", "quant_bits": 4}, "--quant_bits 4 --quant_method fp8"),
        (QUANTIZE, {"quant_method": "nvfp4", "quant_bits": 8}, "--quant_bits 8 --quant_method nvfp4"),
        (QUANTIZE, {"quant_method": "nvfp4", "group_size": 32}, "--group_size 32 --quant_method nvfp4 16"),
        (QUANTIZE, {"quant_method": "nvfp4", "quant_block": 32}, "--quant_block fp8 nvfp4"),
        (CALIBRATED, {"dataset": []}, "--quant_method gptq --dataset"),
        (CALIBRATED, {"dataset": ["no.jsonl"]}, "--dataset no.jsonl"),
        (CALIBRATED, {"quant_method": "awq", "quant_bits": 8}, "--quant_bits 8 --quant_method awq"),
        (CALIBRATED, {"quant_batch_size": 0}, "--quant_batch_size 0"),
    ],
)
def test_options_of_quantization(here, with_llm_compressor, args, change, problem):
    problems = problems_of(dataclasses.replace(args, **change))
    assert len(problems) == 1
    assert mentions(problems[0][0], problem)


def test_calibration_is_done_by_one_process(here, with_llm_compressor):
    problems = problems_of(CALIBRATED, world_size=2)
    assert len(problems) == 1
    assert mentions(problems[0][0], "--quant_method gptq 2")


def test_the_command_that_installs_llm_compressor_is_printed(here, tmp_path, monkeypatch):
    """Nothing is loaded or written. requirements/llmcompressor.txt has the release of the command."""
    venv = tmp_path / "with space" / "venv"
    monkeypatch.setenv("SWIFTLITE_LLMCOMPRESSOR_VENV", str(venv))
    ((problem, hint),) = problems_of(CALIBRATED)
    assert mentions(problem, "--quant_method gptq")
    words = shlex.split(hint)
    assert words[1:4] == ["-m", "venv", str(venv)]
    requirements = Path(__file__).parents[2] / "requirements" / "llmcompressor.txt"
    assert words[-1] in requirements.read_text().split()
    assert words[-4:-2] == [str(venv / "bin" / "pip"), "install"]
    assert torch.__version__.startswith(words[-2].removeprefix("torch=="))


GGUF = ExportArgs(model="plain", output_dir="new", to_gguf=True)


def test_a_gguf_file_of_a_model_or_a_run(here):
    assert rules.check(GGUF) == []
    assert rules.check(dataclasses.replace(GGUF, model="run", gguf_type="q8_0")) == []
    assert rules.check(dataclasses.replace(GGUF, model="run", mtp="strip")) == []


@pytest.mark.parametrize(
    ("args", "change", "problem"),
    [
        (EXPORT, {"gguf_type": "q8_0"}, "--gguf_type --to_gguf"),
        (GGUF, {"to_mcore": True}, "--to_mcore --to_gguf"),
        (GGUF, {"quant_method": "rtn"}, "--quant_method rtn --to_gguf"),
        (GGUF, {"merge_lora": False}, "--merge_lora --to_gguf"),
        (GGUF, {"max_regression": 0.1, "val_dataset": ["val.jsonl"]}, "--max_regression --to_gguf"),
        (GGUF, {"gguf_type": "q4_k_m"}, "--gguf_type q4_k_m"),
        (GGUF, {"mtp": "strip"}, "--mtp"),
        (GGUF, {"torch_dtype": "float32"}, "--torch_dtype"),
        (GGUF, {"min_acceptance": 0.5, "val_dataset": ["val.jsonl"]}, "--min_acceptance llama.cpp"),
        (GGUF, {"push_to_hub": "me/new"}, "--push_to_hub --to_gguf"),
    ],
)
def test_what_does_not_fit_a_gguf_file(here, monkeypatch, args, change, problem):
    monkeypatch.setenv("LLAMA_QUANTIZE", "/missing")
    monkeypatch.setenv("LLAMA_SERVER", "/missing")
    assert any(mentions(line, problem) for line, _ in problems_of(dataclasses.replace(args, **change)))
