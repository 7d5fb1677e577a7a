"""Run `megatron dpo` on rows with images: losses, rewards and gradients against transformers' models."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

from swiftlite.args.commands import DpoArgs
from swiftlite.base.errors import UserError
from swiftlite.data.batch import ITEM
from swiftlite.data.image_inputs import PATCHES
from swiftlite.data.sample import Sample
from tests.data.images import noise
from tests.images import SampleRow, VisionReference, make_vision_hf_with_tokenizer
from tests.messages import naming
from tests.tiers import some_of
from tests.tiny import per_expert
from tests.train.pairs import LOSSES, first_step
from tests.train.prepared import prepare
from tests.train.test_dpo import formula
from tests.train.test_image_runs import weights

NUM_ROWS = 9
TRAINED: dict[str, Any] = {"freeze_vit": False, "freeze_aligner": False}
RATED: dict[str, Any] = {"loss_type": "kto", "desirable_weight": 0.7, "undesirable_weight": 1.3, "beta": 0.2}


@pytest.fixture
def family(request) -> str:
    return request.param


@pytest.fixture
def models(shared, family) -> tuple[Path, Path]:
    """Return a model with a head, and a reference model."""
    directories = [shared(f"dpo-{family}-{seed}", partial(make_model, family=family, seed=seed)) for seed in range(2)]
    return directories[0], directories[1]


def make_model(directory: Path, family: str, seed: int) -> None:
    torch.manual_seed(seed)  # of the tower
    make_vision_hf_with_tokenizer(directory, family, depth=1, seed=seed)


def asked(number: int) -> dict[str, Any]:
    """Return a row without an answer, with 0, 1 or 2 images."""
    images = [f"{each % 3}.png" for each in range(number % 3)]
    return {"query": f"What is {number}? {'<image>' * len(images)}", "images": images}


def write_rows(path: Path, *, rated: bool = False) -> Path:
    """Write rows and their images. The images of rows with the same number of images are the same."""
    for number in range(3):
        noise(8 + 12 * number, 20, seed=number).save(path.parent / f"{number}.png")
    rows = []
    for number in range(NUM_ROWS):
        good, bad = f"It is {number}{' exactly' * (number % 4)}.", f"No idea{', perhaps' * (number % 2)}?"
        row = asked(number)
        if rated:
            row |= {"response": good if number % 2 else bad, "label": number % 2 > 0}
        else:
            row |= {"response": good, "rejected_response": bad}
        rows.append(row)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def options(models, tmp_path) -> Callable[..., DpoArgs]:
    """Return the options of a run on rows with images, some of them replaced."""
    model, reference = models

    def make(**changed: Any) -> DpoArgs:
        dataset = write_rows(tmp_path / "rows.jsonl", rated=changed.get("loss_type") == "kto")
        usual: dict[str, Any] = {
            "model": str(model),
            "ref_model": str(reference),
            "dataset": [str(dataset)],
            "split_dataset_ratio": 0.0,
            "output_dir": str(tmp_path / "run"),
            "torch_dtype": "float32",
            "micro_batch_size": 3,
            "global_batch_size": NUM_ROWS,
            "train_iters": 4,
            "lr": 1e-3,
            "acceptance_samples": 0,
            "report_to": [],
            "clip_grad": 0.0,
        }
        return DpoArgs(**usual | changed)

    return make


class Scorer:
    """A model of transformers that scores answers.

    Args:
        hf_dir: directory of the model, which has one MTP head.
    """

    def __init__(self, hf_dir: Path, family: str):
        self.hf_dir = hf_dir
        self.reference = VisionReference(hf_dir, family, 1)

    def logits(self, sample: Sample) -> list[torch.Tensor]:
        """Return the logits of trunk and head."""
        return self.reference(SampleRow(self.hf_dir, sample))

    def log_p(self, sample: Sample) -> tuple[torch.Tensor, int]:
        """Return the log-probability of the labels of an answer, and their number."""
        labels = torch.from_numpy(sample.labels).long()[1:]
        loss = cross_entropy(self.logits(sample)[0][:-1], labels, ignore_index=-100, reduction="sum")
        return -loss, int((labels != -100).sum())

    def head_loss(self, sample: Sample) -> tuple[torch.Tensor, int]:
        """Return the summed loss of the head on an answer, and the number of its labels."""
        labels = torch.from_numpy(sample.labels).long()[2:]
        loss = cross_entropy(self.logits(sample)[1][: len(labels)], labels, ignore_index=-100, reduction="sum")
        return loss, int((labels != -100).sum())

    def gradients(self) -> dict[str, torch.Tensor]:
        return self.reference.gradients()


def check_gradients(hf_dir: Path, found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    expected = per_expert(expected)
    assert found.keys() == weights(hf_dir).keys()
    assert found.keys() <= expected.keys()
    for name, gradient in found.items():
        largest = float(expected[name].abs().max())
        torch.testing.assert_close(gradient, expected[name], rtol=0, atol=1e-4 * largest + 1e-9, msg=name)


# tests/train/test_dpo.py has the other losses. With orpo, rows are packed and there is no reference model.
@pytest.mark.parametrize(
    ("family", "loss_type"),
    some_of([("qwen3_5", "orpo"), ("qwen2_5_vl", "sigmoid"), ("qwen3_vl", "sigmoid")], ("qwen3_vl", "sigmoid")),
    indirect=["family"],
)
def test_loss_and_gradients_are_those_of_transformers(options, mesh, models, family, loss_type):
    """The head adds its loss on the preferred answers."""
    args = options(loss_type=loss_type, padding_free=loss_type == "orpo", **TRAINED, **LOSSES[loss_type])
    ours, gradients, pairs = first_step(args, mesh)
    assert {len(pair.extras[PATCHES].images) if PATCHES in pair.extras else 0 for pair in pairs} == {0, 1, 2}

    model, reference = (Scorer(hf_dir, family) for hf_dir in models)
    losses, nll, tokens, rewards, log_p = [], torch.zeros(()), 0, [], []
    head_loss, head_tokens = torch.zeros(()), 0
    needs_reference = loss_type != "orpo"
    for pair in pairs:
        (chosen, length), (rejected, other_length) = (model.log_p(answer) for answer in pair.sequences)
        with torch.no_grad():
            ref_chosen, ref_rejected = (reference.log_p(answer)[0] * needs_reference for answer in pair.sequences)
        losses.append(formula(args, chosen, rejected, ref_chosen, ref_rejected, (length, other_length)))
        divisor = 1 if needs_reference else length
        rewards.append(args.beta * float((chosen - ref_chosen).detach() / divisor))
        log_p.append(float(chosen.detach() / divisor))
        nll, tokens = nll - chosen, tokens + length
        own_loss, own_tokens = model.head_loss(pair)
        head_loss, head_tokens = head_loss + own_loss, head_tokens + own_tokens
    loss = torch.stack(losses).mean() + (loss_type == "orpo") * nll / tokens
    (loss + args.mtp_loss_scaling_factor * head_loss / head_tokens).backward()
    # Sums of float32 over log-probabilities of about 100, in another order.
    assert ours["loss"] == pytest.approx(float(loss.detach()), rel=2e-5)
    assert ours["logps/chosen"] == pytest.approx(sum(log_p) / len(log_p), rel=2e-5)
    assert ours["rewards/chosen"] == pytest.approx(sum(rewards) / len(rewards), rel=2e-5, abs=1e-5)
    assert ours["mtp_1_loss"] == pytest.approx(float(head_loss.detach() / head_tokens), rel=2e-5)
    check_gradients(models[0], gradients, model.gradients())


@pytest.mark.parametrize("family", ["qwen3_5_moe"], indirect=True)
def test_kto_is_that_of_transformers(options, mesh, models, family):
    args = options(**RATED, **TRAINED)
    ours, gradients, samples = first_step(args, mesh)
    model, reference = (Scorer(hf_dir, family) for hf_dir in models)
    with torch.no_grad():
        ratios = []
        for sample in samples:
            assert sample.companion is not None
            ratios.append(model.log_p(sample.companion)[0] - reference.log_p(sample.companion)[0])
        kl = torch.stack(ratios).mean().clamp(min=0)
    losses = []
    head_loss, head_tokens = torch.zeros(()), 0
    for sample in samples:
        with torch.no_grad():
            reference_log_p = reference.log_p(sample)[0]
        ratio = model.log_p(sample)[0] - reference_log_p
        if sample.extras["desirable"]:
            losses.append(args.desirable_weight * (1 - (args.beta * (ratio - kl)).sigmoid()))
            own_loss, own_tokens = model.head_loss(sample)
            head_loss, head_tokens = head_loss + own_loss, head_tokens + own_tokens
        else:
            losses.append(args.undesirable_weight * (1 - (args.beta * (kl - ratio)).sigmoid()))
    loss = torch.stack(losses).mean()
    (loss + args.mtp_loss_scaling_factor * head_loss / head_tokens).backward()
    assert ours["kl"] == pytest.approx(float(kl), rel=2e-5, abs=2e-5)
    assert ours["loss"] == pytest.approx(float(loss.detach()), rel=2e-5)
    check_gradients(models[0], gradients, model.gradients())


@pytest.mark.parametrize("family", ["qwen3_5"], indirect=True)
def test_stored_log_probabilities_belong_to_images(options, mesh, tmp_path):
    """Pairs with equal tokens and other images are other pairs."""
    cache = {"ref_logprobs_cache": str(tmp_path / "cache")}

    def scores() -> list[float]:
        run = prepare(options(**cache), mesh)
        return [answer.extras["reference"] for pair in run.data.train for answer in pair.sequences]

    before = scores()
    assert scores() == before
    args = options(**cache)
    noise(8, 20, seed=9).save(tmp_path / "0.png")
    run = prepare(args, mesh)
    after = [answer.extras["reference"] for pair in run.data.train for answer in pair.sequences]
    is_same = [one == other for one, other in zip(before, after, strict=True)]
    assert is_same[::2] == is_same[1::2] == [number % 3 == 0 for number in range(NUM_ROWS)]


@pytest.mark.parametrize("family", ["qwen3_5"], indirect=True)
def test_both_answers_share_the_outputs_of_the_tower(options, mesh):
    run = prepare(options(), mesh)
    pair = next(pair for pair in run.data.train if PATCHES in pair.extras)
    both = run.batches.collate([pair])
    chosen, rejected = both.extras[ITEM][0]
    assert chosen[chosen >= 0].equal(rejected[rejected >= 0])
    alone = run.batches.collate([pair.others[0]])
    assert alone.items[PATCHES].equal(both.items[PATCHES])


@pytest.mark.parametrize("family", ["qwen3_5"], indirect=True)
def test_a_reference_that_divides_images_otherwise_is_refused(options, mesh, models, tmp_path):
    reference = tmp_path / "reference"
    reference.mkdir()
    for path in models[1].iterdir():
        (reference / path.name).write_bytes(path.read_bytes())
    config = json.loads((reference / "config.json").read_text())
    config["image_token_id"] -= 1
    (reference / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=naming(f"--ref_model {reference} --model")):
        prepare(options(ref_model=str(reference)), mesh)
