"""Load rows for one model: with answers, or only questions."""

from collections.abc import Collection, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any

from swiftlite.args.data_fields import ImageArgs
from swiftlite.args.data_file import prepared_files
from swiftlite.data.dataset import Data, DataReport, load_prompts, load_train_val
from swiftlite.data.encoder import ConversationEncoder
from swiftlite.data.rows.conversation import Conversation, parse_row
from swiftlite.data.rows.sources import checked_rows, find_rows
from swiftlite.data.template import load_tokenizer
from swiftlite.engines.info import EngineInfo
from swiftlite.engines.prompts import PromptEncoder
from swiftlite.families.resolved import HfModel


def have_answers(dataset: Sequence[str]) -> bool:
    """Return whether a row of the files has an answer; questions of benchmarks have none.

    If only some rows have one, the others are bad rows, which `load_rows` names. Also true if no row can be read.
    """
    files = chain.from_iterable(map(prepared_files, dataset))
    parse = partial(parse_row, needs_answer=False, no_images=None)
    has_question = False
    for file in map(find_rows, files):
        for _, row in checked_rows(file, system=None, parse=parse):
            if isinstance(row, Conversation):
                if row.answer() is not None:
                    return True
                has_question = True
    return not has_question


def load_rows(
    model: HfModel,
    dataset: Sequence[str],
    *,
    has_answers: bool = True,
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
        has_answers: whether the rows have answers. Otherwise only an engine can answer them, and there are no samples.
        images: options for rows with images. Default: their defaults.
        info: the engine that answers the prompts; None without an engine.
        offered: names of the command's options; errors only name these options. Default: the options of `megatron sft`.

    Raises:
        UserError: a file cannot be read, there are more bad rows than allowed, or no row is left.
    """
    tokenizer = load_tokenizer(model.directory, trust_remote_code, chat_template_kwargs)
    prompts = PromptEncoder.open(images or ImageArgs(), model, tokenizer, info)
    if not has_answers:
        chats = load_prompts(dataset, system=system, max_bad_rows=max_bad_rows, no_images=prompts.no_images)
        return prompts, Data([], [], chats, DataReport(), "")
    parse = partial(parse_row, no_images=prompts.no_images)
    encoder = ConversationEncoder(prompts.template, max_length, "right", parse, prompts.images)
    return prompts, load_train_val(encoder, (), dataset, max_bad_rows=max_bad_rows, system=system, offered=offered)
