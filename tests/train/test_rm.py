"""Test `megatron rm` in one process: exports against transformers' classes, resuming, adapters, refusals."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification
from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES as NAMES

from swiftlite import rules
from swiftlite.args.commands import ExportArgs, RmArgs, SftArgs
from swiftlite.base.errors import OptionError, UserError
from swiftlite.bridge.audit import audit_hf
from swiftlite.data.sample import make_sample
from swiftlite.export.run import convert
from swiftlite.families.index import FAMILIES
from swiftlite.families.resolved import resolve
from swiftlite.families.reward_model import CLASSES
from swiftlite.families.wrapped import is_wrapped
from swiftlite.train.methods.rm import _with_last
from tests.messages import naming
from tests.tiers import some_of
from tests.tiny import make_tiny_hf
from tests.train.reward_models import ROWS, conversations, hf_scores, make_reward_model, train, write_rows
from tests.train.test_sft import metrics


@pytest.fixture
def rm_dir(tmp_path) -> Path:
    return make_reward_model(tmp_path / "rm")


@pytest.fixture
def options(rm_dir, tmp_path):
    """Return the options of a run of 4 steps, some of them replaced."""
    usual = RmArgs(
        model=str(rm_dir),
        split_dataset_ratio=0.0,
        output_dir=str(tmp_path / "run"),
        torch_dtype="float32",
        micro_batch_size=2,
        global_batch_size=4,
        train_iters=4,
        lr=1e-3,
        acceptance_samples=0,
        report_to=[],
        clip_grad=0.0,
    )

    def make(rows=ROWS, **changed) -> RmArgs:
        path = tmp_path / "pairs.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        held_out = write_rows(tmp_path / "held_out.jsonl")
        return replace(usual, **{"dataset": [str(path)], "val_dataset": [str(held_out)]} | changed)

    return make


def exported(run: Path, mesh, **changed) -> Path:
    out = run.with_name(f"{run.name}-hf")
    convert(ExportArgs(model=str(run), output_dir=str(out), to_hf=True, **changed), mesh)
    return out


def check_export(run: Path, out: Path, family: str) -> None:
    """Compare the scores of transformers' class with those of the last evaluation of the run."""
    config = json.loads((out / "config.json").read_text())
    assert config["architectures"] == [CLASSES[family]]
    assert isinstance(config["pad_token_id"], int)
    chosen, rejected = (hf_scores(out, conversations(ROWS, name)) for name in ("chosen", "rejected"))
    last = metrics(run)[-1]
    # Float32 in other orders of operations; models with experts round their routers.
    scale = float(torch.cat([chosen, rejected]).abs().max())
    assert last["eval_margin"] == pytest.approx(float((chosen - rejected).mean()), rel=0, abs=1e-4 * scale)
    assert last["eval_max_reward"] == pytest.approx(float(torch.cat([chosen, rejected]).max()), rel=0, abs=1e-4 * scale)
    assert last["eval_min_reward"] == pytest.approx(float(torch.cat([chosen, rejected]).min()), rel=0, abs=1e-4 * scale)


def test_the_classes_are_transformers():
    assert {name: NAMES[name] for name in CLASSES} == CLASSES
    text_families = {name for name, family in FAMILIES.items() if family.vision is None and not is_wrapped(family)}
    assert set(CLASSES) == text_families & set(NAMES)


@pytest.mark.parametrize("family", some_of(list(CLASSES), "qwen3", "deepseek_v3", "gemma3_text", "gpt_oss"))
def test_an_export_has_the_scores_of_the_run(options, mesh, tmp_path, family):
    """The model is a language model with an MTP head: its output layer and head are left out, and its score is new."""
    hf_dir = make_tiny_hf(tmp_path / family, family, depth=1, with_tokenizer=True)
    args = options(model=str(hf_dir), train_iters=2)
    run = train(args, mesh)
    out = exported(run, mesh)
    check_export(run, out, family)
    assert audit_hf(out, resolve(out).family) == []
    assert "lm_head.weight" not in load_file(out / "model.safetensors")
    assert json.loads((out / "config.json").read_text())["num_labels"] == 1


