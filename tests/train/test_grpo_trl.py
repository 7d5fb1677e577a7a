"""Test losses, metrics and gradients of `megatron grpo` against TRL's GRPOTrainer (requirements/dev.txt)."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import pad_sequence

from swiftlite import rules
from swiftlite.args.commands import GrpoArgs
from swiftlite.base.errors import OptionError, UserError
from swiftlite.base.heads import Heads
from swiftlite.families.resolved import resolve
from swiftlite.model.open import open_model
from swiftlite.rollouts.generation import Generation
from swiftlite.train.checkpoint.checkpointer import REFERENCE, load_checkpoint
from tests.messages import naming
from tests.tiers import some_of
from tests.tiny import make_tiny_hf
from tests.train.completions import (
    NUM_GENERATIONS,
    first_step,
    hf_log_p,
    make_teacher,
    metrics,
    policy_options,
    store,
    train,
)
from tests.train.pairs import check_gradients, open_hf

trl: Any = pytest.importorskip("trl")
datasets: Any = pytest.importorskip("datasets")

LOSSES: dict[str, dict[str, Any]] = {
    "dapo": {},
    "dapo, GSPO": {"importance_sampling_level": "sequence", "epsilon": 0.01, "epsilon_high": 0.02},
    "dapo, KL": {"beta": 0.1},
    "dapo, KL without correction": {"beta": 0.1, "use_bias_correction_kl": False},
    "dapo, delta": {"epsilon": 0.1, "epsilon_high": 0.3, "delta": 1.4},
    "dapo, token_truncate": {"rollout_importance_sampling_mode": "token_truncate"},
    "dapo, token_mask": {"rollout_importance_sampling_mode": "token_mask"},
    "dapo, sequence_truncate": {"rollout_importance_sampling_mode": "sequence_truncate"},
    "grpo": {},
    "grpo, GSPO": {"importance_sampling_level": "sequence", "epsilon": 0.01},
    "grpo, sequence_mask, KL": {"rollout_importance_sampling_mode": "sequence_mask", "beta": 0.05},
    "dr_grpo": {"epsilon_high": 0.28},
    "cispo": {"epsilon_high": 1.2},
    "dapo, teacher": {"teacher_kl_coef": 0.5, "temperature": 0.7},
    "cispo, GSPO, teacher": {"epsilon_high": 0.9, "importance_sampling_level": "sequence", "teacher_kl_coef": 0.1},
    "sapo": {},
    "bnpo": {},
    "bnpo, KL, entropy": {"beta": 0.05, "entropy_coef": 0.3, "temperature": 0.7},
    "cispo, entropy": {"epsilon_high": 1.2, "entropy_coef": 0.1},
    "sapo, KL, overlong": {"beta": 0.05, "sapo_temperature_pos": 0.8, "overlong_filter": True},
    "dapo, overlong": {"overlong_filter": True},
    "cispo, GSPO": {"epsilon_high": 0.9, "importance_sampling_level": "sequence"},
    "dapo, tools": {"rollout_importance_sampling_mode": "sequence_truncate"},
    "grpo, tools, GSPO, KL": {"importance_sampling_level": "sequence", "epsilon": 0.01, "beta": 0.05},
    "dr_grpo, tools": {"rollout_importance_sampling_mode": "token_mask"},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return make_tiny_hf(tmp_path_factory.mktemp("model") / "hf", "qwen3", depth=0, with_tokenizer=True)


@pytest.fixture(scope="module")
def teacher(tmp_path_factory) -> Path:
    return make_teacher(tmp_path_factory.mktemp("teacher") / "hf")


def padded(parts: list[np.ndarray], side: str = "right", dtype: Any = torch.int64) -> torch.Tensor:
    tensors = [torch.from_numpy(part.copy()).to(dtype) for part in parts]
    return pad_sequence(tensors, batch_first=True, padding_side=side)


def of_completions(values: np.ndarray, lengths: np.ndarray, dtype: Any = torch.float32) -> torch.Tensor:
    return padded(np.split(values, np.cumsum(lengths)[:-1]), dtype=dtype)


def mismatch(generation: Generation, args: GrpoArgs) -> torch.Tensor:
    """Compute the weights by TRL's formula (`_generate_and_score_completions`, vllm_importance_sampling_mode)."""
    difference = np.nan_to_num(generation.old_log_p - generation.engine_log_p)
    padded_difference = of_completions(difference, generation.completion_lengths)
    mode, most = args.rollout_importance_sampling_mode, args.rollout_importance_sampling_threshold
    if mode.startswith("sequence"):
        padded_difference = padded_difference.sum(-1, keepdim=True)
    weight = padded_difference.exp()
    if mode.endswith("truncate"):
        return weight.clamp(max=most)
    return weight.masked_fill(weight > most, 0.0)


