"""Parse rows with plain text, for `megatron pt`.

A row has the field `text`, or a single assistant turn as in ms-swift, `{"messages": [{"role": "assistant", "content":
"..."}]}`. A .txt file is a single row.
"""

from typing import Any

from swiftlite.data.rows.conversation import HALF_A_PAIR, NO_IMAGES, SURROGATE, Conversation, RowError, check_media


def parse_document(row: object, *, system: str | None = None, source: str = "") -> Conversation:
    """Return the document as a conversation of one assistant turn.

    Args:
        row: a JSON object or table row in one of the formats in the module docstring.
        source: `file:line`, stored in the result.
        system: not used; `megatron pt` does not support --system.

    Raises:
        RowError: a field is invalid.
    """
    hint = 'rows are {"text": "..."}'
    if not isinstance(row, dict):
        raise RowError("row", "is not an object", hint)
    check_media(row, NO_IMAGES)
    field, text = _text_of(row, hint)
    if not isinstance(text, str):
        raise RowError(field, f"is {type(text).__name__}, not text", hint)
    if not text.strip():
        raise RowError(field, "is empty")
    if SURROGATE.search(text):
        raise RowError(field, HALF_A_PAIR)
    channel = row.get("channel")
    if channel is not None and not isinstance(channel, str):
        raise RowError("channel", "is not text")
    return Conversation([{"role": "assistant", "content": text}], [1.0], channel=channel, source=source)


def _text_of(row: dict[str, Any], hint: str) -> tuple[str, Any]:
    """Return the name and the content of the field that contains the text."""
    messages = row.get("messages")
    if row.get("text") is None and isinstance(messages, list) and len(messages) == 1:
        turn = messages[0]
        if isinstance(turn, dict) and turn.get("role") == "assistant":
            return "messages[0].content", turn.get("content")
    if row.get("text") is None:
        if messages or row.get("query") or row.get("conversations") or row.get("instruction"):
            raise RowError("row", "is a conversation, not a document", f"use swiftlite megatron sft; here {hint}")
        raise RowError("text", "is missing", hint)
    return "text", row["text"]
