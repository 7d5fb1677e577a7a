"""Make the inputs of an image tower, and the positions of tokens, from the images of a row.

An image is resized and divided into patches. A group of `merge_size` x `merge_size` neighboring patches is an item: one
input of the tower, one output of the tower, and one placeholder token in the text. For example, with patches of 16 x 16
pixels and `merge_size` 2, an image of 64 x 96 pixels has 2 x 3 items, and the text has 6 placeholder tokens for it.

A sample with images has four extras: the pixels (`PATCHES`), the place of each group of patches in its image (`GRID`),
the output of the tower that each placeholder token stands for (`ITEM`), and positions along three axes (`AXES`). A
sample without images has none of them.

Shapes: S tokens of a sample, I items of a sample (outputs of the tower).
"""

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from PIL import Image
from transformers import PreTrainedTokenizerBase

from swiftlite.base.errors import UserError, clip
from swiftlite.base.log import logger
from swiftlite.data.batch import AXES, ITEM, Extra
from swiftlite.data.image_sizes import ImageSizes
from swiftlite.data.images import ImageRef, read_image
from swiftlite.data.rows.conversation import Conversation
from swiftlite.data.rows.image_parts import RowImage
from swiftlite.data.sample import LazyItems, Sample, truncate

PATCHES = "patches"
"""Name of the `Extra` with the pixels of each group of patches."""
GRID = "grid"
"""Name of the `Extra` with the place of each group in its image: row, column, number of rows, number of columns. Row
and column 0 start the next image.
"""
IMAGE_EXTRAS = (PATCHES, GRID, ITEM, AXES)
"""The names of all extras of samples with images."""

_SETTINGS = (
    *("do_convert_rgb", "do_resize", "size", "resample", "do_rescale", "rescale_factor"),
    *("do_normalize", "image_mean", "image_std", "patch_size", "temporal_patch_size", "merge_size"),
)
"""The settings of transformers' image processor that determine pixels. Digests of rows contain only these, so that
they do not change with a release of transformers that adds a setting.
"""


def image_extras(sizes: ImageSizes, has_tower: bool = True) -> tuple[Extra, ...]:
    """Return the tensors that batches with images contain.

    Args:
        has_tower: whether this rank has the tower. Images are not decoded on other ranks.
    """
    pixels = (Extra(PATCHES, per="item", shape=(sizes.item_width,)),)
    return (
        *(pixels if has_tower else ()),
        Extra(GRID, torch.int64, per="item", shape=(4,)),
        Extra(ITEM, torch.int64, per="token", default=-1, counts=PATCHES),
        Extra(AXES, torch.int64, per="token", shape=(3,), default_is_position=True),
    )


