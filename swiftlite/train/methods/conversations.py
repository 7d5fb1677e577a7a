"""Functions shared by training methods: encode conversations, read files, and select prompts for acceptance.json."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from swiftlite.acceptance.held_out import Prompt
from swiftlite.args.commands import SftArgs
from swiftlite.base.errors import UserError
from swiftlite.data.batch import Extra
from swiftlite.data.dataset import Data, load_train_val
from swiftlite.data.encoder import ConversationEncoder, Encoder, PromptEncoder, encode_prompt
from swiftlite.data.image_inputs import ImageEncoder, ImageProcessing, image_extras, images_of
from swiftlite.data.rows.conversation import Conversation, parse_row
from swiftlite.data.rows.image_parts import TAG
from swiftlite.data.rows.mock import MockSamples, mock_lengths
from swiftlite.data.template import ChatTemplate, stop_token_ids
from swiftlite.families.index import image_sizes
from swiftlite.families.resolved import HfModel
from swiftlite.runtime.agreement import digest
from swiftlite.runtime.mesh import Mesh
from swiftlite.train.phases import Run
from swiftlite.train.shared_rows import open_row_cache

MakeEncoder = Callable[[Any, PreTrainedTokenizerBase, HfModel], Encoder]
"""A function that makes an encoder of rows from the options, the tokenizer and the model."""
IMAGES = "images"
"""Channel of held-out prompts with images whose rows have no channel."""
LoadData = Callable[[Any, Encoder, int], Data]
"""A function that reads the data of a run, given the options, the encoder and the size of the vocabulary."""


def make_conversation_encoder(
    args: SftArgs,
    tokenizer: PreTrainedTokenizerBase,
    hf_model: HfModel,
    parse: Callable[..., Conversation] = parse_row,
) -> Encoder:
    """Return the encoder of rows, which can have images if the model and the run support them.

    Args:
        parse: defines the format of rows, by default conversations. Its argument `no_images` is the reason why images
            are refused; None accepts them.

    Raises:
        UserError: --max_pixels or --min_pixels do not fit the model.
    """
    images, no_images = open_image_encoder(args, tokenizer, hf_model)
    template = ChatTemplate(tokenizer, args.loss_scale, hf_model.config["vocab_size"], images and images.sizes)
    row_parser = partial(parse, no_images=no_images)
    return ConversationEncoder(template, args.max_length, args.truncation_strategy, row_parser, images)


def open_image_encoder(
    args: SftArgs, tokenizer: PreTrainedTokenizerBase, hf_model: HfModel
) -> tuple[ImageEncoder | None, str | None]:
    """Return the encoder of images and None, or None and the reason why rows with images are refused.

    Raises:
        UserError: --max_pixels or --min_pixels do not fit the model.
    """
    try:
        processing = image_processing_of(args, tokenizer, hf_model)
    except UserError as error:  # only rows with images are invalid
        return None, error.problem
    processing = processing.with_bounds(args.max_pixels, args.min_pixels)
    return ImageEncoder(processing, Path(args.media_root) if args.media_root else None), None


def image_processing_of(args: SftArgs, tokenizer: PreTrainedTokenizerBase, hf_model: HfModel) -> ImageProcessing:
    """Return how the model processes images.

    Raises:
        UserError: the model, its files or an option of the run do not support images. The problem continues a sentence
            about the images of a row.
    """
    if args.streaming:
        raise UserError("is not supported with --streaming true")
    sizes = image_sizes(hf_model.config)
    return ImageProcessing.of_model(hf_model.directory, hf_model.family.name, sizes, tokenizer)


def image_extras_of(hf_model: HfModel, mesh: Mesh) -> Sequence[Extra]:
    """Return the tensors that batches of this rank contain if rows have images."""
    sizes = image_sizes(hf_model.config)
    assert sizes is not None  # the encoder refuses images of other models
    return image_extras(sizes, has_tower=mesh.is_here and mesh.pp.rank() == 0)


def load_data(args: SftArgs, encoder: Encoder, vocab_size: int, offered: Collection[str] | None = None) -> Data:
    """Load the held-out samples and, unless --streaming reads them during training, the training samples. Collective.

    Args:
        offered: names of options that errors may suggest; default: all.

    Raises:
        UserError: a file or a row is invalid.
    """
    mock = args.sft_mock_dataset_config_json
    files, ratio, shares = args.dataset, args.split_dataset_ratio, args.interleave_prob
    if args.streaming or mock is not None:  # only held-out files are read now
        files, ratio, shares = [], 0.0, []
    with open_row_cache(args.dataset_cache) as cache:
        data = load_train_val(
            encoder,
            files,
            args.val_dataset,
            split_dataset_ratio=ratio,
            max_bad_rows=args.max_bad_rows,
            system=args.system,
            num_proc=args.dataset_num_proc,
            seed=args.seed,
            interleave_prob=shares,
            offered=offered,
            cache=cache,
        )
    if mock is None:
        return data
    samples = MockSamples(mock_lengths(mock, seed=args.seed), vocab_size, args.seed)
    longest = int(samples.lengths.max())
    if longest > args.max_length:
        raise UserError(
            f"--sft_mock_dataset_config_json: a sample has {longest} tokens, over --max_length {args.max_length}",
            f"use --max_length {longest}",
        )
    data.report.train_samples = len(samples)
    return replace(data, train=samples, digest=digest({"lengths": samples.lengths.tolist(), "val": data.digest}))


def conversation_prompts(run: Run) -> tuple[Sequence[Prompt], Collection[int | None]]:
    """Return the first held-out prompts of the run, and the tokens that end an answer.

    Prompts with images are a channel, unless their rows have one.
    """
    template = ChatTemplate(run.tokenizer)
    images = None
    if isinstance(run.encoder, ConversationEncoder | PromptEncoder) and run.encoder.images:
        template, images = run.encoder.template, run.encoder.images
    prompts = []
    for conversation in run.data.val_conversations[: run.args.acceptance_samples]:
        asked = conversation.prompt()
        sample = encode_prompt(template, asked, images)
        channel = asked.channel or ""
        if asked.images:
            channel = asked.channel or IMAGES
        prompts.append(Prompt(sample.input_ids.tolist(), _shown(asked), channel, sample.extras, images_of(sample)))
    return prompts, stop_token_ids(template, run.hf_model.directory)


def _shown(asked: Conversation) -> str:
    """Return the text of the last turn, with a tag for each image."""
    content = asked.messages[-1]["content"]
    if isinstance(content, str):
        return content
    return "".join(part.get("text", TAG) for part in content)
