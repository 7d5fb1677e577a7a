"""Test losses, metrics and gradients against TRL's RewardTrainer, if TRL is installed (requirements/dev.txt)."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from swiftlite.data.template import load_tokenizer
from tests.train.pairs import first_step
from tests.train.reward_models import ROWS
from tests.train.test_rm import options, rm_dir  # noqa: F401, fixtures

trl: Any = pytest.importorskip("trl")
datasets: Any = pytest.importorskip("datasets")


def their_step(model_dir: Path, out_dir: Path, rows: list[dict[str, Any]], **options) -> tuple[float, dict, Any]:  # noqa: F811
    """Return TRL's loss, metrics and model with gradients after one batch of all pairs."""
    config = trl.RewardConfig(
        output_dir=str(out_dir),
        per_device_train_batch_size=len(rows),
        gradient_checkpointing=False,
        bf16=False,
        use_cpu=True,
        report_to=[],
        max_length=None,
        **options,
    )
    trainer = trl.RewardTrainer(
        model=AutoModelForSequenceClassification.from_pretrained(model_dir, dtype=torch.float32),
        args=config,
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=load_tokenizer(model_dir),
    )
    model = trainer.model.train()
    loss = trainer.compute_loss(model, next(iter(trainer.get_train_dataloader())))
    loss.backward()
    return float(loss.detach()), {name: values[-1] for name, values in trainer._metrics["train"].items()}, model


@pytest.mark.parametrize(
    ("has_margin", "center", "packed"), [(False, None, False), (True, 0.05, False), (True, 0.05, True)]
)
def test_a_step_is_trls(options, mesh, tmp_path, rm_dir, has_margin, center, packed):  # noqa: F811
    rows = ROWS if has_margin else [{**row, "margin": 0.0} for row in ROWS]
    args = options(rows=rows, center_rewards_coefficient=center, padding_free=packed, global_batch_size=20)
    ours, gradients, _ = first_step(args, mesh)
    if not has_margin:
        rows = [{name: value for name, value in row.items() if name != "margin"} for row in rows]
    loss, metrics, model = their_step(rm_dir, tmp_path / "trl", rows, center_rewards_coefficient=center)
    # Float32 sums in another order.
    assert ours["loss"] == pytest.approx(loss, rel=2e-5)
    for name in ("accuracy", "margin", "min_reward", "mean_reward", "max_reward"):
        assert ours[name] == pytest.approx(metrics[name], rel=2e-5, abs=2e-5), name
    for name, parameter in model.named_parameters():
        largest = float(parameter.grad.abs().max())
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=0, atol=2e-5 * largest, msg=name)
