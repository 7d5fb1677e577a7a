"""Samples with images, and a reference for models with a vision tower: transformers' model with MTP heads."""

import json
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import nn
from torch.nn.functional import cross_entropy
from transformers import AutoModelForImageTextToText
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from swiftlite.data.batch import AXES, ITEM, Extra
from swiftlite.data.sample import Sample, make_sample
from tests.data.images import TOKENS, VIDEO, VISION, make_processor
from tests.engines.reference import Reference
from tests.tiny import TEXT_PREFIX, VISUAL_PREFIX, make_tiny_tokenizer, make_tiny_vision_hf

SIZES = [(8, 16), (24, 8), (16, 16)]
"""Heights and widths of the images, in pixels. A tiny tower has one output per 8 x 8 pixels."""


LIMITS = {"shortest_edge": 64, "longest_edge": 4096}
"""Bounds of the number of pixels of an image."""


def make_image(number: int) -> Image.Image:
    """Return random image `number`."""
    height, width = SIZES[number % len(SIZES)]
    return Image.fromarray(np.random.RandomState(number).randint(0, 256, (height, width, 3), np.uint8))


def make_pixels(directory: Path, number: int) -> dict[str, torch.Tensor]:
    """Return `pixel_values` and `image_grid_thw` of random image `number`, from transformers' image processor."""
    vision = json.loads((directory / "config.json").read_text())["vision_config"]
    sizes = {"patch_size": vision["patch_size"], "temporal_patch_size": vision["temporal_patch_size"]}
    processor = Qwen2VLImageProcessorPil(**sizes, merge_size=vision["spatial_merge_size"], size=LIMITS)
    return dict(processor(make_image(number), return_tensors="pt"))


def make_vision_hf_with_tokenizer(directory: Path, family: str, depth: int, **config: Any) -> Path:
    """Write a tiny vision-language model with a tokenizer, a chat template and an image processor.

    Args:
        family, depth, config: as for `make_tiny_vision_hf`.
    """
    tokens = [*TOKENS, VIDEO]  # engines look for the last one, too
    tokenizer = make_tiny_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": tokens})
    tokenizer.chat_template = VISION
    ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    make_tiny_vision_hf(directory, family, depth, vocab_size=len(tokenizer), **ids, **config)
    tokenizer.save_pretrained(directory)
    make_processor().save_pretrained(directory)
    path = directory / "config.json"
    names = ("vision_start_token_id", "vision_end_token_id", "image_token_id", "video_token_id")
    changed = {name: tokenizer.convert_tokens_to_ids(token) for name, token in zip(names, tokens, strict=True)}
    path.write_text(json.dumps(json.loads(path.read_text()) | changed))
    return directory


def add_processors_of_engines(hf_dir: Path, family: str) -> None:
    """Write the files that the processors of images in engines read, which use torchvision."""
    path = hf_dir / "preprocessor_config.json"
    settings = json.loads(path.read_text()) | {"image_processor_type": "Qwen2VLImageProcessorFast"}
    path.write_text(json.dumps(settings))
    kind = "Qwen2VLVideoProcessor" if family == "qwen2_5_vl" else "Qwen3VLVideoProcessor"
    del settings["image_processor_type"]
    (hf_dir / "video_preprocessor_config.json").write_text(json.dumps(settings | {"video_processor_type": kind}))


