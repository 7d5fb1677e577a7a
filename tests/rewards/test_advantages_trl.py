"""Test advantages and metrics against TRL's GRPOTrainer and RLOOTrainer, if TRL is installed (requirements/dev.txt)."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from swiftlite.acceptance.counts import DraftCounts
from swiftlite.data.template import load_tokenizer
from swiftlite.rewards.advantages import AdvantageSettings, compute_advantages
from swiftlite.rollouts.draw import completion_figures, reward_figures
from tests.tiny import make_tiny_hf
from tests.train.pairs import open_hf

trl: Any = pytest.importorskip("trl")
datasets: Any = pytest.importorskip("datasets")

WEIGHTS = (1.0, 0.5)
# Three groups of four: different rewards, equal rewards, and completions without a score of one or both functions.
SCORES = [
    [(1.0, 0.25), (0.0, 0.5), (1.0, 2.0), (0.0, -1.0)],
    [(0.5, 1.0), (0.5, 1.0), (0.5, 1.0), (0.5, 1.0)],
    [(None, 1.0), (1.0, None), (None, None), (0.25, 0.0)],
]
ENDS = list(range(0, 320, 5))
"""Tokens that end a completion."""
LONE = [[(None, None), (2.0, 1.0), (None, None), (None, None)]]


@pytest.fixture
def hf_dir(tmp_path) -> Path:
    return make_tiny_hf(tmp_path / "hf", "qwen3", with_tokenizer=True)


def theirs(kind: str, hf_dir: Path, out_dir: Path, groups: list, **options: Any) -> tuple[dict, dict]:
    """Return TRL's batch and metrics for the given scores of completions that a tiny model generates."""
    rows = [row for group in groups for row in group]

    def first(completions, **columns):
        return [row[0] for row in rows]

    def second(completions, **columns):
        return [row[1] for row in rows]

    config = getattr(trl, f"{kind}Config")(
        output_dir=str(out_dir),
        per_device_train_batch_size=len(rows),
        num_generations=len(groups[0]),
        max_completion_length=4,
        reward_weights=list(WEIGHTS),
        beta=0.0,
        bf16=False,
        use_cpu=True,
        report_to=[],
        **options,
    )
    prompts = [{"prompt": f"question {number}"} for number in range(len(groups))]
    model = open_hf(hf_dir)
    model.generation_config.eos_token_id = ENDS
    trainer = getattr(trl, f"{kind}Trainer")(
        model=model,
        reward_funcs=[first, second],
        args=config,
        train_dataset=datasets.Dataset.from_list(prompts),
        processing_class=load_tokenizer(hf_dir),
    )
    trainer.model.train()
    repeated = [dict(prompt) for prompt in prompts for _ in groups[0]]
    inputs = trainer._generate_and_score_completions(repeated)
    return inputs, {name: values[-1] for name, values in trainer._metrics["train"].items()}


@pytest.mark.parametrize("groups", [SCORES, LONE + SCORES], ids=["scored", "lone"])
@pytest.mark.parametrize(("kind", "scale"), [("GRPO", "group"), ("GRPO", "batch"), ("GRPO", "none"), ("RLOO", "none")])
def test_advantages_are_trls(hf_dir, tmp_path, kind, scale, groups):
    options = {"scale_rewards": scale} if kind == "GRPO" else {}
    batch, metrics = theirs(kind, hf_dir, tmp_path, groups, **options)
    advantages = batch["advantages"].numpy()
    scores = np.array([row for group in groups for row in group], np.float64)
    settings = AdvantageSettings(4, "grpo" if kind == "GRPO" else "rloo", scale, WEIGHTS)
    ours = compute_advantages(scores, settings)
    # TRL computes in float32.
    np.testing.assert_allclose(ours.advantages, advantages, rtol=1e-5, atol=1e-6)
    assert np.abs(advantages).max() > 0.5
    assert ours.statistics.mean == pytest.approx(metrics["reward"], rel=1e-6)
    assert ours.statistics.std == pytest.approx(metrics["reward_std"], rel=1e-6)
    figures = reward_figures(ours, ("first", "second"), 0)
    for name in ("first", "second"):
        for each in ("mean", "std"):
            assert figures[f"rewards/{name}/{each}"] == pytest.approx(metrics[f"rewards/{name}/{each}"], rel=1e-6)
    lengths, ids = batch["completion_mask"].sum(1).numpy(), batch["completion_ids"].numpy()
    is_truncated = ~np.isin(ids[np.arange(len(ids)), lengths - 1], [*ENDS, 2])
    assert 0 < is_truncated.sum() < len(ids)
    for name, value in completion_figures(lengths, is_truncated, DraftCounts(0, 0, ())).items():
        assert value == pytest.approx(metrics[name], rel=1e-6), name
    # With `batch`, TRL compares the batch's standard deviation; a group with one reward is not flat for TRL.
    if scale != "batch" and groups is SCORES:
        assert ours.statistics.frac_reward_zero_std == pytest.approx(metrics["frac_reward_zero_std"])