@pytest.mark.parametrize("merge", [True, False])
def test_adapters(options, mesh, tmp_path, rm_dir, merge):
    args = options(tuner_type="lora", lora_rank=4, lr=1e-2, train_iters=2)
    run = train(args, mesh)
    out = exported(run, mesh, merge_lora=merge)
    if merge:
        check_export(run, out, "qwen3")
        before, after = load_file(rm_dir / "model.safetensors"), load_file(out / "model.safetensors")
        assert not torch.equal(before["score.weight"], after["score.weight"])
        assert torch.equal(before["model.embed_tokens.weight"], after["model.embed_tokens.weight"])
        return
    peft = pytest.importorskip("peft")
    assert json.loads((out / "adapter_config.json").read_text())["task_type"] == "SEQ_CLS"
    model = AutoModelForSequenceClassification.from_pretrained(rm_dir, num_labels=1, dtype=torch.float32)
    merged = tmp_path / "merged"
    peft.PeftModel.from_pretrained(model, out).merge_and_unload().save_pretrained(merged)
    ours = load_file(exported_merged(run, mesh) / "model.safetensors")
    theirs = load_file(merged / "model.safetensors")
    torch.testing.assert_close(ours, {name: theirs[name] for name in ours}, rtol=0, atol=1e-6)


def exported_merged(run: Path, mesh) -> Path:
    out = run.with_name("merged-by-swiftlite")
    convert(ExportArgs(model=str(run), output_dir=str(out), to_hf=True), mesh)
    return out


def test_a_run_resumes_with_the_same_numbers_and_learns(options, mesh, tmp_path):
    args = options(train_iters=12, save_steps=6, lr_decay_style="constant", lr_warmup_fraction=0.0)
    whole = metrics(train(args, mesh))
    part = replace(args, output_dir=str(tmp_path / "part"))
    train(replace(part, train_iters=6), mesh)
    resumed = metrics(train(replace(part, resume=True), mesh))
    losses = [{line["step"]: line["loss"] for line in lines if "loss" in line} for lines in (whole, resumed)]
    assert losses[0] == losses[1]
    assert len(losses[0]) == 12
    assert whole[-1]["eval_accuracy"] > 0.9


def test_an_export_is_a_model_of_the_next_run(options, mesh, tmp_path):
    first = train(options(train_iters=1), mesh)
    again = options(model=str(exported(first, mesh)), output_dir=str(tmp_path / "again"), train_iters=0)
    rules.check(again, 1)
    rewards = [metrics(run)[-1]["eval_mean_reward"] for run in (first, train(again, mesh))]
    assert rewards[0] == rewards[1]


def test_the_last_token_is_not_padding():
    pair = replace(make_sample([5, 6, 9, 9], [0, 1, 1, 1]), others=(make_sample([5, 9, 7], [0, 1, 1]),))
    found = _with_last(9, 0, pair)
    assert [each.extras["last"] for each in found.sequences] == [1, 2]


def test_margins_are_numbers(options, mesh):
    with pytest.raises(UserError, match=naming("margin pairs.jsonl:1")):
        train(options(rows=[{**ROWS[0], "margin": "large"}, *ROWS[1:]]), mesh)


def test_models_and_options_that_cannot_be(options, tmp_path, rm_dir):
    unknown = make_tiny_hf(tmp_path / "granite", "granite", with_tokenizer=True)
    with pytest.raises(OptionError, match=naming("--model granite")):
        rules.check(options(model=str(unknown)), 1)
    with pytest.raises(OptionError, match=naming("--lora_modules_to_save score norm")):
        rules.check(options(tuner_type="lora", lora_modules_to_save=["norm"]), 1)
    sft = SftArgs(model=str(rm_dir), dataset=options().dataset, output_dir=str(tmp_path / "sft"))
    with pytest.raises(OptionError, match=naming("--model megatron rm")):
        rules.check(sft, 1)
