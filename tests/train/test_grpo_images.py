"""Run `megatron grpo` on rows with images with the transformers engine, against transformers' models."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from swiftlite.args.commands import GkdArgs, GrpoArgs
from swiftlite.base.errors import UserError
from swiftlite.data.image_inputs import PATCHES
from swiftlite.data.rows.conversation import RowError
from swiftlite.data.sample import IGNORED, Sample
from swiftlite.data.template import load_tokenizer
from swiftlite.families.index import image_sizes
from swiftlite.families.resolved import resolve
from swiftlite.rollouts.generation import Generation
from swiftlite.rollouts.training import make_prompt_encoder
from tests.data.images import noise
from tests.images import SampleRow, VisionReference, make_vision_hf_with_tokenizer
from tests.messages import mentions, naming
from tests.tiers import some_of
from tests.tiny import make_tiny_hf
from tests.train.completions import NUM_GENERATIONS, USUAL, first_step, metrics, store, train
from tests.train.prepared import prepare
from tests.train.test_dpo_images import check_gradients

FAMILY = "qwen3_5"
TRAINED: dict[str, Any] = {"freeze_vit": False, "freeze_aligner": False}
NUM_ROWS = 6
TOLERANCE = 1e-4
"""Float32 products in another order, through a tower and the sums of linear attention."""
REWARDS = """
def even(prompts, completion_ids, **columns):
    assert "images" not in columns
    assert any(isinstance(turns[0]["content"], list) for turns in prompts)
    return [sum(token % 2 == 0 for token in ids) / len(ids) for ids in completion_ids]
