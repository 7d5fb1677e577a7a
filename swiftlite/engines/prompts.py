"""Convert conversations to prompts of an engine, and compute the sequence length that prompts and answers need."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from swiftlite.acceptance.prompt_items import PromptItems
from swiftlite.args.data_fields import ImageArgs
from swiftlite.base.errors import UserError
from swiftlite.base.log import logger
from swiftlite.data.batch import AXES, ITEM
from swiftlite.data.encoder import encode_prompt, special_token_note
from swiftlite.data.image_inputs import GRID, PATCHES, ImageEncoder, ImageProcessing, images_of
from swiftlite.data.images import ImageRef
from swiftlite.data.rows.conversation import NO_IMAGES, Conversation, RowError
from swiftlite.data.rows.image_parts import Message, Part
from swiftlite.data.sample import Sample, make_sample
from swiftlite.data.template import ChatTemplate
from swiftlite.engines.info import EngineInfo
from swiftlite.engines.ngram import Ngrams
from swiftlite.families.index import image_sizes
from swiftlite.families.resolved import HfModel


@dataclass(frozen=True, eq=False)
class ImagePrompt(Sequence[int]):
    """The tokens of a prompt with images. As a sequence it is like the tokens of any other prompt.

    Attributes:
        token_ids: tokens with one placeholder per output of the image tower, as in training.
        extras: images and positions, as in `Sample.extras` of a training sample with these tokens
            (`data/image_inputs.py`).
    """

    token_ids: Sequence[int]
    extras: Mapping[str, Any]

    @property
    def images(self) -> tuple[ImageRef, ...]:
        """The images in the order of their placeholders."""
        return self.extras[PATCHES].images

    @property
    def grids(self) -> list[list[int]]:
        """Number of rows and columns of items of each image."""
        places_I4 = np.stack(list(self.extras[GRID]))
        # An item has its row, its column and the size of the grid; the first one of an image is in row 0, column 0.
        is_first_I = (places_I4[:, :2] == 0).all(axis=1)
        return places_I4[is_first_I, 2:].tolist()

    @property
    def image_size(self) -> dict[str, int]:
        """Bounds of the number of pixels of a resized image, as in the settings of transformers' image processor."""
        return dict(self.extras[PATCHES].processing.size)

    @property
    def identity(self) -> bytes:
        """Bytes that are equal for equal images that are processed in the same way."""
        return self.extras[PATCHES].identity

    def with_answer(self, answer: Sequence[int], channel: str | None = None) -> Sample:
        """Return a sample of the prompt and an answer, whose labels are the answer."""
        items = PromptItems(item=self.extras[ITEM].tolist(), axes=self.extras[AXES].tolist())
        positions = range(len(self) + len(answer))
        # The answer continues the positions of the prompt as in decoding, which computed its log-probabilities.
        item = np.array([items.item_of(position) for position in positions])
        axes = np.array([items.axes_of(position) for position in positions])
        weights = [0.0] * len(self) + [1.0] * len(answer)
        sample = make_sample([*self, *answer], weights, channel=channel)
        return sample.with_extras(**{**self.extras, ITEM: item, AXES: axes})

    def __len__(self) -> int:
        return len(self.token_ids)

    def __getitem__(self, index: Any) -> Any:
        return self.token_ids[index]

    def __iter__(self) -> Iterator[int]:
        return iter(self.token_ids)


@dataclass(frozen=True, eq=False)
class ChatPrompt(ImagePrompt):
    """A prompt with images as an OpenAI-compatible server reads it. The server applies the chat template.

    Attributes:
        messages: the turns, in which images are data URIs.
        tools: JSON schemas.
    """

    messages: list[Message]
    tools: list[dict[str, Any]] | None

    @classmethod
    def of(cls, prompt: ImagePrompt, chat: Conversation) -> "ChatPrompt":
        """Read the images of a prompt, which was made from a conversation.

        Raises:
            UserError: an image has changed since the row was read.
        """
        # Images of a prompt have the order of their parts in the messages.
        images = iter(prompt.images)
        messages = []
        for message in chat.messages:
            content = message["content"]
            if not isinstance(content, str):
                content = [_with_data_uri(part, images) for part in content]
            messages.append(message | {"content": content})
        return cls(prompt.token_ids, prompt.extras, messages, chat.tools)


def _with_data_uri(part: Part, images: Iterator[ImageRef]) -> Part:
    if part["type"] != "image":
        return part
    return {"type": "image_url", "image_url": {"url": next(images).data_uri()}}


def needed_length(
    model: HfModel,
    asked: Sequence[Conversation],
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    num_speculative_tokens: int | None,
    max_model_len: int | None = None,
) -> int:
    """Return the maximum sequence length for these prompts and their answers, within the model's limit.

    Args:
        asked: the conversations that `prompts` were made from.
        max_model_len: the user's limit; None without one.

    Raises:
        UserError: a prompt leaves no room for an answer; the error names the row.
    """
    limit = max_model_len or model.config["max_position_embeddings"]
    for chat, prompt in zip(asked, prompts, strict=True):
        if len(prompt) >= limit:
            name = "max_position_embeddings"
            if max_model_len:
                name = "--max_model_len"
            raise UserError(
                f"{chat.source}: the prompt has {len(prompt)} tokens; {name} {limit} leaves no room for an answer",
                "shorten it, or remove the row",
            )
    longest = max(map(len, prompts)) + max_new_tokens
    return sequence_length(model, longest, num_speculative_tokens, max_model_len)


