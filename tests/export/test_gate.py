"""Test the limits of an export, and what is measured of a quantized export and of its baseline."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from swiftlite.acceptance.teacher_forced import measure_rows, teacher_forced
from swiftlite.args.commands import ExportArgs
from swiftlite.base.errors import UserError
from swiftlite.export.gate import check_quality
from swiftlite.export.run import convert
from swiftlite.families.resolved import resolve
from swiftlite.serve.evaluate.evaluation_rows import load_rows
from tests.messages import has_line, naming
from tests.tiny import make_tiny_hf

INT4: dict[str, Any] = {"quant_method": "rtn", "quant_bits": 4, "group_size": 32}


@pytest.fixture
def rows(tmp_path) -> str:
    path = tmp_path / "rows.jsonl"
    lines = [{"query": f"What is {n}?", "response": "It is " + "so " * n + "much."} for n in range(12)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def test_limits_of_heads(tmp_path, mesh, rows, caplog):
    good = make_tiny_hf(tmp_path / "good", "mimo", depth=1, with_tokenizer=True)

    def check(**asked: Any) -> None:
        check_quality(ExportArgs(val_dataset=[rows], **asked), good, "float32", mesh)

    check(min_acceptance=0.0)
    with pytest.raises(UserError, match=naming("% --min_acceptance 1.0")):
        check(min_acceptance=1.0)
    check(baseline=str(good), max_regression=0.0)
    check(min_acceptance=1.0, force=True)
    assert has_line(caplog.text, "--min_acceptance 1.0 --force")
    assert not (good / "acceptance.json").exists()


def test_limits_of_the_trunk(tmp_path, mesh, rows):
    """The limit of the loss is absolute, the limit of the increase is relative to the baseline."""
    model = make_tiny_hf(tmp_path / "model", "qwen3", depth=1, with_tokenizer=True)
    other = make_tiny_hf(tmp_path / "other", "qwen3", depth=1, with_tokenizer=True, seed=1)
    loss, of_other = (loss_of(directory, rows, mesh) for directory in (model, other))

    def check(hf_dir: Path, **asked: Any) -> None:
        check_quality(ExportArgs(val_dataset=[rows], **asked), hf_dir, "float32", mesh)

    check(model, max_trunk_loss=loss * 1.001)
    with pytest.raises(UserError, match=naming(f"{loss:.4f} --max_trunk_loss {loss * 0.999}")):
        check(model, max_trunk_loss=loss * 0.999)
    check(model, baseline=str(model), max_trunk_loss_increase=0.0)
    worse, better = (other, model) if of_other > loss else (model, other)
    increase = abs(of_other - loss)
    check(better, baseline=str(worse), max_trunk_loss_increase=0.0)
    check(worse, baseline=str(better), max_trunk_loss_increase=increase * 1.001)
    with pytest.raises(UserError, match=naming(f"--max_trunk_loss_increase {increase * 0.999} {better}")):
        check(worse, baseline=str(better), max_trunk_loss_increase=increase * 0.999)


def test_a_loss_that_is_not_a_number_is_refused(tmp_path, mesh, rows):
    """NaN is neither above nor below a limit, and all predictions of such a model are equal."""
    model = make_tiny_hf(tmp_path / "model", "qwen3", depth=1, with_tokenizer=True)
    tensors = load_file(model / "model.safetensors")
    tensors["model.norm.weight"].fill_(3e38)
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    args = ExportArgs(val_dataset=[rows], max_trunk_loss=1e9, min_acceptance=0.0)
    with pytest.raises(UserError, match=naming("loss number --max_trunk_loss")):
        check_quality(args, model, "float32", mesh)


def loss_of(hf_dir: Path, rows: str, mesh) -> float:
    _, data = load_rows(resolve(hf_dir), [rows])
    found = measure_rows(resolve(hf_dir), data.val, torch_dtype="float32", mesh=mesh)
    return found["all"].trunk_to_json()["loss"]


def test_a_model_without_heads_is_a_baseline_of_nothing(tmp_path, mesh, rows):
    bare = make_tiny_hf(tmp_path / "bare", "qwen3", with_tokenizer=True)
    headed = make_tiny_hf(tmp_path / "headed", "qwen3", depth=1, with_tokenizer=True)
    _, data = load_rows(resolve(bare), [rows])
    assert teacher_forced(resolve(bare), data.val, torch_dtype="float32", mesh=mesh)["all"]["heads"] == []
    args = ExportArgs(baseline=str(bare), val_dataset=[rows], max_regression=0.0)
    check_quality(args, headed, "float32", mesh)


@pytest.mark.parametrize("limit", ["max_regression", "max_trunk_loss_increase"])
def test_a_baseline_that_went_while_exporting_is_named(tmp_path, mesh, rows, limit):
    headed = make_tiny_hf(tmp_path / "headed", "qwen3", depth=1, with_tokenizer=True)
    options: dict[str, Any] = {"model": str(tmp_path / "run"), "to_hf": True, limit: 0.0}
    args = ExportArgs(val_dataset=[rows], **options)
    with pytest.raises(UserError, match=naming(f"--{limit} --baseline DIR")):
        check_quality(args, headed, "float32", mesh)


def test_a_baseline_with_another_tokenizer_is_refused(tmp_path, mesh, rows):
    model = make_tiny_hf(tmp_path / "model", "qwen3", depth=1, with_tokenizer=True)
    other = make_tiny_hf(tmp_path / "other", "qwen3", depth=1, with_tokenizer=True)
    template = (other / "chat_template.jinja").read_text()
    (other / "chat_template.jinja").write_text("{{ 'x' }}" + template)
    args = ExportArgs(baseline=str(other), val_dataset=[rows], max_trunk_loss_increase=1.0)
    with pytest.raises(UserError, match=naming(f"--baseline {other} --val_dataset")):
        check_quality(args, model, "float32", mesh)


@pytest.fixture
def source(tmp_path) -> Path:
    """Return a bfloat16 model with a head."""
    return make_tiny_hf(tmp_path / "plain", "qwen3", depth=1, dtype=torch.bfloat16, with_tokenizer=True)


def figures(hf_dir: Path, rows: str, mesh, baseline: Path | None = None) -> dict[str, Any]:
    """Return `trunk` and `teacher_forced` of a model, as in acceptance.json, measured without the gate."""
    found = {}
    for directory in filter(None, (hf_dir, baseline)):
        _, data = load_rows(resolve(directory), [rows])
        found[directory] = measure_rows(resolve(directory), data.val, torch_dtype="bfloat16", mesh=mesh)["all"]
    shares = [head["acceptance"] for head in found[hf_dir].to_json()["heads"]]
    trunk = found[hf_dir].trunk_to_json(found[baseline] if baseline else None)
    return {"trunk": trunk, "teacher_forced": {"acceptance_per_depth": shares}}


@pytest.mark.parametrize("of_run", [False, True], ids=["model", "run"])
def test_a_quantized_export_is_compared_with_the_unquantized_model(tmp_path, mesh, rows, source, of_run):
    """Without a limit and without --baseline, acceptance.json has the figures of both models."""
    options: dict[str, Any] = {"model": str(source), "output_dir": str(tmp_path / "out"), **INT4}
    if of_run:
        convert(ExportArgs(model=str(source), output_dir=str(tmp_path / "run"), to_mcore=True), mesh)
        options |= {"model": str(tmp_path / "run"), "to_hf": True}
    convert(ExportArgs(val_dataset=[rows], **options), mesh)
    content = json.loads((tmp_path / "out" / "acceptance.json").read_text())
    quantization = content["quantization"]
    assert quantization["method"] == "rtn"
    assert quantization["weights"] == [{"bits": 4, "group_size": 32}]
    assert quantization["heads"] == "keep"
    expected = figures(tmp_path / "out", rows, mesh, source)
    assert {name: content[name] for name in expected} == expected
    expected = figures(source, rows, mesh)
    assert {name: content["baseline"][name] for name in expected} == expected
    assert content["trunk"]["loss"] != content["baseline"]["trunk"]["loss"]
    assert content["depths"] == 1
    assert content["replayed"]["prompts"] == content["baseline"]["replayed"]["prompts"] == 12


def test_a_quantized_export_beyond_a_limit_leaves_nothing(tmp_path, mesh, rows, source):
    options: dict[str, Any] = {"model": str(source), "output_dir": str(tmp_path / "out"), "val_dataset": [rows], **INT4}
    with pytest.raises(UserError, match=naming("--max_trunk_loss 0.01")):
        convert(ExportArgs(max_trunk_loss=0.01, **options), mesh)
    assert {path.name for path in tmp_path.iterdir()} == {"plain", "rows.jsonl"}
    convert(ExportArgs(max_trunk_loss=0.01, force=True, **options), mesh)
    content = json.loads((tmp_path / "out" / "acceptance.json").read_text())
    assert content["trunk"]["loss"] > 0.01


def test_without_rows_the_export_names_the_option(tmp_path, mesh, source, caplog):
    caplog.set_level("INFO")
    convert(ExportArgs(model=str(source), output_dir=str(tmp_path / "out"), **INT4), mesh)
    assert has_line(caplog.text, "--val_dataset FILE")
    assert not (tmp_path / "out" / "acceptance.json").exists()


def test_measurements_are_not_copied_to_other_weights(tmp_path, mesh, source):
    (source / "acceptance.json").write_text("{}")
    convert(ExportArgs(model=str(source), output_dir=str(tmp_path / "out"), **INT4), mesh)
    assert not (tmp_path / "out" / "acceptance.json").exists()
    convert(ExportArgs(model=str(source), output_dir=str(tmp_path / "run"), to_mcore=True), mesh)
    assert not (tmp_path / "run" / "source" / "acceptance.json").exists()