def advantages_of(generation: Generation, args: GrpoArgs) -> tuple[torch.Tensor, float | None]:
    """Return the advantages, with a teacher those of each token, and the mean KL divergence from the teacher."""
    advantages = torch.from_numpy(generation.advantages)
    if args.teacher_model is None:
        return advantages, None
    difference = hf_log_p(Path(args.teacher_model), generation, args.temperature) - generation.old_log_p
    per_token = args.teacher_kl_coef * of_completions(difference, generation.completion_lengths)
    return advantages[:, None] + per_token, -float(difference.mean())


def their_step(
    model: Path, out_dir: Path, args: GrpoArgs, generation: Generation
) -> tuple[float, dict[str, float], Any]:
    """Return TRL's loss, metrics and model with gradients for these completions.

    TRL has no teacher; subclasses of its trainer may have advantages of each token.
    """
    config = trl.GRPOConfig(
        output_dir=str(out_dir),
        loss_type=args.loss_type,
        importance_sampling_level=args.importance_sampling_level,
        epsilon=args.epsilon,
        epsilon_high=args.epsilon_high,
        delta=args.delta,
        sapo_temperature_pos=args.sapo_temperature_pos,
        sapo_temperature_neg=args.sapo_temperature_neg,
        beta=args.beta,
        entropy_coef=args.entropy_coef,
        temperature=args.temperature,
        use_bias_correction_kl=args.use_bias_correction_kl,
        max_completion_length=args.max_completion_length,
        num_generations=NUM_GENERATIONS,
        per_device_train_batch_size=len(generation),
        gradient_checkpointing=False,
        bf16=False,
        use_cpu=True,
        report_to=[],
    )
    trainer = trl.GRPOTrainer(
        model=open_hf(model),
        reward_funcs=lambda completions, **columns: [0.0] * len(completions),
        args=config,
        train_dataset=datasets.Dataset.from_list([{"prompt": "a"}] * 6),
        processing_class=trl.trainer.grpo_trainer.AutoTokenizer.from_pretrained(model),
    )
    trainer.use_vllm = args.rollout_importance_sampling_mode != "none"
    prompts = np.split(generation.prompt_ids, np.cumsum(generation.prompt_lengths)[:-1])
    lengths = generation.completion_lengths
    advantages, teacher_kl = advantages_of(generation, args)
    mask = padded([np.ones(length) for length in lengths])
    if args.overlong_filter:  # as in `_generate_and_score_completions` with mask_truncated_completions
        assert 0 < generation.is_truncated.sum() < len(generation)
        mask = mask * torch.from_numpy(~generation.is_truncated)[:, None]
    tool_mask = of_completions(generation.is_generated, lengths, torch.int64)
    inputs = {
        "prompt_ids": padded(prompts, "left"),
        "prompt_mask": padded([np.ones_like(prompt) for prompt in prompts], "left"),
        "completion_ids": of_completions(generation.completion_ids, lengths, torch.int64),
        "completion_mask": mask,
        "advantages": advantages,
        "old_per_token_logps": of_completions(np.nan_to_num(generation.old_log_p), lengths),
        "ref_per_token_logps": of_completions(np.nan_to_num(generation.reference_log_p), lengths),
        "num_items_in_batch": (mask * tool_mask).sum().float(),
    }
    if not generation.is_generated.all():
        inputs["tool_mask"] = tool_mask
    if trainer.use_vllm:
        inputs["importance_sampling_ratio"] = mismatch(generation, args)
    hf_model = trainer.model.train()
    size = args.micro_batch_size if args.loss_type == "bnpo" else len(generation)  # others do not depend on it
    trainer.current_gradient_accumulation_steps = len(generation) // size
    losses = []
    for start in range(0, len(generation), size):
        rows = slice(start, start + size)
        part = {name: value[rows] if value.ndim else value for name, value in inputs.items()}
        losses.append(trainer._compute_loss(hf_model, part))
        losses[-1].backward()
    loss = torch.stack(losses).sum()
    found = {name: values[-1] for name, values in trainer._metrics["train"].items() if len(values) == 1}
    if teacher_kl is not None:
        found["teacher_kl"] = teacher_kl
        if args.importance_sampling_level == "sequence":  # TRL counts tokens if advantages are those of tokens
            found = {name: value for name, value in found.items() if "clip_ratio" not in name}
    return float(loss.detach()), found, hf_model


CASES = [(name, False) for name in LOSSES] + [("dapo, GSPO", True), ("grpo", True)]
KEPT = (("dapo, GSPO", True), ("grpo, sequence_mask, KL", False), ("cispo", False), ("dapo, teacher", False))
KEPT += (("sapo, KL, overlong", False), ("bnpo, KL, entropy", False), ("grpo, tools, GSPO, KL", False))