def sequence_length(
    model: HfModel, longest: int, num_speculative_tokens: int | None, max_model_len: int | None = None
) -> int:
    """Return the maximum sequence length that an engine needs, within the model's limit.

    Args:
        longest: maximum length of prompt and answer in tokens.
        max_model_len: the user's limit; None without one.
    """
    # vLLM stops drafting if drafts do not fit, also those from the text: leave room after the last token.
    drafts = 1 + max(num_speculative_tokens or model.heads.drafts, Ngrams().max_tokens)
    return max_model_len or min(model.config["max_position_embeddings"], longest + drafts)


@dataclass(eq=False)
class PromptEncoder:
    """Encodes conversations as prompts of an engine. Logs a warning for the first one with special tokens in its text.

    Attributes:
        template: chat template of the model.
        images: reads the images of rows; None if rows with images are refused.
        no_images: why rows with images are refused; None if they are supported.
    """

    template: ChatTemplate
    images: ImageEncoder | None = None
    no_images: str | None = NO_IMAGES
    _has_warned: bool = field(default=False, init=False)

    @classmethod
    def open(
        cls, args: ImageArgs, model: HfModel, tokenizer: PreTrainedTokenizerBase, info: EngineInfo | None
    ) -> "PromptEncoder":
        """Return the encoder for a model and an engine.

        Args:
            info: None for measurements without an engine.

        Raises:
            UserError: --max_pixels or --min_pixels do not fit the model.
        """
        vocab_size = model.config["vocab_size"]
        try:
            processing = _image_processing(model, tokenizer, info)
        except UserError as error:  # only rows with images are invalid
            return cls(ChatTemplate(tokenizer, vocab_size=vocab_size), no_images=error.problem)
        media_root = None
        if args.media_root is not None:
            media_root = Path(args.media_root)
        images = ImageEncoder(processing.with_bounds(args.max_pixels, args.min_pixels), media_root)
        template = ChatTemplate(tokenizer, vocab_size=vocab_size, images=images.sizes)
        return cls(template, images, no_images=None)

    def __call__(self, chat: Conversation) -> Sequence[int]:
        """Return the tokens of a conversation, followed by the beginning of the next assistant turn; with images, an
        `ImagePrompt`.

        Raises:
            UserError: the template cannot render the conversation, or an image cannot be used; the error names the row.
        """
        try:
            sample = encode_prompt(self.template, chat, self.images)
        except RowError as error:
            raise UserError(f"{chat.source}: {error.problem}", error.hint) from None
        special_token = self.template.special_token_in(chat)
        if special_token and not self._has_warned:
            self._has_warned = True
            logger.warning("%s; further prompts are not reported", special_token_note(chat.source, special_token))
        return prompt_of(sample)

    def with_absolute_paths(self, chat: Conversation) -> Conversation:
        """Return the conversation with absolute paths of images, so that it can be written to another directory.

        Raises:
            UserError: an image cannot be used; the error names the row.
        """
        if self.images is None or not chat.images:
            return chat
        try:
            refs = self.images.read(chat)
        except RowError as error:
            raise UserError(f"{chat.source}: {error.problem}", error.hint) from None
        images = [image._replace(source=ref.source) for image, ref in zip(chat.images, refs, strict=True)]
        return replace(chat, images=tuple(images))


def _image_processing(model: HfModel, tokenizer: PreTrainedTokenizerBase, info: EngineInfo | None) -> ImageProcessing:
    """Return how the model processes images.

    Raises:
        UserError: the model, its files or the engine do not support images. The problem continues a sentence about the
            images of a row.
    """
    if info is not None and (problem := no_images_in(info)):
        raise UserError(problem)
    return ImageProcessing.of_model(model.directory, model.family.name, image_sizes(model.config), tokenizer)


def no_images_in(info: EngineInfo) -> str:
    """Return why an engine does not support images, to follow the name of a row's field; "" if it supports them."""
    if info.supports_images:
        return ""
    return f"is not supported by --infer_backend {info.name}; use --infer_backend transformers or vllm"


def prompt_of(sample: Sample) -> Sequence[int]:
    """Return the tokens of a sample as a prompt; with images, an `ImagePrompt`."""
    ids = sample.input_ids.tolist()
    if not images_of(sample):
        return ids
    return ImagePrompt(ids, sample.extras)


def most_images(prompts: Iterable[Sequence[int]]) -> int:
    """Return the largest number of images of a prompt."""
    return max((len(prompt.images) for prompt in prompts if isinstance(prompt, ImagePrompt)), default=0)