"""


def write_rows(path: Path) -> Path:
    """Write prompts with 0, 1 and 2 images, and the images."""
    for number in range(3):
        noise(8 + 8 * number, 24, seed=number).save(path.parent / f"{number}.png")
    rows = []
    for number in range(NUM_ROWS):
        images = [f"{each % 3}.png" for each in range(number % 3)]
        rows.append({"query": f"What is {number}? {'<image>' * len(images)}", "images": images, "answer": number})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def models(shared) -> tuple[Path, Path]:
    """Return a model with a head, and a reference model."""

    def make(directory: Path, seed: int) -> None:
        torch.manual_seed(seed)  # of the tower
        make_vision_hf_with_tokenizer(directory, FAMILY, depth=1, seed=seed)

    model, reference = (shared(f"grpo-images-{seed}", partial(make, seed=seed)) for seed in range(2))
    return model, reference


@pytest.fixture
def options(models, tmp_path) -> Callable[..., GrpoArgs]:
    """Return a function that returns the options of a run, some of them replaced."""
    (tmp_path / "rewards.py").write_text(REWARDS)
    usual: dict[str, Any] = USUAL | {
        "model": str(models[0]),
        "dataset": [str(write_rows(tmp_path / "rows.jsonl"))],
        "output_dir": str(tmp_path / "run"),
        "num_generations": NUM_GENERATIONS,
        "reward_funcs": ["even"],
        "external_plugins": [str(tmp_path / "rewards.py")],
        "max_completion_length": 8,
    }
    return lambda **changed: GrpoArgs(**usual | changed)


class Scorer:
    """A model of transformers that scores completions."""

    def __init__(self, hf_dir: Path):
        self.hf_dir = hf_dir
        self.reference = VisionReference(hf_dir, FAMILY, 1)

    def logits(self, sample: Sample) -> list[torch.Tensor]:
        """Return the logits of trunk and head."""
        return self.reference(SampleRow(self.hf_dir, sample))

    def log_p(self, sample: Sample) -> torch.Tensor:
        """Return the log-probabilities of the tokens of a completion."""
        log_p = self.logits(sample)[0][:-1].log_softmax(-1)
        labels = torch.from_numpy(sample.labels[1:]).long()
        is_label = labels != IGNORED
        return log_p[is_label].gather(1, labels[is_label][:, None])[:, 0]

    def head_kl(self, sample: Sample) -> torch.Tensor:
        """Return the divergence of the head from the trunk for each token of a completion."""
        trunk, head = self.logits(sample)
        is_label = torch.from_numpy(sample.labels[2:] != IGNORED)
        p, q = trunk[1:-1].detach().log_softmax(-1), head[: len(is_label)].log_softmax(-1)
        return (p.exp() * (p - q)).sum(-1)[is_label]


def samples_of(args: GrpoArgs, mesh: Any, generation: Generation) -> list[Sample]:
    """Return the completions of the first generation with the images of their prompts."""
    prompts = {}
    for sample in prepare(args, mesh).data.train:
        digests = tuple(image.sha256 for image in sample.extras[PATCHES].images) if PATCHES in sample.extras else ()
        prompts[tuple(sample.input_ids.tolist()), digests] = sample
    found = []
    ends = np.cumsum(generation.prompt_lengths)
    for end, length, images in zip(ends, generation.prompt_lengths, generation.images, strict=True):
        ids = generation.prompt_ids[end - length : end].tolist()
        found.append(prompts[tuple(ids), tuple(digest for _, digest in images)])
    return generation.samples(found)


def test_log_probabilities_are_those_of_transformers(options, models, mesh):
    """Those of the engine, and those of the policy and of the reference model, which the trainer computes."""
    args = options(steps_per_generation=2, beta=0.1, ref_model=str(models[1]))
    run = train(args, mesh)
    stored = Generation.load(run / "rollouts" / "000000.safetensors")
    assert {len(images) for images in stored.images} == {0, 1, 2}
    assert metrics(run)[0]["rollout/importance_weight"] == pytest.approx(1, abs=1e-4)
    sizes = image_sizes(resolve(models[0]).config)
    assert sizes is not None
    policy, reference = map(Scorer, models)
    ends, num_seen = np.cumsum(stored.completion_lengths), 0
    for sample, end, length in zip(samples_of(args, mesh, stored), ends, stored.completion_lengths, strict=True):
        place = slice(end - length, end)
        if sizes.image_token_id in stored.completion_ids[place]:  # transformers requires an image for it
            continue
        num_seen += PATCHES in sample.extras
        with torch.no_grad():
            expected, of_reference = policy.log_p(sample).numpy(), reference.log_p(sample).numpy()
        np.testing.assert_allclose(stored.old_log_p[place], expected, rtol=0, atol=TOLERANCE)
        np.testing.assert_allclose(stored.engine_log_p[place], expected, rtol=0, atol=TOLERANCE)
        np.testing.assert_allclose(stored.reference_log_p[place], of_reference, rtol=0, atol=TOLERANCE)
    assert num_seen > 6
    line = json.loads((run / "rollouts" / "000000.jsonl").read_text().splitlines()[0])
    assert line["prompt"].count("<|image_pad|>") == len(line["images"]) == len(stored.images[0])


@pytest.mark.parametrize("changed", some_of([{}, {"padding_free": True}], {"padding_free": True}))
def test_gradients_are_those_of_transformers(options, models, mesh, tmp_path, changed):
    """Prompts of a micro-batch share the outputs of the tower. The head has no gradient with respect to the trunk."""
    args = options(rollouts_from=str(tmp_path / "rollouts"), reward_funcs=[], micro_batch_size=6, **TRAINED, **changed)
    stored = store(args, mesh, tmp_path / "rollouts")
    ours, gradients = first_step(args, mesh)
    policy = Scorer(models[0])
    old = torch.from_numpy(stored.old_log_p).split(stored.completion_lengths.tolist())
    engine = torch.from_numpy(stored.engine_log_p).split(stored.completion_lengths.tolist())
    losses, head_kl = [], []
    for number, sample in enumerate(samples_of(args, mesh, stored)):
        ratio = (policy.log_p(sample) - old[number]).exp()
        clipped = ratio.clip(1 - args.epsilon, 1 + args.epsilon)
        advantage = float(stored.advantages[number])
        weight = (old[number] - engine[number]).exp().clip(max=args.rollout_importance_sampling_threshold)
        losses.append(-torch.minimum(ratio * advantage, clipped * advantage) * weight)
        head_kl.append(policy.head_kl(sample))
    loss, of_head = torch.cat(losses).mean(), torch.cat(head_kl).mean()
    assert ours["loss"] == pytest.approx(float(loss.detach()), rel=2e-5, abs=1e-6)
    assert ours["mtp_1_loss"] == pytest.approx(float(of_head.detach()), rel=2e-5)
    heads = [parameter for head in policy.reference.reference.heads for parameter in head.parameters()]
    of_heads = torch.autograd.grad(args.mtp_loss_scaling_factor * of_head, heads, retain_graph=True)
    loss.backward()
    for parameter, gradient in zip(heads, of_heads, strict=True):
        parameter.grad = gradient
    check_gradients(models[0], gradients, policy.reference.gradients())


def test_completions_of_other_images_are_refused(options, mesh, tmp_path):
    args = options(rollouts_from=str(tmp_path / "rollouts"), reward_funcs=[])
    store(args, mesh, tmp_path / "rollouts")
    noise(8, 24, seed=9).save(tmp_path / "0.png")  # as many tokens as before
    with pytest.raises(UserError, match=naming("000000.safetensors rows.jsonl images")):
        first_step(args, mesh)


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"infer_backend": "sglang"}, "images --infer_backend sglang"),
        ({"rollout_server": ["http://127.0.0.1:1"]}, "images --rollout_server"),
    ],
)
def test_engines_without_images_are_named(options, models, changed, named):
    encoder = make_prompt_encoder(options(**changed), load_tokenizer(models[0]), resolve(models[0]))
    with pytest.raises(RowError) as raised:
        encoder.parse({"query": "What is <image>?", "images": ["0.png"]}, system=None, source="rows.jsonl:1")
    assert mentions(str(raised.value), named)


def test_a_reference_with_another_tower_is_named(options, mesh, tmp_path):
    args = options(beta=0.1, ref_model=str(make_tiny_hf(tmp_path / "text", "qwen3", depth=0, with_tokenizer=True)))
    with pytest.raises(UserError, match=naming("--ref_model text images")):
        train(args, mesh)


def test_images_are_not_supported_by_gkd(models, mesh, tmp_path):
    changed: dict[str, Any] = USUAL | {"dataset": [str(write_rows(tmp_path / "rows.jsonl"))]}
    changed |= {"model": str(models[0]), "teacher_model": str(models[1]), "output_dir": str(tmp_path / "run")}
    with pytest.raises(UserError, match=naming("images")):
        prepare(GkdArgs(**changed, lmbda=1.0), mesh)
