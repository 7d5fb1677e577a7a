"""Test vLLM on prompts with images: its answers and draft counts equal those of an independent reference, and those of
the transformers engine.

vLLM's processors of images require torchvision (`tests/torchvision_here.py`).
"""

import importlib.util
import json
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText, AutoTokenizer

from swiftlite.args.commands import InferArgs
from swiftlite.data.dataset import load_prompts
from swiftlite.engines.engine import EngineConfig, Sampling, start_engine
from swiftlite.engines.index import ENGINES
from swiftlite.engines.prompts import PromptEncoder, most_images
from swiftlite.families.resolved import resolve
from tests import torchvision_here
from tests.data.images import noise
from tests.e2e.draft_logits import LOGIT_TOLERANCE, compare_draft_logits
from tests.e2e.vllm_here import serve
from tests.e2e.vllm_with_images import results_of
from tests.engines.reference import Counts, Reference, convention, write_trained
from tests.engines.seeing import (
    FIRST_TOKENS,
    NEW_TOKENS,
    Seeing,
    learned_rows,
    make_prompts,
    simulate,
    with_files,
    write_seeing,
)
from tests.images import Seen, add_processors_of_engines, make_vision_hf_with_tokenizer
from tests.published import library
from tests.tiers import some_of
from tests.tiny import VLLM_LINEAR_SIZES, carried_tensors

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
    pytest.mark.skipif(bool(torchvision_here.missing()), reason=torchvision_here.missing()),
]
ROWS: list[dict[str, Any]] = [
    {"query": "What does this do?"},
    {"query": "What is <image>?", "images": ["a.png"]},
    {"query": "<image> or <image>?", "images": ["a.png", "b.png"]},
]


class Trained:
    """A model that has learned rows with images, and a reference that draws the same conclusions without a cache."""

    def __init__(self, hf_dir: Path, family: str):
        self.hf_dir = hf_dir
        self.reference = Seeing.open(hf_dir, family, 1)
        self.hf: Any = AutoModelForImageTextToText.from_pretrained(
            hf_dir, dtype=torch.float32, experts_implementation="eager"
        ).eval()

    def prompts(self) -> list[Seen]:
        """Return prompts with 2, 1 and 0 images, in this order."""
        prompts = make_prompts(self.hf_dir, self.reference, self.hf)
        numbers = [len(prompt.numbers) for prompt in prompts]
        assert set(numbers) == {0, 1, 2}
        return sorted(prompts, key=lambda prompt: len(prompt.numbers), reverse=True)

    def clear_prompts(self) -> list[Seen]:
        """Return beginnings of learned rows with which each most likely token leads by 0.3."""
        clear = []
        for row in learned_rows(self.hf_dir):
            self.reference.look(self.hf, [row])
            for length in range(FIRST_TOKENS + 4, FIRST_TOKENS + 14, 3):  # the image ends before
                prompt = row.first(length)
                if self.reference.closest_choice(prompt.ids_1S[0].tolist(), NEW_TOKENS, 3) > 0.3:
                    clear.append(prompt)
        assert len(clear) > 5
        return clear

    def draft_logits(self, prompt: Seen, num_tokens: int, without: str = "") -> torch.Tensor:
        """Return the reference's logits [num_tokens, V] of drafts after the prompt and one more token.

        Args:
            without: inputs of heads that are changed: "sees_images" or "has_axes" of `Seeing`.
        """
        reference = self.reference
        if without:
            setattr(reference, without, False)
        reference.look(self.hf, [prompt])
        ids = prompt.ids_1S[0].tolist()
        logits = reference.draft_logits(ids + reference.greedy(ids, 1), num_tokens)
        reference.sees_images = reference.has_axes = True
        return logits


@pytest.fixture
def trained(shared, family) -> Trained:
    sizes = VLLM_LINEAR_SIZES if family.startswith("qwen3_5") else {}
    make = partial(write_seeing, family=family, depth=1, for_engines=True, **sizes)
    return Trained(shared(f"seeing-{family}-in-engines", make), family)


def as_counts(counts: Any) -> Counts:
    return Counts(counts.drafts, counts.drafted, counts.accepted_per_position)


