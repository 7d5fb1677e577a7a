"""Run `megatron sft` on rows with images: what it learns, what it leaves unchanged, and its export."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch.nn.functional import cross_entropy
from transformers import AutoTokenizer

from swiftlite import rules
from swiftlite.acceptance.report import ACCEPTANCE_FILE, read_acceptance
from swiftlite.args.commands import ExportArgs, SftArgs
from swiftlite.base.heads import Heads
from swiftlite.data.sample import Sample
from swiftlite.export import run as export
from swiftlite.families.resolved import resolve
from swiftlite.families.tower import TrainedParts
from swiftlite.plan.cost.flops import training_flops
from swiftlite.train.methods.conversations import load_data
from swiftlite.train.methods.sft import SFT
from tests.data.images import make_image_model, writer
from tests.images import SampleRow, VisionReference
from tests.messages import naming
from tests.parallel.launch import launch
from tests.parallel.runs import train
from tests.tiers import some_of
from tests.train.cached_states import records

pytestmark = pytest.mark.gloo

FAMILIES = ["qwen3_5", "qwen2_5_vl", "qwen3_vl"]
SIZES = {"a.png": (24, 16), "b.png": (8, 16), "c.png": (16, 16)}
ROWS = [
    {"query": "What is <image>?", "response": "A fox.", "images": ["a.png"]},
    {"query": "What does it do?", "response": "It jumps."},
    {"query": "Compare <image> and <image>.", "response": "A dog and a fox.", "images": ["b.png", "c.png"]},
    {"query": "What is <image>?", "response": "A lazy dog.", "images": ["c.png"]},
]


@pytest.fixture
def family(request) -> str:
    return request.param


@pytest.fixture
def model(shared, family) -> Path:
    return shared(f"vision-run-{family}", lambda directory: make_image_model(directory, family))


@pytest.fixture
def rows(tmp_path) -> Path:
    for name, size in SIZES.items():
        writer(tmp_path)(name, *size)
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return path


def args_of(model: Path, rows: Path, output_dir: Path, **options: Any) -> SftArgs:
    return SftArgs(
        model=str(model),
        dataset=[str(rows)],
        output_dir=str(output_dir),
        torch_dtype="float32",
        split_dataset_ratio=0.0,
        report_to=[],
        lr=1e-3,
        **{"global_batch_size": 4, "train_iters": 3, "save_steps": 3, "acceptance_samples": 0, **options},
    )


def run(args: SftArgs, world_size: int = 1) -> None:
    rules.check(args, world_size)
    train(args)


def losses(run_dir: Path) -> list[tuple[float, float]]:
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [(line["loss"], line["mtp_1_loss"]) for line in lines if "loss" in line]


def samples_of(model: Path, args: SftArgs) -> Sequence[Sample]:
    hf_model = resolve(model)
    encoder = SFT.make_encoder(args, AutoTokenizer.from_pretrained(model), hf_model)
    return load_data(args, encoder, hf_model.config["vocab_size"]).train


@torch.no_grad()
def expected_losses(model: Path, family: str, args: SftArgs) -> tuple[float, float]:
    """Return transformers' mean losses of trunk and head over the labels of all rows."""
    reference = VisionReference(model, family, 1)
    sums, counts = np.zeros(2), np.zeros(2)
    for sample in samples_of(model, args):
        row = SampleRow(model, sample)
        for depth, logits_SV in enumerate(reference(row)):
            labels = row.labels_S[1 + depth :]
            sums[depth] += cross_entropy(logits_SV[: len(labels)], labels, ignore_index=-100, reduction="sum").item()
            counts[depth] += (labels != -100).sum().item()
    trunk, head = sums / counts
    return trunk, head


