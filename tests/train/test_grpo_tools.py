"""Test `megatron grpo` with completions of several answers: their labels, gradients, log-probabilities and files."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from swiftlite.data.batch import collate
from swiftlite.data.sample import IGNORED, Sample
from swiftlite.rollouts.generation import Generation, selected
from swiftlite.train.methods.policy import ADVANTAGE, ENGINE, REFERENCE
from tests.tiny import make_tiny_hf
from tests.train.completions import (
    first_step,
    hf_log_p,
    make_teacher,
    metrics,
    policy_options,
    store,
    train,
    train_and_stop,
)

CODE = """
def even(completion_ids):
    return [sum(token % 2 == 0 for token in ids) / len(ids) for ids in completion_ids]


async def talk(messages, generate, answer):
    messages = [*messages, await generate(messages, max_tokens=4), {"role": "user", "content": answer}]
    assert answer != "4"
    return [*messages, await generate(messages)]


async def fail(messages, generate):
    raise RuntimeError("no answer")
"""


@pytest.fixture(scope="module")
def hf_dir(tmp_path_factory) -> Path:
    return make_tiny_hf(tmp_path_factory.mktemp("model") / "hf", "qwen3", depth=2, with_tokenizer=True)


@pytest.fixture
def options(hf_dir, tmp_path):
    (tmp_path / "code.py").write_text(CODE)
    make = policy_options(hf_dir, tmp_path)
    usual: dict[str, Any] = {"reward_funcs": ["even"], "external_plugins": [str(tmp_path / "code.py")]}
    usual |= {"rollout_func": "talk", "max_completion_length": 48, "train_iters": 2, "save_steps": 1}
    return lambda **changed: make(**usual | changed)


@pytest.fixture
def stored(options, mesh, tmp_path) -> tuple[Any, Generation]:
    """Return options, and completions whose middle third are tokens of a tool."""
    args = options(
        rollout_func=None,
        rollouts_from=str(tmp_path / "stored"),
        max_completion_length=12,
        micro_batch_size=1,
        train_iters=1,
    )
    generation = store(args, mesh, tmp_path / "stored")
    masks = []
    for length in generation.completion_lengths:
        masks.append((np.arange(length) < -(-length // 3)) | (np.arange(length) >= 2 * length // 3))
    return args, replace(generation, is_generated=np.concatenate(masks))


def test_gradients_are_those_of_tool_tokens_in_a_prompt(stored, mesh):
    """A conversation with one call is equal to two completions: the call, and the answer to a longer prompt."""
    args, generation = stored
    whole = replace(generation, is_generated=np.ones_like(generation.is_generated)).samples()
    parts = []
    for sample, first, length in zip(whole, generation.prompt_lengths, generation.completion_lengths, strict=True):
        call, answer = first - (-length // 3), first + max(2 * length // 3, -(-length // 3))
        parts.append(shortened(sample, call))
        if answer < len(sample):
            parts.append(without_labels_before(sample, answer))
    metrics_of_parts, expected = first_step(args, mesh, parts)
    found_metrics, found = first_step(replace(args, output_dir=f"{args.output_dir}-2"), mesh, generation.samples())
    assert found_metrics["loss"] == pytest.approx(metrics_of_parts["loss"], rel=1e-5)
    assert expected.keys() == found.keys()
    for name, gradient in expected.items():
        assert gradient.any(), name
        torch.testing.assert_close(found[name], gradient, rtol=0, atol=1e-5 * float(gradient.abs().max()), msg=name)


def shortened(sample: Sample, end: int) -> Sample:
    arrays = {name: getattr(sample, name)[:end] for name in ("input_ids", "labels", "loss_scale")}
    return replace(sample, **arrays, extras={name: value[:end] for name, value in sample.extras.items()})


def without_labels_before(sample: Sample, start: int) -> Sample:
    is_label = np.arange(len(sample)) >= start
    labels = np.where(is_label, sample.labels, np.int32(IGNORED))
    return replace(sample, labels=labels, loss_scale=sample.loss_scale * is_label)


def test_tool_tokens_are_context_and_no_target(stored):
    """Neither of the trunk nor of a head of any depth, whatever numbers a file has for them."""
    _, generation = stored
    samples = generation.samples()
    batch = collate(samples, 0, num_drafts=2)
    for row, (sample, first) in enumerate(zip(samples, generation.prompt_lengths, strict=True)):
        mask = np.concatenate([np.zeros(first, bool), generation.masks()[row]])
        assert sample.input_ids.tolist() == batch.tokens_KBS[0, row, : len(sample)].tolist()
        assert not sample.extras[ADVANTAGE.name][~mask].any()
        assert np.isnan(sample.extras[ENGINE.name][~mask]).all()
        assert not sample.extras[REFERENCE.name][~mask].any()
        for depth in range(3):
            expected = np.where(mask, sample.input_ids, IGNORED)[depth + 1 :]
            assert batch.labels_KBS[depth, row, : len(expected)].tolist() == expected.tolist()
            assert batch.loss_scale_KBS[depth, row, : len(expected)].tolist() == mask[depth + 1 :].tolist()


def test_files_have_the_mask_only_if_it_says_something(stored, tmp_path):
    """Releases that do not know the mask refuse the file instead of training on tokens of tools."""
    _, generation = stored
    path = tmp_path / "one.safetensors"
    generation.save(path)
    assert Generation.load(path).is_generated.tolist() == generation.is_generated.tolist()
    assert b'\\"version\\": 2' in path.read_bytes()
    whole = replace(generation, is_generated=np.ones_like(generation.is_generated))
    whole.save(path)
    assert Generation.load(path).is_generated.all()
    assert b"is_generated" not in path.read_bytes()
    assert b'\\"version\\": 1' in path.read_bytes()
    part = selected([whole, generation], [len(whole) + 1])
    assert part.is_generated.tolist() == generation.masks()[1].tolist()


def test_a_run_with_a_rollout_function(options, mesh, hf_dir, tmp_path):
    """Its function fails for one of the six prompts, which is then not trained on, and drafts with both heads."""
    changed = {"steps_per_generation": 2, "teacher_model": str(make_teacher(tmp_path / "teacher"))}
    args = options(**changed, beta=0.1, val_dataset=[str(tmp_path / "prompts.jsonl")], eval_iters=1)
    run = train(args, mesh)
    found = Generation.load(run / "rollouts" / "000000.safetensors")
    mask = found.is_generated
    assert 0 < mask.sum() < len(mask)
    has_failed = found.generated_lengths == 0
    assert has_failed.sum() == args.num_generations
    assert np.array_equal(np.isnan(found.scores[:, 0]), has_failed)
    assert not found.advantages[has_failed].any()
    expected = hf_log_p(hf_dir, found)
    for name in ("old_log_p", "engine_log_p", "reference_log_p"):
        values = getattr(found, name)
        # Float32 products in another order.
        np.testing.assert_allclose(values[mask], expected, rtol=0, atol=2e-5, err_msg=name)
        assert np.isnan(values).sum() == (~mask).sum()
    first, *_ = [line for line in metrics(run) if "loss" in line]
    assert first["completions/mean_length"] == pytest.approx(found.generated_lengths.mean())
    assert first["rollout/failures"] == has_failed.sum()
    assert first["rollout/turns"] == pytest.approx(2 - has_failed.mean())
    assert 0 <= first["rollout/acceptance_1_after_tool"] <= 1
    assert np.isfinite(list(first.values())).all()
    assert any("eval_rollout/acceptance_2_after_tool" in line for line in metrics(run))


def test_a_resumed_run_equals_the_unbroken_one(options, mesh, tmp_path):
    """Also without an engine, from the stored completions."""
    changed: dict[str, Any] = {"train_iters": 3, "dynamic_sample": True}
    whole = train(options(**changed), mesh)
    stopped = str(tmp_path / "stopped")
    train_and_stop(options(output_dir=stopped, **changed), mesh, 1)
    assert metrics(train(options(output_dir=stopped, resume=True, **changed), mesh)) == metrics(whole)
    again = options(output_dir=str(tmp_path / "again"), rollouts_from=str(whole / "rollouts"), train_iters=3)
    for found, expected in zip(metrics(train(again, mesh)), metrics(whole), strict=True):
        assert found == pytest.approx(expected, rel=1e-3, abs=1e-4)


def test_a_generation_without_conversations_has_finite_metrics(options, mesh):
    args = options(rollout_func="fail", dynamic_sample=True, max_resample_times=1, train_iters=1)
    (line,) = metrics(train(args, mesh))
    assert line["rollout/failures"] >= args.global_batch_size
    assert line["loss"] == 0


def test_other_code_draws_a_generation_again(options, mesh, tmp_path):
    run = train_and_stop(options(train_iters=3), mesh, 1)
    stored = [Generation.load(path) for path in sorted((run / "rollouts").glob("*.safetensors"))]
    (tmp_path / "code.py").write_text(CODE.replace('"content": answer', '"content": answer + "!"'))
    train(options(train_iters=3, resume=True), mesh)
    found = [Generation.load(path) for path in sorted((run / "rollouts").glob("*.safetensors"))]
    is_same = [
        one.completion_ids.tolist() == other.completion_ids.tolist() for one, other in zip(stored, found, strict=True)
    ]
    assert is_same == [True, True, False]
