"""Test losses, metrics and gradients against TRL's RewardTrainer, if TRL is installed (requirements/dev.txt)."""

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from swiftlite.data.template import load_tokenizer
from tests.train.pairs import check_gradients, first_step, trls_step
from tests.train.reward_models import ROWS
from tests.train.test_rm import options, rm_dir  # noqa: F401, fixtures

pytest.importorskip("trl")


@pytest.mark.parametrize(
    ("has_margin", "center", "packed"), [(False, None, False), (True, 0.05, False), (True, 0.05, True)]
)
def test_a_step_is_trls(options, mesh, tmp_path, rm_dir, has_margin, center, packed):  # noqa: F811
    rows = ROWS if has_margin else [{**row, "margin": 0.0} for row in ROWS]
    args = options(rows=rows, center_rewards_coefficient=center, padding_free=packed, global_batch_size=20)
    ours, gradients, _ = first_step(args, mesh)
    if not has_margin:
        rows = [{name: value for name, value in row.items() if name != "margin"} for row in rows]
    models = {"model": AutoModelForSequenceClassification.from_pretrained(rm_dir, dtype=torch.float32)}
    loss, metrics, model = trls_step(
        "Reward", tmp_path / "trl", rows, models, load_tokenizer(rm_dir), center_rewards_coefficient=center
    )
    # Float32 sums in another order.
    assert ours["loss"] == pytest.approx(loss, rel=2e-5)
    for name in ("accuracy", "margin", "min_reward", "mean_reward", "max_reward"):
        assert ours[name] == pytest.approx(metrics[name], rel=2e-5, abs=2e-5), name
    check_gradients(gradients, model, 2e-5)
