"""Parse rows with a chosen and a rejected answer into a `Conversation` with `rejected`.

The format of ms-swift is any format of `conversation.py` with the additional field `rejected_response` or
`rejected_messages`. The format of TRL has the fields `chosen`, `rejected` and optionally `prompt`, which are texts or
lists of messages.
"""

from dataclasses import replace
from typing import Any

from swiftlite.data.rows.conversation import MEDIA, NO_IMAGES, Conversation, RowError, parse_row
from swiftlite.data.rows.image_parts import TAG, num_images

FORMATS = '{"query": "...", "response": "...", "rejected_response": "..."}, or prompt, chosen and rejected'
IMAGE_IN_ANSWER = ("has an image, but answers are text", "use images only in the turns before the answer")
SHARED = ("system", "tools", "channel", *MEDIA)
"""Fields of a row that apply to both answers."""


def parse_pair(
    row: object, *, system: str | None = None, source: str = "", no_images: str | None = NO_IMAGES
) -> Conversation:
    """Return the conversation that ends with the preferred answer; its attribute `rejected` is the rejected answer.

    Both answers follow the same turns with the same images.

    Args:
        row: a JSON object or table row in one of the formats in the module docstring.
        system: system prompt for rows without one.
        source: `file:line`, stored in the result.
        no_images: why rows with images are refused; None accepts them.

    Raises:
        RowError: a field is invalid, the two answers are equal, an answer has an image, or the turns before the two
            answers differ.
    """
    if not isinstance(row, dict):
        return parse_row(row, system=system, source=source, no_images=no_images)  # its error names the missing turns
    given = {name: value for name, value in row.items() if value is not None and value != ""}
    shared = {name: given[name] for name in SHARED if name in given}
    if "rejected_response" in given or "rejected_messages" in given:
        rest = {name: value for name, value in given.items() if not name.startswith("rejected_")}
        chosen, rejected = rest, _other_row(given, rest, shared, no_images)
        fields = ("response", "rejected_messages")
        if "rejected_response" in given:
            fields = ("response", "rejected_response")
    elif "chosen" in row or "rejected" in row:
        chosen, rejected = ({**_turns(given, name), **shared} for name in ("chosen", "rejected"))
        fields = ("chosen", "rejected")
    else:
        found = ", ".join(map(str, row)) or "nothing"
        hint = f"rows are {FORMATS}"
        if "label" in row:
            hint = f"use --loss_type kto for single answers with a label; or {hint}"
        raise RowError("row", f"has no rejected answer, only {found[:200]}", hint)

    preferred = _parse(chosen, "", system, source, no_images)
    other = _parse(rejected, fields[1], system, source, no_images)
    for field, conversation in zip(fields, (preferred, other), strict=True):
        check_answer_is_text(conversation, field)
    if preferred.messages[:-1] != other.messages[:-1] or _sources(preferred) != _sources(other):
        hint = "let the two differ in the last turn only"
        raise RowError(fields[1], "follows other turns than the preferred answer", hint)
    if preferred.messages[-1] == other.messages[-1]:
        raise RowError(fields[1], f"is the same as {fields[0]}, so there is nothing to learn", "remove the row")
    return replace(preferred.with_last_turn_alone(), rejected=other.messages[-1])


def check_answer_is_text(conversation: Conversation, field: str) -> None:
    """Check that the last turn has no image.

    Args:
        field: the field with the answer, for errors.

    Raises:
        RowError: the turn has an image.
    """
    if num_images(conversation.messages[-1:]):
        raise RowError(field, *IMAGE_IN_ANSWER)


def _sources(conversation: Conversation) -> list[str | bytes]:
    return [image.source for image in conversation.images]


def _other_row(
    given: dict[str, Any], rest: dict[str, Any], shared: dict[str, Any], no_images: str | None
) -> dict[str, Any]:
    """Return the row that ends with the rejected answer, from a row in the format of ms-swift."""
    if "rejected_response" not in given:
        return {"messages": given["rejected_messages"], **shared}
    text = given["rejected_response"]
    if not isinstance(text, str) or not text.strip():
        raise RowError("rejected_response", "is empty or not text")
    conversation = parse_row(rest, no_images=no_images)
    if conversation.images and TAG in text:
        raise RowError("rejected_response", *IMAGE_IN_ANSWER)
    turns = [*conversation.messages[:-1], {"role": "assistant", "content": text}]
    others = {name: value for name, value in shared.items() if name != "system"}  # now part of the turns
    if conversation.images:  # also those that parts of turns name
        others["images"] = _sources(conversation)
    return {"messages": turns, **others}


def _turns(given: dict[str, Any], name: str) -> dict[str, Any]:
    """Return the row that ends with one answer, from a row in the format of TRL."""
    answer, prompt = given.get(name), given.get("prompt")
    if not answer or (isinstance(answer, str) and not answer.strip()):
        raise RowError(name, "is empty or missing", f"rows are {FORMATS}")
    if isinstance(answer, str):
        if prompt is None:
            raise RowError("prompt", f"is missing, and {name} is a text", "add prompt, or use lists of messages")
        if isinstance(prompt, str):
            return {"query": prompt, "response": answer}
        answer = [{"role": "assistant", "content": answer}]
    begins_with_answer = (
        isinstance(answer, list) and isinstance(answer[0], dict) and answer[0].get("role") == "assistant"
    )
    if prompt is None or not begins_with_answer:  # otherwise the list contains the prompt
        return {"messages": answer}
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    if not isinstance(prompt, list):
        raise RowError("prompt", "is neither a text nor a list of messages")
    return {"messages": [*prompt, *answer]}


def _parse(row: dict[str, Any], field: str, system: str | None, source: str, no_images: str | None) -> Conversation:
    """Call `parse_row`, and name the field of the answer in its errors."""
    try:
        return parse_row(row, system=system, source=source, no_images=no_images)
    except RowError as error:
        if not field:
            raise
        raise RowError(field, error.problem, error.hint) from None
