"""Test `megatron grpo --teacher_model` in one process: advantages of each token, stored log-probabilities, errors."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from swiftlite import rules
from swiftlite.base.errors import OptionError, UserError
from swiftlite.rollouts.generation import Generation
from tests.messages import naming
from tests.tiny import make_tiny_hf
from tests.train.completions import first_step, hf_log_p, log_p_of, make_teacher, metrics, policy_options, store, train
from tests.train.pairs import check_gradients, open_hf
from tests.train.prepared import prepare

EXACT: dict[str, Any] = {"rel": 2e-5, "abs": 2e-6}
"""Sums of float32 in another order."""


@pytest.fixture(scope="module")
def hf_dir(tmp_path_factory) -> Path:
    return make_tiny_hf(tmp_path_factory.mktemp("model") / "hf", "qwen3", depth=1, with_tokenizer=True)


@pytest.fixture(scope="module")
def teacher_dir(tmp_path_factory) -> Path:
    return make_teacher(tmp_path_factory.mktemp("teacher") / "hf")


@pytest.fixture
def options(hf_dir, teacher_dir, tmp_path):
    """Return the options of a run without rewards, some of them replaced."""
    usual: dict[str, Any] = {"teacher_model": str(teacher_dir), "max_completion_length": 8, "micro_batch_size": 4}
    make = policy_options(hf_dir, tmp_path)
    return lambda **changed: make(**usual | changed)


def test_pure_distillation_has_the_gradient_of_the_reverse_kl(options, mesh, hf_dir, teacher_dir):
    """The completions are those of the model itself, so the ratio is 1, and the advantage is the teacher's alone."""
    temperature = 0.7
    args = options(
        num_generations=1, temperature=temperature, teacher_kl_coef=0.5, rollout_importance_sampling_mode="none"
    )
    rules.check(args, 1)
    ours, gradients = first_step(args, mesh)
    stored = Generation.load(Path(args.output_dir) / "rollouts" / "000000.safetensors")
    of_teacher = hf_log_p(teacher_dir, stored, temperature)
    np.testing.assert_allclose(stored.teacher_log_p, of_teacher, rtol=0, atol=2e-5)
    assert not stored.advantages.any()
    model = open_hf(hf_dir)
    log_p = log_p_of(model, stored, temperature)
    difference = torch.from_numpy(of_teacher) - log_p.detach()
    loss = -(0.5 * difference * (log_p - log_p.detach()).exp()).mean()
    loss.backward()
    assert ours["loss"] == pytest.approx(float(loss.detach()), **EXACT)
    assert ours["teacher_kl"] == pytest.approx(-float(difference.mean()), **EXACT)
    assert ours["teacher_kl"] > 0
    assert not [name for name in ours if "reward" in name]
    check_gradients(gradients, model, 2e-5)


def test_stored_numbers_of_the_teacher_are_used(options, mesh, tmp_path, teacher_dir):
    """They are computed again only for another teacher."""
    run = train(options(), mesh)
    (expected,) = metrics(run)
    path = run / "rollouts" / "000000.safetensors"
    stored = Generation.load(path)
    replace(stored, teacher_log_p=stored.teacher_log_p - 1).save(path)
    stored_by = {"rollouts_from": str(path.parent)}
    found, _ = first_step(options(**stored_by, output_dir=str(tmp_path / "same")), mesh)
    assert found["teacher_kl"] == pytest.approx(expected["teacher_kl"] + 1, rel=1e-4)
    copied = shutil.copytree(teacher_dir, tmp_path / "copy")
    found, _ = first_step(options(**stored_by, output_dir=str(tmp_path / "other"), teacher_model=str(copied)), mesh)
    assert found["teacher_kl"] == pytest.approx(expected["teacher_kl"], rel=1e-4)
    without, _ = first_step(options(**stored_by, output_dir=str(tmp_path / "none"), teacher_model=None), mesh)
    assert "teacher_kl" not in without
    assert without["loss"] == 0


def test_rollouts_of_earlier_releases_are_read(options, mesh, tmp_path):
    """Their files have no numbers of a teacher."""
    args = options(rollouts_from=str(tmp_path / "rollouts"))
    store(args, mesh, tmp_path / "rollouts")
    path = tmp_path / "rollouts" / "000000.safetensors"
    header = {"rollouts": json.dumps({"version": 1, "figures": {}, "settings": Generation.load(path).settings})}
    arrays = load_file(path)
    arrays.pop("teacher_log_p")
    assert "draft_depths" not in arrays  # the engine reported none
    save_file(arrays, path, header)
    assert np.isnan(Generation.load(path).teacher_log_p).all()
    assert set(Generation.load(path).draft_depths) == {-1}
    assert first_step(args, mesh)[0]["teacher_kl"] > 0


def test_a_teacher_with_another_tokenizer_is_refused(options, mesh, tmp_path, teacher_dir):
    other = tmp_path / "other"
    shutil.copytree(teacher_dir, other)
    content = json.loads((other / "tokenizer.json").read_text())
    vocabulary = content["model"]["vocab"]
    first, second = sorted(vocabulary)[:2]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (other / "tokenizer.json").write_text(json.dumps(content))
    args = options(teacher_model=str(other))
    rules.check(args, 1)
    with pytest.raises(UserError, match=naming("--teacher_model")):
        prepare(args, mesh)


def with_vocabulary(teacher_dir: Path, place: Path, vocab_size: int) -> str:
    place.mkdir()
    config = json.loads((teacher_dir / "config.json").read_text()) | {"vocab_size": vocab_size}
    (place / "config.json").write_text(json.dumps(config))
    return str(place)


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"teacher_model": "none"}, "--teacher_model none"),
        ({"teacher_kl_coef": 0.0}, "--teacher_kl_coef"),
        ({"num_generations": 1, "reward_funcs": ["length"]}, "--num_generations 1"),
        ({"dynamic_sample": True}, "--dynamic_sample --reward_funcs"),
        ({"teacher_model": None}, "--reward_funcs --teacher_model"),
    ],
)
def test_invalid_options_are_named(options, changed, named):
    with pytest.raises(OptionError, match=naming(named)):
        rules.check(options(**changed), 1)


def test_a_teacher_with_another_vocabulary_is_named(options, teacher_dir, tmp_path):
    args = options(teacher_model=with_vocabulary(teacher_dir, tmp_path / "other", 7))
    with pytest.raises(OptionError, match=naming("--teacher_model vocab_size 7")):
        rules.check(args, 1)


def test_layers_of_the_teacher_must_fit_the_stages(options, tmp_path):
    teacher = make_tiny_hf(tmp_path / "teacher", "qwen3", depth=0, with_tokenizer=True, num_hidden_layers=5)
    args = options(teacher_model=str(teacher), pipeline_model_parallel_size=2)
    with pytest.raises(OptionError, match=naming("--teacher_model 5 --teacher_pipeline_model_parallel_size")):
        rules.check(args, 2)
