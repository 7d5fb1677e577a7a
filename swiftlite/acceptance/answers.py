"""Attribute each token of a held-out answer to the trunk or to the head that drafted it, for reports."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, cast

from transformers import PreTrainedTokenizerBase

from swiftlite.acceptance.counts import DraftStep

MAX_PENDING = 4
"""Maximum number of tokens that can share one character: UTF-8 has at most 4 bytes per character."""


class WrittenToken(NamedTuple):
    """A token of an answer.

    Attributes:
        depth: depth of the head that drafted the token; 0 if the trunk generated it.
        refused: draft token that was rejected at this position; None if no draft token was rejected.
    """

    token: int
    depth: int
    refused: int | None


def written_tokens(answer: Sequence[int], steps: Iterable[DraftStep]) -> list[WrittenToken]:
    """Return the tokens of a greedy answer, each with the head that drafted it.

    Args:
        answer: token ids. The first token is generated from the prompt, without a draft.
        steps: result of `draft_steps(..., first=1)` for a row that consists of the prompt's last token and the answer.
    """
    written = [WrittenToken(token, 0, None) for token in answer]
    for place, drafts, accepted in steps:
        begin = place - 1  # the row starts one token before the answer
        for position in range(accepted):
            written[begin + position] = WrittenToken(drafts[position], position + 1, None)
        for refused in drafts[accepted:]:
            written[begin + accepted] = WrittenToken(answer[begin + accepted], 0, refused)
    return written


def describe(tokenizer: PreTrainedTokenizerBase, answer: Sequence[WrittenToken]) -> list[dict[str, Any]]:
    """Return the tokens in the format of drafts.json: text and depth of each token, and the text of a rejected draft
    token.
    """
    texts = token_texts(tokenizer, [each.token for each in answer])
    described = []
    for text, (_, depth, refused) in zip(texts, answer, strict=True):
        token: dict[str, Any] = {"text": text, "depth": depth}
        if refused is not None:
            token["refused"] = _decode(tokenizer, [refused])
        described.append(token)
    return described


def token_texts(tokenizer: PreTrainedTokenizerBase, tokens: Sequence[int]) -> list[str]:
    """Return the text that each token adds. It is "" if only a later token completes the character.

    Each token is decoded together with the previous token, because some tokenizers drop the leading space of a single
    token.
    """
    texts: list[str] = []
    before = 0
    begin = 0
    for end in range(1, len(tokens) + 1):
        known = _decode(tokenizer, tokens[before:begin])
        text = _decode(tokenizer, tokens[before:end])
        is_half = text.endswith("\ufffd") and end - begin < MAX_PENDING and end < len(tokens)
        if is_half:
            texts.append("")
            continue
        texts.append(text[len(known) :])
        before = begin
        begin = end
    return texts


def _decode(tokenizer: PreTrainedTokenizerBase, tokens: Sequence[int]) -> str:
    text = tokenizer.decode(list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return cast(str, text)  # it is a list only for a batch
