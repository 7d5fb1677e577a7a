"""Test that a resumed run trains on stored completions only if its own policy drew them."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from swiftlite.rollouts.generation import Generation
from swiftlite.train import phases
from swiftlite.train import run as training
from tests.tiny import make_tiny_hf
from tests.train import distilled
from tests.train.completions import metrics, policy_options, train, train_and_stop
from tests.train.prepared import prepare

REWARDS = """
def odd(completion_ids):
    return [float(sum(ids) % 2) for ids in completion_ids]
"""


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> list[Path]:
    """Return two models with the same tokenizer."""
    place = tmp_path_factory.mktemp("models")
    return [make_tiny_hf(place / str(seed), "qwen3", depth=0, seed=seed, with_tokenizer=True) for seed in (0, 5)]


@pytest.fixture
def options(models, tmp_path):
    """Return the options of a run with large steps, so that the completions of another policy are noticed."""
    plugin = tmp_path / "rewards.py"
    plugin.write_text(REWARDS)
    usual: dict[str, Any] = {
        "reward_funcs": ["odd"],
        "external_plugins": [str(plugin)],
        "train_iters": 4,
        "save_steps": 100,
        "lr": 0.02,
        "lr_warmup_fraction": 0.0,
    }
    return lambda **changed: policy_options(models[0], tmp_path)(**usual | changed)


def weights_of_tokens(lines: list[dict[str, float]]) -> list[float]:
    """Return the importance weights, which are 1 if the policy of each step drew its completions."""
    return [line["rollout/importance_weight"] for line in lines]


def completions(path: Path) -> list[list[int]]:
    return Generation.load(path).completions()


def stored(run: Path) -> list[bytes]:
    return [path.read_bytes() for path in sorted((run / "rollouts").glob("*.safetensors"))]


def test_completions_of_another_model_are_drawn_again(options, models, mesh, caplog):
    """The options are not checked here, as if the files of --model had been replaced."""
    run = train_and_stop(options(), mesh, 1)
    before = stored(run)
    lines = metrics(train(options(model=str(models[1]), resume=True), mesh))
    assert stored(run)[: len(before)] != before
    assert weights_of_tokens(lines) == pytest.approx([1.0] * 4, abs=1e-3)
    assert "000000.safetensors" in caplog.text
    assert "the model changed" in caplog.text


def test_completions_after_another_reward_are_drawn_again(options, mesh, tmp_path, caplog):
    """The generation after the checkpoint is scored again. The policy that drew the next one learned from the scores
    before.
    """
    run = train_and_stop(options(save_steps=2), mesh, 2)
    before = list(map(completions, sorted((run / "rollouts").glob("*.safetensors"))))
    assert len(before) == 4
    plugin = tmp_path / "rewards.py"
    plugin.write_text(REWARDS.replace("float(", "-float("))
    lines = metrics(train(options(save_steps=2, resume=True), mesh))
    assert weights_of_tokens(lines) == pytest.approx([1.0] * 4, abs=1e-3)
    after = list(map(completions, sorted((run / "rollouts").glob("*.safetensors"))))
    assert after[:3] == before[:3]
    assert after[3] != before[3]
    assert "000003.safetensors" in caplog.text
    assert "the generation before it changed" in caplog.text


def test_a_generation_in_use_is_kept(options, mesh, caplog):
    """The run is stopped in the middle of a generation, and lengthened. Its old policy is known by its
    log-probabilities; the next generation is a new one.
    """
    changed: dict[str, Any] = {"steps_per_generation": 2, "save_steps": 3, "lr_decay_style": "linear", "train_iters": 6}
    run = train_and_stop(options(**changed), mesh, 3)
    before = stored(run)
    train(options(**changed | {"train_iters": 7}, resume=True), mesh)
    assert stored(run)[:2] == before[:2]
    assert stored(run)[2] != before[2]
    assert "the number of steps changed" in caplog.text


def test_the_options_count_unless_a_resumed_run_may_change_them(options, mesh, caplog):
    run = train_and_stop(options(), mesh, 1)
    before = stored(run)
    train(options(resume=True, micro_batch_size=2, save_steps=7), mesh)
    assert stored(run)[:1] == before[:1]
    assert "drawn again" not in caplog.text


def test_old_generations_are_deleted(options, mesh):
    """The generations that a resumed run needs are kept, and the run equals one that keeps all."""
    changed: dict[str, Any] = {"save_steps": 2, "train_iters": 4}
    whole = metrics(train(options(**changed), mesh))
    limited = {"output_dir": f"{options().output_dir}-limited", "rollouts_total_limit": 1}
    run = train_and_stop(options(**changed, **limited), mesh, 2)
    names = sorted(path.stem for path in (run / "rollouts").glob("*.safetensors"))
    assert names == ["000001", "000002", "000003"]
    assert sorted(path.stem for path in (run / "rollouts").glob("*.jsonl")) == names
    assert metrics(train(options(**changed, **limited, resume=True), mesh)) == whole


def test_what_is_not_known_takes_no_space(options, mesh):
    run = train(options(train_iters=1), mesh)
    path = run / "rollouts" / "000000.safetensors"
    generation = Generation.load(path)
    assert np.isnan(generation.old_log_p).all()
    assert np.isfinite(generation.engine_log_p).all()
    again = path.with_name("again.safetensors")
    generation.save(again)
    assert again.read_bytes() == path.read_bytes()
    assert b"teacher_log_p" not in path.read_bytes()
    assert b"old_log_p" not in path.read_bytes()


@pytest.mark.slow
def test_completions_of_another_model_are_drawn_again_in_distillation(mesh, tmp_path, caplog):
    """They have no ratio that could correct for the policy."""
    student, teacher = distilled.make_models(tmp_path)
    other = make_tiny_hf(tmp_path / "other", "qwen3", depth=1, seed=5, with_tokenizer=True)
    make = distilled.gkd_options((student, teacher), tmp_path)
    changed: dict[str, Any] = {"train_iters": 2, "lmbda": 1.0, "save_steps": 100, "max_completion_length": 6}
    run = prepare(make(**changed), mesh)
    trainer = training.make_trainer(run, phases.restore(run))
    trainer.batches.get(0)
    trainer.batches.release()
    trainer.close()
    before = stored(run.output_dir)
    expected = metrics(train(make(**changed, model=str(other), output_dir=str(tmp_path / "new")), mesh))
    assert metrics(train(make(**changed, model=str(other), resume=True), mesh)) == expected
    assert stored(run.output_dir)[0] != before[0]
    assert "the model changed" in caplog.text