@dataclass(frozen=True)
class ImageProcessing:
    """The conversion of an image to patches, by transformers' image processor of Qwen2-VL without torchvision.

    Attributes:
        settings: settings of the processor, as JSON.
        sizes: sizes of the tower's inputs.
    """

    settings: str
    sizes: ImageSizes

    @classmethod
    def read(cls, hf_dir: Path, sizes: ImageSizes) -> "ImageProcessing":
        """Read the settings from the directory of a model.

        Raises:
            UserError: preprocessor_config.json is missing, belongs to another processor or contradicts config.json.
        """
        path = hf_dir / "preprocessor_config.json"
        try:
            found, _ = _processor_class().get_image_processor_dict(hf_dir)
        except (OSError, ValueError) as error:
            raise UserError(f"{path} cannot be read: {error}", "copy it from the model's source") from None
        kind = str(found.pop("image_processor_type", ""))
        if not kind.startswith("Qwen2VLImageProcessor"):
            raise UserError(f"{path}: image_processor_type {kind!r} is not supported", "use the file of the model")
        processor = _processor_class()(**found)
        for name in ("patch_size", "temporal_patch_size", "merge_size"):
            given, expected = getattr(processor, name), getattr(sizes, name)
            if given != expected:
                raise UserError(f"{path}: {name} {given} contradicts {expected} in config.json")
        known = processor.to_dict()
        settings = {name: known[name] for name in _SETTINGS}
        return shared_processing(json.dumps(settings, sort_keys=True), sizes)

    @classmethod
    def of_model(
        cls, hf_dir: Path, family: str, sizes: ImageSizes | None, tokenizer: PreTrainedTokenizerBase
    ) -> "ImageProcessing":
        """Read the settings from the directory of a model, if the model supports images.

        Args:
            family: name of the model's family, for errors.
            sizes: sizes of the model's inputs; None for a model without images.

        Raises:
            UserError: the model or its files do not support images. The problem is a predicate, such as "is not
                supported by this model", because it is shown behind the name of the row's field.
        """
        if sizes is None:
            raise UserError(f"is not supported by this model ({family})")
        if tokenizer.convert_ids_to_tokens(sizes.image_token_id) is None:
            raise UserError(f"requires the token {sizes.image_token_id}, which the tokenizer of --model lacks")
        return cls.read(hf_dir, sizes)

    def with_bounds(self, max_pixels: int | None, min_pixels: int | None) -> "ImageProcessing":
        """Return the processing with other bounds of the pixels of a resized image; None keeps a bound of the model.

        transformers calls these numbers of pixels `longest_edge` and `shortest_edge`.

        Raises:
            UserError: the bounds contradict each other, or are too small for one item.
        """
        settings = json.loads(self.settings)
        size = settings["size"]
        size["longest_edge"] = max_pixels or size["longest_edge"]
        size["shortest_edge"] = min_pixels or size["shortest_edge"]
        highest, lowest, one_item = size["longest_edge"], size["shortest_edge"], self.sizes.group_size**2
        if highest < one_item:
            problem = f"--max_pixels {highest} is less than the {one_item} pixels of one image token"
            raise UserError(problem, f"use {one_item} or more")
        if lowest > highest:
            given, limit = f"--min_pixels {lowest}", f"the maximum of the model, {highest}"
            if min_pixels is None:
                given, limit = f"--max_pixels {highest}", f"the minimum of the model, {lowest}"
            raise UserError(f"{given} contradicts {limit}", "use --min_pixels and --max_pixels together")
        return shared_processing(json.dumps(settings, sort_keys=True), self.sizes)

    def __reduce__(self) -> tuple[Any, ...]:
        # All samples that a worker process returns share one object.
        return shared_processing, (self.settings, self.sizes)

    @cached_property
    def _processor(self) -> Any:
        return _processor_class()(**json.loads(self.settings))

    @property
    def size(self) -> dict[str, int]:
        """Bounds of the number of pixels of a resized image: `shortest_edge` and `longest_edge`."""
        size = self._processor.size
        return {"shortest_edge": size["shortest_edge"], "longest_edge": size["longest_edge"]}

    def grid_of(self, image: ImageRef) -> tuple[int, int]:
        """Return the number of rows and columns of items that the image is divided into."""
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

        size = self._processor.size
        height, width = smart_resize(
            image.height, image.width, self.sizes.group_size, size["shortest_edge"], size["longest_edge"]
        )
        return height // self.sizes.group_size, width // self.sizes.group_size

    def items_of(self, image: Image.Image) -> np.ndarray:
        """Return the items of an image, float32 [I, item_width]. The patches of a group are consecutive."""
        values = self._processor.preprocess([image], return_tensors="np")["pixel_values"]
        return np.asarray(values, np.float32).reshape(-1, self.sizes.item_width)


@lru_cache(maxsize=16)
def shared_processing(settings: str, sizes: ImageSizes) -> ImageProcessing:
    """Return the one object with these settings."""
    return ImageProcessing(settings, sizes)


def _processor_class() -> Any:
    # Not imported at the top: only runs with images need it, and the import takes 0.3 s.
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    return Qwen2VLImageProcessorPil


