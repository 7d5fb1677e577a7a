"""Test `megatron rm` with several layouts against one process."""

from typing import Any

import pytest

from swiftlite.args.commands import RmArgs
from tests.parallel.parity import OPTIONS, SIZES
from tests.parallel.runs import CP2, EP2, PP2, TP2, check_layouts
from tests.tiers import some_of
from tests.train.reward_models import make_reward_model, write_rows

pytestmark = pytest.mark.gloo

LORA: dict[str, Any] = {"tuner_type": "lora", "lora_rank": 4, "lr": 1e-2}
CENTERED = {"center_rewards_coefficient": 0.05}
# By what is trained (a family and options): the layouts that are to have the numbers of one process.
TRAINED: dict[str, tuple[str, dict[str, Any]]] = {
    "full": ("qwen3", CENTERED),
    "lora": ("qwen3", LORA),
    "experts": ("qwen3_moe", CENTERED),
}
LAYOUTS: dict[tuple[str, str], dict[str, Any]] = {
    ("full", "TP2"): TP2,
    ("full", "TP2+SP"): TP2 | {"sequence_parallel": True},
    ("full", "PP2, packed"): PP2 | {"padding_free": True},
    ("full", "CP2"): CP2,
    ("full", "CP2, packed"): CP2 | {"padding_free": True},
    ("full", "DP2, micro-batches of 1"): {"micro_batch_size": 1, "use_distributed_optimizer": True},
    ("lora", "TP2+SP, packed"): TP2 | {"sequence_parallel": True, "padding_free": True},
    ("lora", "PP2"): PP2,
    ("experts", "EP2"): EP2,
}


# CI runs parts of sequences that cut packed pairs apart, and stages. All others are in the slow tier.
CHOSEN = {name: LAYOUTS[name] for name in (("full", "CP2, packed"), ("lora", "PP2"))}


@pytest.mark.parametrize("layouts", some_of([CHOSEN, LAYOUTS], CHOSEN), ids=["chosen", "all"])
def test_a_layout_changes_no_number(tmp_path, layouts):
    alone = {}
    usual: dict[str, Any] = OPTIONS | {"global_batch_size": 4, "micro_batch_size": 2, "train_iters": 2}
    del usual["mtp_loss_scaling_factor"]
    for what in dict.fromkeys(what for what, _ in layouts):
        family, options = TRAINED[what]
        model = make_reward_model(tmp_path / f"model-{what}", family, **SIZES)
        alone[what] = RmArgs(
            model=str(model),
            dataset=[str(write_rows(tmp_path / "pairs.jsonl"))],
            split_dataset_ratio=0.25,
            output_dir=str(tmp_path / what),
            acceptance_samples=0,
            report_to=[],
            **(usual | options),
        )
    expected = check_layouts(alone, layouts, {"rel": 2e-4, "abs": 2e-5})  # float32 sums in another order, scores near 1
    assert all(len(lines) == 3 for lines in expected.values())