class Seen:
    """A sequence of tokens with images, as arguments of transformers' model and as a `Sample`.

    Args:
        parts: the sequence from left to right: a number of text tokens (as int), or an image (as its number in SIZES,
            as a string).
    """

    def __init__(self, directory: Path, parts: list[int | str], seed: int = 0):
        config = json.loads((directory / "config.json").read_text())
        random = np.random.RandomState(seed)
        self.merge = config["vision_config"]["spatial_merge_size"]
        ids: list[int] = []
        images = []
        self.numbers = [int(part) for part in parts if isinstance(part, str)]
        for part in parts:
            if isinstance(part, int):
                ids += random.randint(0, 120, part).tolist()
                continue
            image = make_pixels(directory, int(part))
            count = int(image["image_grid_thw"].prod()) // self.merge**2
            placeholders = [config["image_token_id"]] * count
            ids += [config["vision_start_token_id"], *placeholders, config["vision_end_token_id"]]
            images.append(image)
        self.ids_1S = torch.tensor([ids])
        self.placeholder = config["image_token_id"]
        self.is_image_1S = self.ids_1S == self.placeholder
        self.images: dict[str, Any] = {}
        if images:
            self.images = {name: torch.cat([image[name] for image in images]) for name in images[0]}

    def followed_by(self, tokens: list[int]) -> "Seen":
        """Return the sequence with text tokens appended."""
        return self._with_ids(torch.cat((self.ids_1S, torch.tensor([tokens], dtype=torch.int64)), dim=1))

    def first(self, length: int) -> "Seen":
        """Return the first tokens, which contain all images."""
        return self._with_ids(self.ids_1S[:, :length])

    def _with_ids(self, ids_1S: torch.Tensor) -> "Seen":
        changed = copy(self)
        changed.ids_1S = ids_1S
        changed.is_image_1S = ids_1S == self.placeholder
        return changed

    def inputs(self) -> dict[str, Any]:
        """Return the arguments of transformers' model."""
        return {"input_ids": self.ids_1S, "mm_token_type_ids": self.is_image_1S.int(), **self.images}

    def axes_31S(self, model: Any) -> torch.Tensor:
        """Return transformers' positions along three axes."""
        grids = self.images.get("image_grid_thw")
        return model.model.get_rope_index(self.ids_1S, self.is_image_1S.int(), image_grid_thw=grids)[0]

    def sample(self, model: Any) -> Sample:
        """Return the sample with the values of `extras_of`; all tokens are trained."""
        is_image = self.is_image_1S[0].numpy()
        item = np.where(is_image, is_image.cumsum() - 1, -1)
        extras = {ITEM: item, AXES: self.axes_31S(model)[:, 0].T.numpy()}
        if self.images:
            patches_IW = self.images["pixel_values"].view(int(is_image.sum()), -1)
            extras |= {"patches": tuple(patches_IW.numpy()), "grid": self._grid()}
        return replace(make_sample(self.ids_1S[0].numpy(), np.ones(len(is_image))), extras=extras)

    def _grid(self) -> tuple[np.ndarray, ...]:
        grid = []
        for _, height, width in self.images["image_grid_thw"].tolist():
            rows, columns = height // self.merge, width // self.merge
            for place in range(rows * columns):
                grid.append(np.array([place // columns, place % columns, rows, columns]))
        return tuple(grid)


class SampleRow(Seen):
    """A sample of a run as arguments of transformers' model."""

    def __init__(self, directory: Path, sample: Any):
        config = json.loads((directory / "config.json").read_text())
        self.merge = config["vision_config"]["spatial_merge_size"]
        self.ids_1S = torch.from_numpy(sample.input_ids).long()[None]
        self.placeholder = config["image_token_id"]
        self.is_image_1S = self.ids_1S == self.placeholder
        self.labels_S = torch.from_numpy(sample.labels).long()
        self.images = {}
        patches = [torch.from_numpy(np.array(item)) for item in sample.extras.get("patches", ())]
        if patches:
            pixels = torch.stack(patches)
            first = [item for item in sample.extras["grid"] if item[0] == item[1] == 0]
            grids = [[1, rows * self.merge, columns * self.merge] for _, _, rows, columns in first]
            pixel_values = pixels.view(len(patches) * self.merge**2, -1)
            self.images = {"pixel_values": pixel_values, "image_grid_thw": torch.tensor(grids)}


def extras_of(directory: Path) -> tuple[Extra, ...]:
    """Return the extras of samples with images."""
    vision = json.loads((directory / "config.json").read_text())["vision_config"]
    patch = vision["in_channels"] * vision["temporal_patch_size"] * vision["patch_size"] ** 2
    return (
        Extra("patches", per="item", shape=(vision["spatial_merge_size"] ** 2 * patch,)),
        Extra("grid", torch.int64, per="item", shape=(4,)),
        Extra(ITEM, torch.int64, per="token", default=-1, counts="patches"),
        Extra(AXES, torch.int64, per="token", shape=(3,)),
    )


class VisionReference(nn.Module):
    """transformers' vision-language model with MTP heads.

    Args:
        blind_heads: whether the heads read the embeddings of placeholders, instead of the tower's outputs.
        flat_positions: whether all three positions of a token are its index.
    """

    def __init__(
        self, directory: Path, family: str, depth: int, blind_heads: bool = False, flat_positions: bool = False
    ):
        super().__init__()
        self.model: Any = AutoModelForImageTextToText.from_pretrained(
            directory, dtype=torch.float32, experts_implementation="eager"
        )
        self.reference = Reference.load(directory, family, depth)
        self.family = family
        self.blind_heads, self.flat_positions = blind_heads, flat_positions

    def forward(self, seen: Seen) -> list[torch.Tensor]:
        """Return the logits [S, V] of the trunk, and [S - k, V] of each head k."""
        axes_31S = seen.axes_31S(self.model)
        if self.flat_positions:
            axes_31S = torch.arange(seen.ids_1S.size(1)).expand(3, 1, -1)
        given: list[torch.Tensor] = []
        text = self.model.model.language_model
        hook = text.register_forward_pre_hook(
            lambda _, args, kwargs: given.append(kwargs["inputs_embeds"]), with_kwargs=True
        )
        states = self.model.model(**seen.inputs(), position_ids=axes_31S, use_cache=False).last_hidden_state
        hook.remove()
        (embeddings,) = given
        if self.blind_heads:
            embeddings = text.embed_tokens(seen.ids_1S)
        logits = [self.model.lm_head(states[0])]
        for head in self.reference.heads:
            head: Any
            embeddings, states = embeddings[:, 1:], states[:, :-1]
            turns = text.rotary_emb(states, axes_31S[..., : states.size(1)])
            parts = [head["embedding_norm"](embeddings), head["hidden_norm"](states)]
            fused = head["projection"](torch.cat(parts, dim=-1))
            states = head["output_norm"](head["block"](fused, position_embeddings=turns))
            logits.append(self.model.lm_head(states[0]))
        return logits

    def loss(self, seen: Seen) -> torch.Tensor:
        """Return the sum of the cross-entropies of all next tokens, over trunk and heads."""
        return sum_of_losses(self(seen), seen)

    def gradients(self) -> dict[str, torch.Tensor]:
        """Return the gradient of each parameter by its name in files. The weights are lost."""
        for parameter in self.parameters():
            parameter.data = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        gradients = self.reference.mtp_tensors()
        for name, gradient in self.model.state_dict().items():
            in_files = name.replace("model.visual.", VISUAL_PREFIX[self.family])
            gradients[in_files.replace("model.language_model", TEXT_PREFIX[self.family])] = gradient
        return gradients


def sum_of_losses(logits: list[torch.Tensor], seen: Seen) -> torch.Tensor:
    """Return the sum of the cross-entropies of all next tokens.

    Args:
        logits: of the trunk and of each head, [S, V] or less.
    """
    losses = []
    for depth, logits_SV in enumerate(logits):
        labels = seen.ids_1S[0, depth + 1 :]
        losses.append(cross_entropy(logits_SV[: len(labels)], labels, reduction="sum"))
    return torch.stack(losses).sum()
