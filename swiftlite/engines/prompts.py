"""Convert conversations to prompts of an engine, and compute the sequence length that prompts and answers need."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from swiftlite.data.rows.conversation import Conversation, RowError
from swiftlite.data.template import ChatTemplate
from swiftlite.errors import UserError
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

    def __len__(self) -> int:
        return len(self.token_ids)

    def __getitem__(self, index: Any) -> Any:
        return self.token_ids[index]

    def __iter__(self) -> Iterator[int]:
        return iter(self.token_ids)


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
    # vLLM stops drafting if drafts do not fit: leave room after the last token.
    drafts = 1 + (num_speculative_tokens or model.heads.drafts)
    return max_model_len or min(model.config["max_position_embeddings"], longest + drafts)


def encode_prompt(template: ChatTemplate, chat: Conversation) -> list[int]:
    """Return the tokens of a conversation, followed by the beginning of the next assistant turn.

    Raises:
        UserError: the template cannot render the conversation; the error names the row.
    """
    try:
        return template.encode_prompt(chat.messages, chat.tools)
    except RowError as error:
        raise UserError(f"{chat.source}: {error.problem}", error.hint) from None
