"""Test `evaluate` and the acceptance limits of `export` as commands, with trained heads and with damaged copies."""

import importlib.util
import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.e2e.conftest import Commands, sft_options, write_rows
from tests.messages import has_line
from tests.tiny import make_tiny_hf

pytestmark = pytest.mark.gloo


@pytest.fixture(scope="module")
def learned(tmp_path_factory) -> Path:
    """Return a directory with a model, its rows, and an export of a run whose heads have learned the rows."""
    directory = tmp_path_factory.mktemp("learned")
    commands = Commands(directory)
    model = make_tiny_hf(directory / "model", "qwen3", depth=1, with_tokenizer=True)
    options = [*sft_options(model, write_rows(directory / "rows.jsonl")), "--train_iters", 60, "--save_steps", 60]
    options += ["--lr", 3e-3, "--mtp_loss_scaling_factor", 1, "--acceptance_samples", 0]
    commands.ok(*options, "--output_dir", "run")
    commands.ok("export", "--to_hf", "--model", "run", "--output_dir", "hf")
    return directory


@pytest.mark.slow
def test_an_export_with_damaged_heads_is_refused(commands, learned, tmp_path):
    good, model, dataset = (learned / name for name in ("hf", "model", "rows.jsonl"))
    done = commands.ok(
        *("evaluate", "--model", good, "--baseline", model, "--dataset", dataset, "--output_dir", "out"),
        *("--torch_dtype", "float32", "--infer_backend", "transformers", "--max_prompts", 4, "--max_new_tokens", 12),
        *("--temperature", 0.7),
    )
    report = json.loads((tmp_path / "out" / "evaluation.json").read_text())
    shares = {name: report[name]["teacher_forced"]["all"]["heads"][0]["acceptance"] for name in ("model", "baseline")}
    assert shares["model"] > shares["baseline"] + 0.1
    assert f"{shares['model']:.1%} (+{100 * (shares['model'] - shares['baseline']):.1f})" in done.stdout
    assert report["model"]["transformers"]["all"]["prompts"] == 4
    assert report["model"]["transformers_at_temperature_0.7"]["all"]["prompts"] == 4
    assert (tmp_path / "out" / "evaluation.svg").stat().st_size > 1000

    shutil.copytree(good, tmp_path / "damaged_hf")
    tensors = load_file(good / "model.safetensors")
    torch.manual_seed(0)
    for name in [name for name in tensors if name.startswith("mtp.fc")]:
        tensors[name] = torch.randn_like(tensors[name])
    save_file(tensors, tmp_path / "damaged_hf" / "model.safetensors", metadata={"format": "pt"})
    commands.ok("export", "--to_mcore", "--model", "damaged_hf", "--output_dir", "damaged")
    gate = ["--val_dataset", dataset, "--max_regression", 0.02, "--baseline", good]
    refused = commands.run("export", "--to_hf", "--model", "damaged", "--output_dir", "bad", *gate)
    assert refused.returncode == 1
    assert has_line(refused.stderr, "--max_regression 0.02")
    assert not (tmp_path / "bad").exists()
    assert not list(tmp_path.glob(".bad*"))


@pytest.mark.slow
def test_a_quantized_model_is_compared_with_the_unquantized_one(commands, dataset, tmp_path):
    """Trunk and heads of both models, and the counts of an engine for both, are in one acceptance.json."""
    make_tiny_hf(tmp_path / "plain", "qwen3", depth=1, with_tokenizer=True)
    int4 = ["--quant_method", "rtn", "--quant_bits", 4, "--group_size", 32]
    rows = ["--val_dataset", dataset]
    refused = commands.run("export", "--model", "plain", "--output_dir", "int4", *int4, *rows, "--max_trunk_loss", 0.1)
    assert refused.returncode == 1
    assert has_line(refused.stderr, "--max_trunk_loss 0.1")
    assert not (tmp_path / "int4").exists()
    assert not list(tmp_path.glob(".int4*"))
    limit = ["--max_trunk_loss_increase", 5]
    commands.ok("export", "--model", "plain", "--output_dir", "int4", *int4, *rows, *limit)
    written = json.loads((tmp_path / "int4" / "acceptance.json").read_text())
    done = commands.ok(
        *("evaluate", "--model", "int4", "--baseline", "plain", "--dataset", dataset, "--output_dir", "out"),
        *("--torch_dtype", "float32", "--infer_backend", "transformers", "--max_prompts", 2, "--max_new_tokens", 6),
        *("--acceptance_json", "int4/acceptance.json"),
    )
    report = json.loads((tmp_path / "out" / "evaluation.json").read_text())
    content = json.loads((tmp_path / "int4" / "acceptance.json").read_text())
    for name, place in (("model", content), ("baseline", content["baseline"])):
        assert place.pop("engines") == {"transformers": report[name]["transformers"]["all"]}
        assert place["trunk"] == report[name]["trunk"]["all"]
    assert content == written
    trunk = written["trunk"]
    assert has_line(done.stdout, f"model all {trunk['tokens']} {trunk['loss']:.4f} 4 32")
    assert has_line(done.stdout, f"baseline all {trunk['tokens']} {written['baseline']['trunk']['loss']:.4f}")
    assert "quantization" not in report["baseline"]
    assert "quantization" in report["model"]
    commands.ok(
        *("export", "--model", "plain", "--output_dir", "counted", *int4, "--val_dataset", f"{dataset}#4"),
        *("--infer_backend", "transformers"),
    )
    counted = json.loads((tmp_path / "counted" / "acceptance.json").read_text())
    for place in (counted, counted["baseline"]):
        counts = place["engines"]["transformers"]
        assert counts["prompts"] == 4
        assert counts["drafted"] > 0


@pytest.mark.engine
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
def test_one_pass_over_its_own_answers_says_what_vllm_counts(learned, vllm_host, tmp_path):
    """The answers to held-out prompts are the model's own, because an engine drafts while it generates these."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"query": f"What is {i} plus {i}?"}) + "\n" for i in range(40, 100)))
    common = ["--model", learned / "hf", "--torch_dtype", "float32", "--infer_backend", "vllm", "--max_new_tokens", 48]
    with_vllm = Commands(tmp_path, vllm_host)
    with_vllm.ok("infer", *common, "--val_dataset", prompts, "--result_path", "own.jsonl")
    with_vllm.ok("evaluate", *common, "--dataset", "own.jsonl", "--max_prompts", 60, "--output_dir", "out")
    measured = json.loads((tmp_path / "out" / "evaluation.json").read_text())["model"]
    replayed, counted, of_its_answers = (measured[how]["all"] for how in ("replayed", "vllm", "vllm_replayed"))
    assert counted["drafts"] > 200
    assert 0.2 < counted["acceptance_rate"] < 0.95
    # The mean over all predictions is another figure: 0.86 where an engine counts 0.79.
    same = ("drafts", "drafted", "accepted", "acceptance_per_position")
    assert [replayed[name] for name in same] == [counted[name] for name in same]
    assert [of_its_answers[name] for name in same] == [counted[name] for name in same]
