"""Train a tiny vision-language model whose answers depend on images, and simulate engines for prompts with images.

Trunk and heads learn rows by heart. Rows of a pair have the same text up to the answer and different images, so that
the answers can only be learned from the images.
"""

import hashlib
import json
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForImageTextToText

from swiftlite.bridge.hf_config import read_config
from swiftlite.data.image_inputs import ImageEncoder, ImageProcessing
from swiftlite.data.images import ImageRef
from swiftlite.data.sample import make_sample
from swiftlite.engines.prompts import ImagePrompt
from swiftlite.families.index import image_sizes
from tests.data.images import encoded
from tests.engines.reference import UNDECIDED, Counts, Reference, learn_by_heart
from tests.images import LIMITS, Seen, add_processors_of_engines, make_image, make_vision_hf_with_tokenizer
from tests.tiny import as_in_files, hub_name, make_tiny_vision_hf

NEW_TOKENS = 16
LEARNED_ROWS = 6
FIRST_TOKENS = 4
"""Number of tokens before the first image, more than the heads read ahead."""


class _Turns(nn.Module):
    """transformers' cosines and sines at positions along three axes. Its position_ids are places in the table."""

    def __init__(self, rotary_emb: Any, axes_3S: torch.Tensor):
        super().__init__()
        self.rotary_emb = rotary_emb
        self.axes_3S = axes_3S

    def forward(self, hidden: torch.Tensor, position_ids: torch.Tensor) -> Any:
        places = position_ids.reshape(-1, position_ids.shape[-1])[0]
        return self.rotary_emb(hidden, self.axes_3S[:, None, places])