def expected_flops(model: Path, args: SftArgs) -> float:
    """Return the operations of a step with all rows, in which the tower is trained."""
    hf_model = resolve(model).with_images()
    samples = samples_of(model, args)
    tower = hf_model.tower
    flops = training_flops(hf_model.config, Heads(1), tower=tower, trained_parts=TrainedParts(True, True))
    images = []
    for row in ROWS:
        for name in row.get("images", ()):
            width, height = SIZES[name]
            images.append((width // 8) * (height // 8))
    squares = sum(len(sample) ** 2 for sample in samples)
    trained = sum(sample.num_trained_tokens for sample in samples)
    targets = [trained, trained]  # questions have two tokens or more, so that heads predict whole answers
    num_items, item_squares = sum(images), sum(number**2 for number in images)
    return flops.step(sum(map(len, samples)), squares, targets, num_items, item_squares)


def export_hf(run_dir: Path, hf_dir: Path) -> dict[str, torch.Tensor]:
    launch(1, export.run, ExportArgs(to_hf=True, model=str(run_dir), output_dir=str(hf_dir)))
    return load_file(hf_dir / "model.safetensors")


PADDED = {"micro_batch_size": 2}
PACKED = {"packing": True, "packing_length": 256, "max_length": 256, "global_batch_size": 1}
"""Options of a run with one row of all samples."""


@pytest.mark.parametrize(
    ("family", "layout"),
    some_of([("qwen3_5", PACKED), ("qwen2_5_vl", PADDED), ("qwen3_vl", PACKED)], ("qwen2_5_vl", PADDED)),
    indirect=["family"],
)
def test_it_learns_what_transformers_would(model, family, rows, tmp_path, layout):
    options = {"freeze_vit": False, "freeze_aligner": False, **layout}
    args = args_of(model, rows, tmp_path / "run", **options)
    launch(1, run, args)
    first, *_, last = losses(tmp_path / "run")
    assert first == pytest.approx(expected_losses(model, family, args), rel=2e-5)
    assert last[0] < first[0]
    *_, metrics = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    num_tokens = sum(map(len, samples_of(model, args)))
    measured = 1e12 * metrics["tflops_per_second"] / metrics["tokens_per_second"] * num_tokens
    assert measured == pytest.approx(expected_flops(model, args), rel=1e-4)
    before, after = load_file(model / "model.safetensors"), export_hf(tmp_path / "run", tmp_path / "hf")
    assert before.keys() == after.keys()
    assert [name for name in before if torch.equal(before[name], after[name])] == []
    assert (tmp_path / "hf" / "preprocessor_config.json").exists()


@pytest.mark.parametrize("family", some_of(FAMILIES, "qwen3_vl"), indirect=True)
def test_cached_states_give_the_same_losses(model, rows, tmp_path):
    options: dict[str, Any] = {"mtp_mode": "heads_only", "micro_batch_size": 1}
    launch(1, run, args_of(model, rows, tmp_path / "plain", **options))
    options |= {"cache_trunk_states": str(tmp_path / "states")}
    launch(1, run, args_of(model, rows, tmp_path / "cached", **options))
    assert losses(tmp_path / "cached") == losses(tmp_path / "plain")


@pytest.mark.parametrize("family", some_of(FAMILIES, "qwen3_vl"), indirect=True)
def test_pipeline_stages_give_the_same_losses(model, rows, tmp_path):
    """Only the first stage decodes images."""
    options: dict[str, Any] = {"val_dataset": [str(rows)], "acceptance_max_new_tokens": 4}
    options |= {"freeze_vit": False, "micro_batch_size": 2}
    launch(1, run, args_of(model, rows, tmp_path / "one", acceptance_samples=2, **options))
    options["pipeline_model_parallel_size"] = 2
    launch(2, run, args_of(model, rows, tmp_path / "two", acceptance_samples=2, **options), 2)
    # Float32 sums in another order; Adam's first steps amplify them.
    expected = np.array(losses(tmp_path / "one"))
    assert np.array(losses(tmp_path / "two")) == pytest.approx(expected, rel=1e-4)
    measured = [read_acceptance(tmp_path / name / ACCEPTANCE_FILE)["before"]["generated"] for name in ("one", "two")]
    assert measured[0] == measured[1]


@pytest.mark.parametrize("family", some_of(FAMILIES[:2], "qwen3_5"), indirect=True)
def test_streamed_states_are_those_of_the_whole_trunk(model, rows, tmp_path):
    """Cached states are bitwise identical."""
    options: dict[str, Any] = {"mtp_mode": "heads_only", "micro_batch_size": 1}
    cached, streamed = tmp_path / "cached", tmp_path / "streamed"
    launch(1, run, args_of(model, rows, tmp_path / "whole", cache_trunk_states=str(cached), **options))
    args = args_of(
        model, rows, tmp_path / "parts", cache_trunk_states=str(streamed), stream_trunk=True, mtp_loss="kl", **options
    )
    launch(1, run, args)
    states = records(cached)
    assert len(states) == len(ROWS)
    assert states == records(streamed)


@pytest.mark.parametrize("family", ["qwen3_vl"], indirect=True)
def test_decoder_layers_that_add_images_cannot_be_streamed(model, rows, tmp_path):
    streamed: dict[str, Any] = {"cache_trunk_states": str(tmp_path / "states"), "stream_trunk": True}
    args = args_of(model, rows, tmp_path / "run", mtp_mode="heads_only", micro_batch_size=1, **streamed)
    with pytest.raises(Exception, match=naming("--stream_trunk qwen3_vl")):
        launch(1, run, args)
    assert not (tmp_path / "run" / "args.json").exists()


STREAMED: dict[str, Any] = {"streaming": True, "packing": True, "packing_length": 256, "max_length": 256}


@pytest.mark.parametrize("family", ["qwen3_5"], indirect=True)
def test_streamed_rows_with_images_are_refused_before_anything_is_written(model, rows, tmp_path):
    args = args_of(model, rows, tmp_path / "run", **STREAMED)
    with pytest.raises(Exception, match=naming(f"{rows}:1 images --streaming")):
        launch(1, run, args)
    assert list((tmp_path / "run").glob("*.json")) == []
    assert not (tmp_path / "run" / "source").exists()


@pytest.mark.parametrize("family", some_of(FAMILIES, "qwen3_vl"), indirect=True)
def test_rows_without_images_do_not_build_the_tower(model, tmp_path):
    path = tmp_path / "text.jsonl"
    path.write_text((json.dumps(ROWS[1]) + "\n") * 2)
    launch(1, run, args_of(model, path, tmp_path / "run", global_batch_size=2))
    before, after = load_file(model / "model.safetensors"), export_hf(tmp_path / "run", tmp_path / "hf")
    assert before.keys() == after.keys()
    same = {name for name in before if torch.equal(before[name], after[name])}
    assert same == {name for name in before if "visual." in name}