@pytest.mark.parametrize(("name", "padding_free"), some_of(CASES, *KEPT))
def test_a_step_is_trls(model, teacher, mesh, tmp_path, name, padding_free):
    changed: dict[str, Any] = {"rollout_importance_sampling_mode": "none", "padding_free": padding_free}
    changed |= {"loss_type": name.split(",")[0], "rollouts_from": str(tmp_path / "rollouts")} | LOSSES[name]
    if "teacher" in name:
        changed["teacher_model"] = str(teacher)
    args = policy_options(model, tmp_path)(**changed)
    generation = store(args, mesh, tmp_path / "rollouts", has_tools="tools" in name)
    assert generation.is_generated.all() == ("tools" not in name)
    ours, gradients = first_step(args, mesh)
    loss, their_metrics, hf_model = their_step(model, tmp_path / "trl", args, generation)
    # Sums of float32 in another order.
    assert ours["loss"] == pytest.approx(loss, rel=2e-5, abs=2e-6)
    clipped = [f"clip_ratio/{name}" for name in ("low_mean", "low_min", "high_mean", "high_max", "region_mean")]
    if args.loss_type == "bnpo":  # TRL's extremes are means over micro-batches
        clipped = [name for name in clipped if name.endswith("mean")]
    clipped.append("cispo_clip_ratio")
    for each in ("entropy", "kl", "teacher_kl", *clipped):
        if each in their_metrics:
            assert ours[each] == pytest.approx(their_metrics[each], rel=2e-5, abs=1e-6), each
    if not args.overlong_filter:
        difference = np.abs(generation.old_log_p - generation.engine_log_p)  # NaN: tokens of tools
        assert ours["sampling/sampling_logp_difference/mean"] == pytest.approx(np.nanmean(difference), rel=1e-6)
        assert ours["sampling/sampling_logp_difference/max"] == np.nanmax(difference)
    if args.rollout_importance_sampling_mode != "none":
        weights = mismatch(generation, args)
        if weights.shape[1] > 1:
            weights = weights[of_completions(generation.is_generated, generation.completion_lengths) > 0]
        extremes = [ours[f"sampling/importance_sampling_ratio/{each}"] for each in ("min", "max")]
        assert extremes == pytest.approx([float(weights.min()), float(weights.max())], rel=1e-6)
    assert any(ours.get(each) for each in ("clip_ratio/region_mean", "cispo_clip_ratio")) or args.loss_type == "sapo"
    check_gradients(gradients, hf_model, 2e-5)


def test_the_reference_model_follows_as_in_trl(model, teacher, mesh, tmp_path):
    """It is moved after steps 2 and 4, and used by the step after."""
    options = policy_options(model, tmp_path)
    changed: dict[str, Any] = {"beta": 0.5, "sync_ref_model": True, "ref_model_sync_steps": 2, "train_iters": 5}
    changed |= {"lr": 0.01, "save_steps": 1, "rollouts_from": str(tmp_path / "rollouts"), "lr_warmup_fraction": 0.0}
    args = options(**changed, ref_model_mixup_alpha=0.3)
    for number in range(5):
        store(args, mesh, tmp_path / "rollouts", number)
    run = train(args, mesh)

    def chunks_of(step: int, prefix: str = "") -> Any:
        chunks, _ = open_model(resolve(str(model)), mesh, dtype=torch.float32, heads=Heads())
        if step:
            load_checkpoint(run / f"checkpoint-{step}", mesh, chunks, prefix=prefix)
        return chunks[0]

    expected = chunks_of(0)
    for step in range(1, 6):
        if step % 2 == 0:
            trl.trainer.callbacks.SyncRefModelCallback._sync_target_model(chunks_of(step), expected, 0.3)
        found = chunks_of(step, REFERENCE)
        assert all(map(torch.equal, found.parameters(), expected.parameters())), step

    copied = train(options(**changed, ref_model_mixup_alpha=1.0, output_dir=str(tmp_path / "copied")), mesh)
    kl = [line["kl"] for line in metrics(copied)]  # 0 at the steps after the policy became the reference
    assert max(kl[2], kl[4]) < 1e-9
    assert min(kl[1], kl[3]) > 1e-4

    with pytest.raises(UserError, match=naming("--sync_ref_model --ref_model --model")):
        train(options(**changed, ref_model=str(teacher), output_dir=str(tmp_path / "other")), mesh)
    tied = make_tiny_hf(tmp_path / "tied", "qwen3", tied=True, with_tokenizer=True)
    with pytest.raises(UserError, match=naming("--sync_ref_model --ref_model --model")):
        train(options(**changed, ref_model=str(tied), output_dir=str(tmp_path / "untied")), mesh)
    with pytest.raises(OptionError, match=naming("--ref_model_sync_steps 3 4 --rollouts_from")):
        rules.check(options(**changed | {"ref_model_sync_steps": 3}, steps_per_generation=2), 1)
