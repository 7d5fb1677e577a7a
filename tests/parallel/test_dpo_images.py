"""Test `megatron dpo` on rows with images with several layouts against one process."""

from pathlib import Path
from typing import Any

import pytest

from swiftlite.args.commands import DpoArgs
from tests.images import make_vision_hf_with_tokenizer
from tests.parallel.parity import HYBRID_OPTIONS, OPTIONS, SIZES, TP2_SP
from tests.parallel.runs import CP2, PP2, check_layouts
from tests.parallel.test_dpo import FLOAT32, REF_PP2, REF_TP2
from tests.train.test_dpo_images import NUM_ROWS, RATED, TRAINED, write_rows

pytestmark = pytest.mark.gloo

LOSSES: dict[str, dict[str, Any]] = {"sigmoid": {}, "kto": RATED}
LAYOUTS: dict[tuple[str, str], dict[str, Any]] = {
    ("sigmoid", "DP2"): {},
    ("sigmoid", "TP2+SP, reference PP2"): TP2_SP | REF_PP2,
    ("sigmoid", "PP2"): PP2,
    ("sigmoid", "CP2"): CP2 | {"padding_free": True},
    ("kto", "DP2, reference TP2"): REF_TP2,
    ("kto", "PP2, reference TP2"): PP2 | REF_TP2 | {"micro_batch_size": 1},
}


def make_options(place: Path, loss: str) -> DpoArgs:
    """Return options for 3 steps of a tiny model on rows with 0, 1 and 2 images. Its reference is another model."""
    models = [place / name for name in ("model", "reference")]
    for seed, hf_dir in enumerate(models):
        if not hf_dir.exists():
            make_vision_hf_with_tokenizer(hf_dir, "qwen3_5", depth=1, seed=seed, **SIZES)
    rows = write_rows(place / f"{loss}.jsonl", rated=loss == "kto")
    usual: dict[str, Any] = OPTIONS | HYBRID_OPTIONS | {"global_batch_size": 4, "micro_batch_size": 2, "train_iters": 3}
    return DpoArgs(
        model=str(models[0]),
        ref_model=str(models[1]),
        dataset=[str(rows)],
        split_dataset_ratio=0.3,
        output_dir=str(place / loss),
        acceptance_samples=0,
        report_to=[],
        **usual | TRAINED | LOSSES[loss],
    )


@pytest.mark.slow  # layouts with images, and layouts of DPO, run in CI in tests of their own
def test_a_layout_changes_no_number(tmp_path):
    alone = {loss: make_options(tmp_path, loss) for loss in LOSSES}
    assert alone["sigmoid"].global_batch_size < NUM_ROWS
    expected = check_layouts(alone, LAYOUTS, FLOAT32)
    assert all(len(lines) == 4 for lines in expected.values())
