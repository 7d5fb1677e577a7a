"""Load rows with answers for one model."""

from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any

from swiftlite.args.fields import ImageArgs
from swiftlite.data.dataset import Data, load_train_val
from swiftlite.data.encoder import ConversationEncoder
from swiftlite.data.rows.conversation import parse_row
from swiftlite.data.template import load_tokenizer
from swiftlite.engines.info import EngineInfo
from swiftlite.engines.prompts import PromptEncoder
from swiftlite.families.resolved import HfModel


def load_rows(
    model: HfModel,
    dataset: Sequence[str],
    *,
    offered: Collection[str] | None = None,
    trust_remote_code: bool = False,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    max_length: int = 2048,
    max_bad_rows: int = 0,
    system: str | None = None,
    images: ImageArgs | None = None,
    info: EngineInfo | None = None,
) -> tuple[PromptEncoder, Data]:
    """Load the rows as held-out samples, with the encoder of the model's prompts.

    Args:
        images: options for rows with images. Default: their defaults.
        info: the engine that answers the prompts; None without an engine.
        offered: names of the command's options; errors only name these options. Default: the options of `megatron sft`.

    Raises:
        UserError: a file cannot be read, there are more bad rows than allowed, or no row is left.
    """
    tokenizer = load_tokenizer(model.directory, trust_remote_code, chat_template_kwargs)
    prompts = PromptEncoder.open(images or ImageArgs(), model, tokenizer, info)
    parse = partial(parse_row, no_images=prompts.no_images)
    encoder = ConversationEncoder(prompts.template, max_length, "right", parse, prompts.images)
    return prompts, load_train_val(encoder, (), dataset, max_bad_rows=max_bad_rows, system=system, offered=offered)