@dataclass(frozen=True)
class Patches(LazyItems):
    """The items of a sample's images, float32 [item_width] each. Iterating decodes the images one after another.

    Attributes:
        num_items: number of items of all images.
    """

    images: tuple[ImageRef, ...]
    processing: ImageProcessing
    num_items: int

    def __len__(self) -> int:
        return self.num_items

    def __iter__(self) -> Iterator[np.ndarray]:
        for image in self.images:
            yield from self.processing.items_of(image.load())

    @property
    def group_sizes(self) -> list[int]:
        grids = [self.processing.grid_of(image) for image in self.images]
        return [rows * columns for rows, columns in grids]

    @property
    def identity(self) -> bytes:
        """The sha256 of each image, and the settings that determine its pixels."""
        sha = hashlib.sha256(self.processing.settings.encode())
        for image in self.images:
            sha.update(bytes.fromhex(image.sha256))
        return sha.digest()


@dataclass(frozen=True)
class Places(LazyItems):
    """The values of `GRID` of a sample's images, int32 [4] each.

    Attributes:
        grids: number of rows and columns of each image.
    """

    grids: tuple[tuple[int, int], ...]

    def __len__(self) -> int:
        return sum(rows * columns for rows, columns in self.grids)

    def __iter__(self) -> Iterator[np.ndarray]:
        for rows, columns in self.grids:
            yield from _places(rows, columns)

    @property
    def group_sizes(self) -> list[int]:
        return [rows * columns for rows, columns in self.grids]

    @property
    def identity(self) -> bytes:
        return np.array(self.grids, np.int32).tobytes()


def _warn_of_clipping(source: str, image: RowImage) -> None:
    name = clip(image.source, 200) if isinstance(image.source, str) else "an image file"
    logger.warning(
        "%s: %s: %s has gray levels of 16 bits; all above 255 become white, as in engines. Scale such images to 8 "
        "bits. Further images are not reported",
        source,
        image.field,
        name,
    )


@dataclass(frozen=True)
class ImageEncoder:
    """Reads the images of rows, and adds them to samples.

    Attributes:
        media_root: directory of relative paths; None: the directory of the row's file.
    """

    processing: ImageProcessing
    media_root: Path | None = None
    _warned: list[str] = field(default_factory=list, compare=False, repr=False)

    @property
    def sizes(self) -> ImageSizes:
        return self.processing.sizes

    def read(self, row: Conversation) -> tuple[ImageRef, ...]:
        """Read the images of a row, in the order of the turns.

        Raises:
            RowError: an image cannot be used.
        """
        media_root = self.media_root
        if media_root is None:
            media_root = Path(row.source.rpartition(":")[0]).parent  # the source is `file:line`
        images = tuple(read_image(image, media_root) for image in row.images)
        for image, ref in zip(row.images, images, strict=True):
            if ref.is_clipped and not self._warned:
                self._warned.append(row.source)
                _warn_of_clipping(row.source, image)
        return images

    def num_items(self, image: ImageRef) -> int:
        """Return the number of placeholder tokens of an image."""
        rows, columns = self.processing.grid_of(image)
        return rows * columns

    def with_images(self, sample: Sample, images: Sequence[ImageRef]) -> Sample:
        """Return the sample with the extras of its images; without images it is unchanged.

        Args:
            images: the images in order; the sample has a placeholder token for each of their items.
        """
        if not images:
            return sample
        grids = tuple(self.processing.grid_of(image) for image in images)
        is_placeholder = sample.input_ids == self.sizes.image_token_id
        item = np.where(is_placeholder, is_placeholder.cumsum() - 1, -1).astype(np.int32)
        places = Places(grids)
        assert len(places) == is_placeholder.sum()
        patches = Patches(tuple(images), self.processing, len(places))
        axes = axes_of(is_placeholder, grids)
        return sample.with_extras(**{PATCHES: patches, GRID: places, ITEM: item, AXES: axes})

    def truncate(self, sample: Sample, max_length: int, strategy: Literal["left", "right"]) -> Sample | None:
        """Truncate a sample with images, like `sample.truncate`. Images outside of the kept tokens are dropped.

        Returns:
            The sample; None if an image would be cut.
        """
        first, end = 0, max_length
        if strategy == "left":
            first, end = len(sample) - max_length, len(sample)
        kept = []
        for image, (start, stop) in zip(sample.extras[PATCHES].images, self._spans(sample), strict=True):
            if start < first < stop or start < end < stop:
                return None
            if first <= start and stop <= end:
                kept.append(image)
        others = {name: value for name, value in sample.extras.items() if name not in IMAGE_EXTRAS}
        return self.with_images(truncate(replace(sample, extras=others), max_length, strategy), kept)

    def _spans(self, sample: Sample) -> Iterator[tuple[int, int]]:
        """Yield the range of tokens of each image, including the tokens around its placeholders."""
        places = np.flatnonzero(sample.input_ids == self.sizes.image_token_id)
        num_before = 0
        for image in sample.extras[PATCHES].images:
            num_items = self.num_items(image)
            start, stop = int(places[num_before]), int(places[num_before + num_items - 1]) + 1
            num_before += num_items
            has_start = start > 0 and sample.input_ids[start - 1] == self.sizes.vision_start_id
            has_end = stop < len(sample) and sample.input_ids[stop] == self.sizes.vision_end_id
            yield start - int(has_start), stop + int(has_end)


