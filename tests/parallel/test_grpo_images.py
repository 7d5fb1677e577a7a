"""Test `megatron grpo` on rows with images with several layouts on stored completions against one process."""

from pathlib import Path
from typing import Any

import pytest
import torch

from swiftlite.args.commands import GrpoArgs
from tests.images import make_vision_hf_with_tokenizer
from tests.parallel.parity import HYBRID_OPTIONS, SIZES, TP2_SP
from tests.parallel.runs import CP2, PP2, check_layouts, start
from tests.parallel.test_grpo import TOLERANCE, store_all
from tests.train.completions import NUM_GENERATIONS, USUAL
from tests.train.test_grpo_images import TRAINED, write_rows

pytestmark = [pytest.mark.gloo, pytest.mark.slow]

LAYOUTS: dict[tuple[str, str], dict[str, Any]] = {
    ("alone", "DP2"): {},
    ("alone", "TP2+SP"): TP2_SP,
    ("alone", "PP2"): PP2,
    ("alone", "CP2"): CP2 | {"padding_free": True},
}


def make_options(place: Path) -> GrpoArgs:
    """Return the options of 2 steps with a reference model and a teacher, which have other weights."""
    models = [place / name for name in ("model", "reference", "teacher")]
    for seed, directory in enumerate(models):
        torch.manual_seed(seed)  # of the tower
        make_vision_hf_with_tokenizer(directory, "qwen3_5", depth=1, seed=seed, **SIZES)
    usual: dict[str, Any] = USUAL | HYBRID_OPTIONS | TRAINED
    return GrpoArgs(
        **usual
        | {
            "model": str(models[0]),
            "ref_model": str(models[1]),
            "teacher_model": str(models[2]),
            "teacher_kl_coef": 0.5,
            "beta": 0.1,
            "dataset": [str(write_rows(place / "rows.jsonl"))],
            "output_dir": str(place / "alone"),
            "rollouts_from": str(place / "rollouts"),
            "num_generations": NUM_GENERATIONS,
            "train_iters": 2,
        }
    )


def test_a_layout_changes_no_number(tmp_path):
    alone = make_options(tmp_path)
    start(1, store_all, [alone])
    (expected,) = check_layouts({"alone": alone}, LAYOUTS, TOLERANCE).values()
    assert all(line["kl"] > 0 and line["teacher_kl"] and line["mtp_1_loss"] > 0 for line in expected)
