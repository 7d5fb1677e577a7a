"""Test `megatron gkd` in one process with the transformers engine: completions, resuming, the teacher, errors."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from swiftlite import rules
from swiftlite.args.commands import GkdArgs
from swiftlite.base.errors import OptionError, UserError
from swiftlite.plan.distillation import on_policy_steps
from swiftlite.train import phases
from swiftlite.train import run as training
from tests.messages import naming
from tests.tiny import make_tiny_hf
from tests.train.completions import first_step, metrics, train, weights
from tests.train.distilled import gkd_options, make_models, store
from tests.train.prepared import prepare


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> tuple[Path, Path]:
    return make_models(tmp_path_factory.mktemp("models"))


@pytest.fixture
def options(models, tmp_path):
    """Return the options of a run of 4 steps, some of them replaced."""
    usual: dict[str, Any] = {"train_iters": 4, "micro_batch_size": 4, "max_completion_length": 6, "save_steps": 2}
    make = gkd_options(models, tmp_path)
    return lambda **changed: make(**usual | changed)


def test_a_resumed_run_equals_the_unbroken_one(options, mesh, tmp_path):
    """Steps train on answers or on completions. The run is stopped after the completions of a step were drawn.

    A run on the stored completions is the same, too.
    """
    drawn = on_policy_steps(options(), 4)
    assert 3 in drawn
    assert len(drawn) < 4
    whole = train(options(), mesh)
    assert sorted(path.stem for path in (whole / "rollouts").glob("*.safetensors")) == [f"{n:06d}" for n in drawn]
    args = options(output_dir=str(tmp_path / "stopped"))
    run = prepare(args, mesh)
    trainer = training.make_trainer(run, phases.restore(run))

    class Killed(Exception):
        pass

    step_of = trainer.step

    def step(number: int) -> dict[str, float]:
        if number == 4:
            trainer.batches.get(3)  # the completions are written, but not trained on
            raise Killed
        return step_of(number)

    trainer.step = step  # type: ignore[method-assign]
    with pytest.raises(Killed):
        trainer.fit(0)
    trainer.batches.release()
    trainer.close()
    written = {path: path.read_bytes() for path in (run.output_dir / "rollouts").glob("*.safetensors")}
    resumed = train(options(output_dir=str(tmp_path / "stopped"), resume=True), mesh)
    assert written == {path: path.read_bytes() for path in written}
    lines = metrics(resumed)
    assert lines == metrics(whole)
    again = options(output_dir=str(tmp_path / "again"), rollouts_from=str(whole / "rollouts"))
    rules.check(again, 1)
    assert metrics(train(again, mesh)) == lines
    for number, line in enumerate(lines):
        assert line["on_policy"] == (number in drawn)
        assert ("completions/mean_length" in line) == (number in drawn)
        assert line["loss"] > 0
        assert line["mtp_1_loss"] > 0
    expected, found = weights(whole, mesh), weights(resumed, mesh)
    assert all(torch.equal(expected[name], found[name]) for name in expected)


def test_the_model_as_its_own_teacher_has_no_loss(options, mesh, models):
    """Half of the divergence is relative to the mixture, so a teacher that the model does not equal has a loss."""
    of_itself, _ = first_step(options(teacher_model=str(models[0]), lmbda=0.0), mesh)
    assert of_itself["loss"] == pytest.approx(0, abs=1e-6)


def test_rows_need_no_answers_if_every_step_samples(options, mesh, tmp_path):
    rows = tmp_path / "prompts.jsonl"
    rows.write_text("".join(json.dumps({"query": f"What is {n}?"}) + "\n" for n in range(14)))
    args = options(dataset=[str(rows)], lmbda=1.0, train_iters=1, val_dataset=[str(rows)], acceptance_samples=2)
    rules.check(args, 1)
    (line,) = metrics(train(args, mesh))
    assert line["on_policy"] == 1
    assert line["rollout/acceptance_1"] >= 0
    with pytest.raises(UserError, match=naming("prompts.jsonl:1 --lmbda 1")):
        train(options(dataset=[str(rows)], lmbda=0.5), mesh)


def test_held_out_rows_have_a_divergence(options, mesh):
    run = prepare(options(split_dataset_ratio=0.2, lmbda=0.0), mesh)
    assert run.data.report.total.truncated == 0
    run.output_dir.mkdir()
    trainer = training.make_trainer(run, phases.state_of(run))
    before = trainer.evaluate(0)
    assert before["eval_loss"] > 0
    assert "eval_on_policy" not in before


def test_a_teacher_with_another_tokenizer_is_named(options, mesh, tmp_path):
    """Both have the same number of tokens."""
    other = make_tiny_hf(tmp_path / "other", "qwen3", with_tokenizer=True)
    path = other / "tokenizer.json"
    content = json.loads(path.read_text())
    vocabulary = content["model"]["vocab"]
    first, second = sorted(vocabulary)[:2]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    path.write_text(json.dumps(content))
    with pytest.raises(UserError, match=naming(f"--teacher_model {other}")):
        prepare(options(teacher_model=str(other)), mesh)


@pytest.mark.parametrize(
    ("changed", "named"),
    [({"temperature": 0.5}, "--temperature"), ({"seed": 7, "lmbda": 1.0}, "--dataset --seed")],
)
def test_completions_of_another_run_are_refused(options, mesh, tmp_path, changed, named):
    usual: dict[str, Any] = {"rollouts_from": str(tmp_path / "rollouts"), "train_iters": 1, "lmbda": 1.0}
    store(options(**usual), mesh, tmp_path / "rollouts", step=0)
    with pytest.raises(UserError, match=naming(named)):
        first_step(options(**usual | changed), mesh)


def test_missing_completions_are_named_before_the_first_step(options, mesh, tmp_path):
    args = options(rollouts_from=str(tmp_path / "rollouts"), lmbda=1.0, train_iters=2)
    store(args, mesh, tmp_path / "rollouts", step=0)
    with pytest.raises(UserError, match=naming("--rollouts_from 2 --train_iters")):
        first_step(args, mesh)


def test_choices_depend_on_seed_and_share():
    args = GkdArgs(lmbda=0.3)
    chosen = on_policy_steps(args, 2000)
    assert len(chosen) == pytest.approx(600, abs=85)  # four standard deviations
    assert chosen == on_policy_steps(args, 2000)
    assert chosen != on_policy_steps(GkdArgs(lmbda=0.3, seed=1), 2000)
    assert on_policy_steps(GkdArgs(lmbda=0.0), 50) == []
    assert on_policy_steps(GkdArgs(lmbda=1.0), 50) == list(range(50))


def test_a_run_without_completions_starts_no_engine(options, mesh):
    run = train(options(lmbda=0.0, train_iters=1), mesh)
    assert not (run / "rollouts").exists()


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"teacher_model": None}, "--teacher_model"),
        ({"teacher_model": "nowhere"}, "--teacher_model nowhere"),
        ({"lmbda": 1.5}, "--lmbda"),
        ({"beta": -0.1}, "--beta"),
        ({"max_completion_length": 128}, "--max_completion_length --max_length"),
        ({"packing": True}, "--packing --padding_free"),
        ({"mtp_mode": "heads_only"}, "--mtp_mode heads_only"),
        ({"mtp_loss": "ce"}, "--mtp_loss kl"),
        ({"streaming": True}, "--streaming"),
        ({"truncation_strategy": "left"}, "--truncation_strategy"),
        ({"rollouts_from": "nowhere"}, "--rollouts_from nowhere"),
        ({"draft_schedule": "bench.json"}, "--draft_schedule --infer_backend"),
    ],
)
def test_invalid_options_are_named(options, changed, named):
    with pytest.raises(OptionError, match=naming(named)):
        rules.check(options(**changed), 1)


def test_layouts_that_only_the_teacher_does_not_support_are_named(options, tmp_path):
    """The model has 2 layers, this teacher 3."""
    teacher = make_tiny_hf(tmp_path / "three", "qwen3", with_tokenizer=True, num_hidden_layers=3)
    layout = {"pipeline_model_parallel_size": 2}
    rules.check(options(**layout), 2)
    with pytest.raises(OptionError, match=naming(f"--teacher_model {teacher} 3 2")):
        rules.check(options(teacher_model=str(teacher), **layout), 2)


def test_a_teacher_with_another_vocabulary_size_is_named(options, tmp_path):
    teacher = make_tiny_hf(tmp_path / "small", "qwen3", vocab_size=96)
    with pytest.raises(OptionError, match=naming(f"--teacher_model {teacher} vocab_size 96")):
        rules.check(options(teacher_model=str(teacher)), 1)