def images_of(sample: Sample) -> tuple[ImageRef, ...]:
    """Return the images of a sample, in order."""
    if PATCHES not in sample.extras:
        return ()
    return sample.extras[PATCHES].images


def image_identity(sample: Sample) -> bytes:
    """Return bytes that are equal for samples with the same images; empty without images."""
    if PATCHES not in sample.extras:
        return b""
    return sample.extras[PATCHES].identity


def share_images(sample: Sample, other: Sample) -> Sample:
    """Return a sample with the pixels of another sample with the same images.

    Then a batch contains the images of two successive samples once (`Extra.per`).
    """
    if PATCHES not in other.extras:
        return sample
    return sample.with_extras(**{name: other.extras[name] for name in (PATCHES, GRID)})


def with_images_of(sample: Sample, source: Sample) -> Sample:
    """Return a sample with the images of another sample, whose tokens are the same up to the end of the last image.

    Without images, the sample is unchanged.
    """
    if PATCHES not in source.extras:
        return sample
    item = np.full(len(sample), -1, np.int32)
    num_equal = min(len(sample), len(source))
    item[:num_equal] = source.extras[ITEM][:num_equal]
    patches, places = source.extras[PATCHES], source.extras[GRID]
    axes = axes_of(item >= 0, places.grids)
    return sample.with_extras(**{PATCHES: patches, GRID: places, ITEM: item, AXES: axes})


def _places(rows: int, columns: int) -> np.ndarray:
    """Return row, column, number of rows and number of columns of each item of an image, int32 [rows * columns, 4]."""
    row, column = np.indices((rows, columns), np.int32).reshape(2, -1)
    return np.stack([row, column, np.full_like(row, rows), np.full_like(row, columns)], axis=1)


def axes_of(is_placeholder: np.ndarray, grids: Sequence[tuple[int, int]]) -> np.ndarray:
    """Return the positions of tokens along time, row and column, int32 [S, 3], as transformers' `get_rope_index`.

    All items of an image have the same time. The text after an image continues after its larger side.

    Example: a token of text, an image of 2 rows and 1 column, and a token of text have the positions (0, 0, 0), (1, 1,
    1), (1, 2, 1), (3, 3, 3).

    Args:
        is_placeholder: whether a token is a placeholder, [S].
        grids: number of rows and columns of each image.
    """
    places = np.flatnonzero(is_placeholder)
    axes = np.empty((len(is_placeholder), 3), np.int32)
    position = start = num_before = 0
    for rows, columns in grids:
        first = int(places[num_before])
        axes[start:first] = position + np.arange(first - start)[:, None]
        position += first - start
        start = first + rows * columns
        axes[first:start, 0] = position
        axes[first:start, 1:] = position + _places(rows, columns)[:, :2]
        position += max(rows, columns)
        num_before += rows * columns
    axes[start:] = position + np.arange(len(axes) - start)[:, None]
    return axes