class Seeing(Reference):
    """A `Reference` that reads features of a row's images instead of placeholders, and positions along three axes.

    Attributes:
        sees_images: whether heads read features; otherwise they read the embeddings of placeholders.
        has_axes: whether positions have three axes; otherwise they are indices.
    """

    sees_images: bool
    has_axes: bool
    placeholder: int
    features_IH: torch.Tensor
    num_looked_at: int
    deepstack: list[torch.Tensor]
    is_image_BS: torch.Tensor
    is_head = False

    @classmethod
    def open(cls, directory: Path, family: str, depth: int) -> "Seeing":
        reference = cls.load(directory, family, depth)
        assert isinstance(reference, Seeing)
        reference.placeholder = json.loads((directory / "config.json").read_text())["image_token_id"]
        reference.features_IH = torch.empty(0, reference.trunk.config.hidden_size)
        reference.num_looked_at = 1
        reference.sees_images = reference.has_axes = True
        reference.deepstack = []
        reference.trunk.model.embed_tokens.register_forward_hook(reference._exchange)
        for number, layer in enumerate(reference.trunk.model.layers):
            layer.register_forward_hook(partial(reference._add_deepstack, number))
        return reference

    def look(self, model: Any, rows: list[Seen]) -> None:
        """Set the images of the rows that are computed next; all rows have the same places of images.

        Args:
            model: transformers' vision-language model, which computes features and positions.
        """
        self.features_IH, self.deepstack = torch.empty(0, self.trunk.config.hidden_size), []
        self.num_looked_at = len(rows)
        outputs = [features_of(model, row) for row in rows if row.images]
        if outputs:
            self.features_IH, *self.deepstack = map(torch.cat, zip(*outputs, strict=True))
        longest = rows[0].followed_by([0] * 100)
        axes_3S = longest.axes_31S(model)[:, 0]
        if not self.has_axes:
            axes_3S = torch.arange(axes_3S.shape[1]).expand(3, -1)
        self.trunk.model.rotary_emb = _Turns(model.model.language_model.rotary_emb, axes_3S)

    def head_states(self, k: int, hidden_BSH: torch.Tensor, ids_BS: torch.Tensor) -> Any:
        """Compute rows of which several may have the same images (`draft_logits_at`)."""
        self.is_head = True
        features_IH = self.features_IH
        self.features_IH = features_IH.repeat(len(ids_BS) // self.num_looked_at, 1)
        states = super().head_states(k, hidden_BSH, ids_BS)
        self.features_IH = features_IH
        self.is_head = False
        return states

    def _add_deepstack(self, number: int, _: Any, args: Any, hidden: Any) -> Any:
        if self.is_head or number >= len(self.deepstack):
            return None
        hidden_BSH = hidden if isinstance(hidden, torch.Tensor) else hidden[0]
        added = torch.zeros_like(hidden_BSH).masked_scatter(self.is_image_BS[..., None], self.deepstack[number])
        return hidden_BSH + added

    def _exchange(self, _: Any, ids: tuple[torch.Tensor], embeddings_BSH: torch.Tensor) -> torch.Tensor:
        if self.is_head and not self.sees_images:
            return embeddings_BSH
        is_image_BS = ids[0] == self.placeholder
        # A placeholder that was generated stands for no image.
        is_image_BS &= is_image_BS.cumsum(1) <= len(self.features_IH) // len(is_image_BS)
        self.is_image_BS = is_image_BS
        return embeddings_BSH.masked_scatter(is_image_BS[..., None], self.features_IH)


@torch.no_grad()
def features_of(model: Any, seen: Seen) -> list[torch.Tensor]:
    """Return the outputs [I, H] of the tower, and those that the first layers add (deepstack)."""
    outputs = model.model.visual(seen.images["pixel_values"], grid_thw=seen.images["image_grid_thw"])
    return [outputs.pooler_output, *(getattr(outputs, "deepstack_features", None) or [])]


def learned_rows(directory: Path) -> list[Seen]:
    """Return rows with one image, in pairs with the same text up to the image's end and different images."""
    answers = torch.randint(0, 120, (LEARNED_ROWS, 28), generator=torch.Generator().manual_seed(7)).tolist()
    return [
        Seen(directory, [FIRST_TOKENS, str(3 * number)], seed=number // 2).followed_by(answer)
        for number, answer in enumerate(answers)
    ]


def write_seeing(directory: Path, family: str, depth: int, for_engines: bool = False, **config: Any) -> None:
    """Write a tiny checkpoint whose trunk and heads have learned `learned_rows` by heart.

    Args:
        for_engines: add a tokenizer and the files that processors of images in engines read.
        config: arguments of `make_tiny_vision_hf`.
    """
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    if for_engines:
        make_vision_hf_with_tokenizer(directory, family, depth, **config)
        add_processors_of_engines(directory, family)
        _remove_end_of_text(directory)
    else:
        make_tiny_vision_hf(directory, family, depth, **config)
    model: Any = (
        AutoModelForImageTextToText.from_pretrained(directory, dtype=torch.float32).eval().requires_grad_(False)
    )
    rows = learned_rows(directory)
    reference = Seeing.open(directory, family, depth)
    reference.look(model, rows)
    learn_by_heart(reference.train(), torch.cat([row.ids_1S for row in rows]), unroll=3 if depth == 1 else 1)
    tensors = load_file(directory / "model.safetensors")
    trunk = as_in_files(family, reference.trunk.state_dict())
    trained = {hub_name(family, name): tensor for name, tensor in trunk.items()}
    trained |= reference.mtp_tensors()
    tensors |= {name: tensor.contiguous() for name, tensor in trained.items() if name in tensors}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    torch.set_num_threads(num_threads)


def _remove_end_of_text(directory: Path) -> None:
    """Change a model so that no token of its answers ends them."""
    path = directory / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token": "<|video_pad|>"}))
    path = directory / "config.json"
    config = json.loads(path.read_text())
    config["text_config"]["eos_token_id"] = None
    path.write_text(json.dumps(config))


NEW_PROMPTS: list[list[int | str]] = [
    *([9], [4, "1", 3], [4, "2", 5], [4, "1", 3, "2", 2], [5, "2", 0, "0", 3]),
    *([6, "0", 2], [4, "2", 1, "1", 4], [8, "1", 6], [4, "0", 1, "0", 1]),
]


def make_prompts(directory: Path, reference: Seeing, model: Any) -> list[Seen]:
    """Return prompts with 0, 1 and 2 images, learned and new ones, whose answers do not depend on the order of sums."""
    length = FIRST_TOKENS + 4  # an image of two placeholders
    prompts = []
    for number, row in enumerate(learned_rows(directory)):
        prompts.append(row.first(length + 1 + 2 * number))
    prompts += [Seen(directory, parts, seed) for seed, parts in enumerate(NEW_PROMPTS, start=20)]
    decided = [prompt for prompt in prompts if is_decided(reference, model, prompt)]
    assert len(decided) >= len(prompts) - 3
    return decided


def simulate(
    reference: Seeing, model: Any, prompts: list[Seen], num_tokens: int, confidence: float = 0.0
) -> tuple[list[list[int]], Counts]:
    """Return greedy answers, and the counts of an engine that drafts `num_tokens` per step.

    Args:
        confidence: as for `Reference.simulate`.
    """
    answers, found = [], []
    for prompt in prompts:
        reference.look(model, [prompt])
        (answer,), counts = reference.simulate([prompt.ids_1S[0].tolist()], NEW_TOKENS, num_tokens, confidence)
        answers.append(answer)
        found.append(counts)
    accepted = [sum(each) for each in zip(*(counts.accepted_per_position for counts in found), strict=True)]
    drafts = sum(counts.drafts for counts in found)
    return answers, Counts(drafts, sum(counts.drafted for counts in found), tuple(accepted))


@torch.no_grad()
def counts_within_answers(reference: Seeing, model: Any, prompts: list[Seen], num_tokens: int) -> Counts:
    """Return the counts of `simulate` without drafts that are accepted after the end of an answer, as in HeldOut."""
    drafts, accepted = 0, [0] * num_tokens
    for prompt in prompts:
        reference.look(model, [prompt])
        ids = prompt.ids_1S[0].tolist()
        row = reference.greedy(ids, NEW_TOKENS)
        fed, _ = reference.trunk_states(torch.tensor([ids + row]))
        ends = range(len(ids) + 1, len(ids) + NEW_TOKENS)  # one pass, as in `Reference.simulate`
        proposals = reference.draft_logits_at(ids + row, ends, num_tokens, fed).argmax(-1).tolist()
        done = 1
        while done < NEW_TOKENS:
            proposal = proposals[done - 1]
            hits = 0
            while hits < num_tokens and proposal[hits : hits + 1] == row[done + hits : done + hits + 1]:
                accepted[hits] += 1
                hits += 1
            drafts += 1
            done += hits + 1
    return Counts(drafts, drafts * num_tokens, tuple(accepted))


def is_decided(reference: Seeing, model: Any, prompt: Seen) -> bool:
    reference.look(model, [prompt])
    return reference.closest_choice(prompt.ids_1S[0].tolist(), NEW_TOKENS, 3) > UNDECIDED


def with_files(directory: Path, seen: Seen) -> Any:
    """Return a prompt of an engine with image files, which the engine's processor reads."""
    ids = seen.ids_1S[0].tolist()
    if not seen.images:
        return ids
    sizes = image_sizes(read_config(directory))
    assert sizes
    processing = ImageProcessing.read(directory, sizes).with_bounds(LIMITS["longest_edge"], LIMITS["shortest_edge"])
    refs = []
    for number in seen.numbers:
        image = make_image(number)
        content = encoded(image)
        refs.append(ImageRef(content, image.width, image.height, hashlib.sha256(content).hexdigest()))
    sample = ImageEncoder(processing).with_images(make_sample(ids, [0.0] * len(ids)), refs)
    return ImagePrompt(ids, sample.extras)


def as_prompt(model: Any, seen: Seen) -> Any:
    """Return a prompt of an engine."""
    ids = seen.ids_1S[0].tolist()
    if not seen.images:
        return ids
    return ImagePrompt(ids, seen.sample(model).extras)