@pytest.mark.parametrize(
    ("family", "num_tokens"),
    some_of(product(("qwen3_vl", "qwen3_vl_moe", "qwen2_5_vl"), (1, 2)), ("qwen3_vl", 2)),
)
def test_answers_and_counts_of_new_heads(trained, family, num_tokens):
    """Without `draft_slots.py`, vLLM counts other drafts for two tokens per step."""
    prompts = trained.prompts()
    given = [with_files(trained.hf_dir, prompt) for prompt in prompts]
    (served,) = results_of([partial(serve, trained.hf_dir, given, NEW_TOKENS, num_tokens, num_alone=3)])
    assert served.draft == convention("vllm", family).draft
    answers, counts = simulate(trained.reference, trained.hf, prompts, num_tokens)
    assert served.token_ids == answers
    assert as_counts(served.counts) == counts
    assert 0.1 < counts.acceptance_rate < 0.9
    assert counts.accepted_per_position[-1] > 0

    model = resolve(trained.hf_dir).with_images()
    engine = start_engine(
        "transformers", EngineConfig(model, "float32", num_speculative_tokens=num_tokens, max_images=2)
    )
    completions = engine.generate(given, Sampling(NEW_TOKENS))
    assert [completion.token_ids for completion in completions] == served.token_ids
    assert as_counts(engine.draft_counts()) == counts

    for prompt, answer, logits in zip(prompts, answers, served.logits, strict=False):
        trained.reference.look(trained.hf, [prompt])
        compare_draft_logits(trained.reference, prompt.ids_1S[0].tolist(), answer, logits)
        expected = trained.draft_logits(prompt, num_tokens)
        for without in ("sees_images", "has_axes"):
            other = trained.draft_logits(prompt, num_tokens, without)
            assert float((other - expected).abs().max()) > 1000 * LOGIT_TOLERANCE, without


GEMMA = {"gemma3": ("gemma-3-27b-it", "image_token_index"), "gemma4": ("gemma-4-26B-A4B-it", "image_token_id")}
"""Published models, and their keys for the placeholder of an image."""


@pytest.mark.slow
@pytest.mark.parametrize("family", GEMMA)
def test_counts_of_gemma_with_its_tower(tmp_path, family):
    """The tower is not loaded without images, but vLLM reads its config."""
    model, placeholder = GEMMA[family]
    hf_dir, path = tmp_path / "model", tmp_path / "model" / "config.json"
    prompts = write_trained(hf_dir, family, 1)
    vision = library.content(model)["vision_config"]
    config = json.loads(path.read_text()) | {"vision_config": vision, placeholder: 127}
    path.write_text(json.dumps(config))
    tensors = load_file(hf_dir / "model.safetensors")
    tensors = {name: tensor for name, tensor in tensors.items() if name not in carried_tensors(family)}
    tensors |= {name: torch.zeros(tensor.shape) for name, tensor in library.copied_tower(config).items()}
    save_file(tensors, hf_dir / "model.safetensors", metadata={"format": "pt"})
    (served,) = results_of([partial(serve, hf_dir, prompts, NEW_TOKENS, 2)])
    assert served.draft == convention("vllm", family).draft
    expected, counts = Reference.load(hf_dir, family, 1).simulate(prompts, NEW_TOKENS, 2)
    assert (served.token_ids, as_counts(served.counts)) == (expected, counts)
    assert counts.accepted_per_position[-1] > 0


@pytest.mark.parametrize(
    ("family", "num_tokens"),
    some_of([("qwen3_5", 1), ("qwen3_5", 2), ("qwen3_5_moe", 1), ("qwen3_5_moe", 2)]),
)
def test_answers_and_counts_in_bfloat16(trained, family, num_tokens):
    """vLLM's kernel of linear attention for a CPU supports only bfloat16, which changes these logits by 0.1."""
    prompts = trained.clear_prompts()
    given = [with_files(trained.hf_dir, prompt) for prompt in prompts]
    (served,) = results_of(
        [partial(serve, trained.hf_dir, given, NEW_TOKENS, num_tokens, num_alone=3, dtype="bfloat16")]
    )
    assert served.draft == convention("vllm", family).draft
    answers, counts = simulate(trained.reference, trained.hf, prompts, num_tokens)
    assert served.token_ids == answers
    assert as_counts(served.counts) == counts
    assert counts.acceptance_rate > 0.8
    if family == "qwen3_5_moe":
        return  # this head attends to itself
    for prompt, logits in zip(prompts, served.logits, strict=False):
        error = logits[0] - trained.draft_logits(prompt, num_tokens)
        error_of_blind = logits[0] - trained.draft_logits(prompt, num_tokens, "sees_images")
        assert error.abs().mean() < error_of_blind.abs().mean() / 10  # about 1/30


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_answers_to_rows_without_drafts(tmp_path, family):
    hf_dir = make_vision_hf_with_tokenizer(tmp_path / "model", family, depth=0)
    add_processors_of_engines(hf_dir, family)
    noise(20, 12).save(tmp_path / "a.png")
    noise(8, 24, seed=1).save(tmp_path / "b.png")
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    args, tokenizer = InferArgs(max_pixels=640), AutoTokenizer.from_pretrained(hf_dir)
    encoder = PromptEncoder.open(args, resolve(hf_dir), tokenizer, ENGINES["vllm"])
    prompts = [encoder(chat) for chat in load_prompts([str(rows)], no_images=encoder.no_images)]
    (served,) = results_of([partial(serve, hf_dir, prompts, 24, 0)])
    config = EngineConfig(resolve(hf_dir), "float32", max_images=most_images(prompts), max_model_len=256)
    completions = start_engine("transformers", config).generate(prompts, Sampling(24))
    assert served.token_ids == [completion.token_ids for completion in completions]
