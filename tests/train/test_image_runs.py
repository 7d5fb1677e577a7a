"""Train models on rows with images, from the options to the export."""

import json
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from safetensors.torch import load_file

from swiftlite.args.commands import ExportArgs, SftArgs
from swiftlite.base.errors import UserError
from swiftlite.data.image_inputs import PATCHES
from swiftlite.data.images import ImageRef
from swiftlite.data.sample import Sample
from swiftlite.export.run import convert
from swiftlite.report.run_page import write_run_page
from swiftlite.train import phases
from swiftlite.train import run as training
from tests.data.images import noise
from tests.images import make_vision_hf_with_tokenizer
from tests.messages import naming
from tests.train.prepared import prepare
from tests.train.test_sft import metrics, train

NUM_ROWS = 12


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return make_vision_hf_with_tokenizer(tmp_path_factory.mktemp("model"), "qwen3_5", depth=1)


@pytest.fixture
def seeing(model, options, tmp_path) -> Callable[..., SftArgs]:
    """Return options of a run on rows with 0, 1 and 2 images."""
    for number in range(3):
        noise(8 + 12 * number, 20, seed=number).save(tmp_path / f"{number}.png")
    rows = []
    for number in range(NUM_ROWS):
        images = [f"{each % 3}.png" for each in range(number % 3)]
        rows.append({"query": f"What is {number}? {'<image>' * len(images)}", "response": f"It is {number}."})
        rows[-1]["images"] = images
    path = tmp_path / "images.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return lambda **changed: options(**{"model": str(model), "dataset": [str(path)], **changed})


def weights(directory: Path) -> dict[str, Any]:
    tensors = {}
    for file in sorted(directory.glob("*.safetensors")):
        tensors |= load_file(file)
    return tensors


def export(run: Path, mesh) -> dict[str, Any]:
    directory = run.with_name(f"{run.name}-hf")
    convert(ExportArgs(model=str(run), output_dir=str(directory), to_hf=True), mesh)
    return weights(directory)


def changed_parts(before: dict[str, Any], after: dict[str, Any]) -> set[str]:
    """Return the parts of the model with a changed tensor; the names of all tensors must be equal."""
    assert before.keys() == after.keys()
    changed = [name for name in before if not before[name].equal(after[name])]
    parts = set()
    for name in changed:
        if name.startswith("model.visual.merger."):
            parts.add("aligner")
        elif name.startswith("model.visual."):
            parts.add("tower")
        elif name.startswith("mtp."):
            parts.add("heads")
        else:
            parts.add("trunk")
    return parts


@pytest.mark.parametrize(
    ("more", "trained"),
    [
        pytest.param({"tuner_type": "lora", "lora_rank": 4}, {"trunk", "heads"}, marks=pytest.mark.slow),
        ({"freeze_vit": False, "vit_lr": 1e-3}, {"trunk", "heads", "tower"}),
        ({"freeze_llm": True, "freeze_aligner": False}, {"aligner", "heads"}),
        pytest.param({"mtp_mode": "heads_only"}, {"heads"}, marks=pytest.mark.slow),
        ({"padding_free": True, "freeze_vit": False, "freeze_aligner": False}, {"trunk", "heads", "tower", "aligner"}),
    ],
    ids=["lora", "tower", "aligner", "heads", "packed"],
)
def test_the_parts_that_the_options_name_are_trained(model, seeing, mesh, more, trained):
    run = train(seeing(train_iters=1, **more), mesh)
    assert changed_parts(weights(model), export(run, mesh)) == trained


def test_stored_states_of_the_trunk_know_images(seeing, mesh, tmp_path):
    """Rows with equal tokens and other images are other rows."""
    options = {"mtp_mode": "heads_only", "micro_batch_size": 1, "num_train_epochs": 2, "train_iters": None}
    expected = metrics(train(seeing(**options, output_dir=str(tmp_path / "usual")), mesh))
    stored = seeing(**options, cache_trunk_states=str(tmp_path / "cache"))
    assert metrics(train(stored, mesh)) == expected
    noise(8, 20, seed=9).save(tmp_path / "0.png")
    with pytest.raises(UserError, match=naming("--cache_trunk_states rows")):
        train(seeing(**options, cache_trunk_states=str(tmp_path / "cache"), output_dir=str(tmp_path / "other")), mesh)


@pytest.fixture
def decoded(monkeypatch) -> list[str]:
    """Return a list that receives the sha256 of each image when it is decoded."""
    hashes: list[str] = []
    load = ImageRef.load

    def record(image: ImageRef) -> Image.Image:
        hashes.append(image.sha256)
        return load(image)

    monkeypatch.setattr(ImageRef, "load", record)
    return hashes


def images_of(samples: Iterable[Sample]) -> list[str]:
    """Return the sha256 of all images of samples, sorted."""
    hashes = []
    for sample in samples:
        if PATCHES in sample.extras:
            hashes += [image.sha256 for image in sample.extras[PATCHES].images]
    assert hashes
    return sorted(hashes)


ONE_STEP = {"split_dataset_ratio": 0.25, "global_batch_size": 9, "micro_batch_size": 3}
"""All nine rows for training are in one step."""


def test_each_image_is_decoded_once_per_step_and_evaluation(seeing, mesh, decoded):
    run = prepare(seeing(**ONE_STEP), mesh)
    assert len(run.data.train) == 9
    trainer = training.make_trainer(run, phases.restore(run))
    decoded.clear()
    trainer.step(1)
    assert sorted(decoded) == images_of(run.data.train)
    decoded.clear()
    trainer.evaluate(0)
    assert sorted(decoded) == images_of(run.data.val)


@pytest.mark.slow
def test_stored_states_of_the_trunk_replace_images(seeing, mesh, decoded, tmp_path):
    cached = {"mtp_mode": "heads_only", "cache_trunk_states": str(tmp_path / "cache"), "micro_batch_size": 1}
    run = prepare(seeing(**ONE_STEP | cached), mesh)
    trainer = training.make_trainer(run, phases.restore(run))
    decoded.clear()
    trainer.step(1)
    assert sorted(decoded) == images_of(run.data.train)
    decoded.clear()
    trainer.step(2)
    assert decoded == []


def test_acceptance_has_prompts_with_images_as_a_channel(seeing, mesh, tmp_path):
    run = train(seeing(train_iters=1, acceptance_samples=3, acceptance_max_new_tokens=4, split_dataset_ratio=0.3), mesh)
    acceptance = json.loads((run / "acceptance.json").read_text())
    assert "images" in acceptance["after"]["generated_by_channel"]
    answers = json.loads((run / "drafts.json").read_text())["after"]
    assert [len(answer.get("images", [])) for answer in answers] == [
        answer["prompt"].count("<image>") for answer in answers
    ]
    assert "data:image/jpeg" in write_run_page(run).read_text()


def test_a_resumed_run_names_the_image_that_has_changed(seeing, mesh, tmp_path):
    args = seeing(train_iters=2)
    train(args, mesh)
    path = tmp_path / "1.png"
    before = path.read_bytes()
    noise(20, 20, seed=7).save(path)
    resumed = replace(args, train_iters=4, resume=True)
    with pytest.raises(UserError, match=naming(f"--resume checkpoint-2 {path}")) as raised:
        prepare(resumed, mesh)
    assert str(tmp_path / "0.png") not in str(raised.value)
    path.write_bytes(before)
    prepare(resumed, mesh)
