"""Parse rows with prompts for `megatron grpo`.

A row has any format of `conversation.py`, with or without an answer, or TRL's field `prompt`, a text or a list of
messages. Fields that are not part of the conversation are kept for reward functions.
"""

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from swiftlite.data.rows.conversation import FIELDS, MEDIA, NO_IMAGES, Conversation, RowError, parse_row

COLUMNS = "columns"
"""Name of the extra with the other fields of a row, as JSON."""
OMITTED = "omitted"
"""Name of the extra with the fields that JSON cannot represent, such as dates: their types by name, as JSON."""
TURNS = "turns"
"""Name of the extra with the messages of the prompt, as JSON."""
_OF_CONVERSATION = FIELDS - {"channel", "tools"}
FORMATS = '{"query": "..."}, {"messages": [...]} or {"prompt": "..."}'


def parse_prompt(
    row: object,
    *,
    system: str | None = None,
    source: str = "",
    no_images: str | None = NO_IMAGES,
    tools: Sequence[dict[str, Any]] = (),
) -> Conversation:
    """Return the turns before the answer. The other fields of the row are stored in extras (`COLUMNS`).

    Args:
        row: a JSON object or table row in one of the formats in the module docstring.
        system: system prompt for rows without one.
        source: `file:line`, stored in the result.
        no_images: why rows with images are refused.
        tools: JSON schemas of the tools of all rows (`--tools`).

    Raises:
        RowError: a field is invalid, or rows with tools of their own are not possible.
    """
    if not isinstance(row, dict):
        return parse_row(row, system=system, source=source, no_images=no_images)  # its error names the missing turns
    turns = {name: value for name, value in row.items() if name in FIELDS}
    columns = {name: value for name, value in row.items() if name not in _OF_CONVERSATION}
    if "prompt" in row:
        turns = _from_prompt(row)
        del columns["prompt"]
    elif not turns.keys() - {"system", "channel", "tools"}:
        raise RowError("row", "has no prompt", f"rows are {FORMATS}")
    conversation = parse_row(turns, system=system, needs_answer=False, source=source, no_images=no_images).prompt()
    if tools:
        if conversation.tools:
            raise RowError("tools", "are those of all rows with --tools", "remove this field")
        conversation = replace(conversation, tools=list(tools))
    omitted = {name: type(value).__name__ for name, value in columns.items() if not _is_json(value)}
    kept = {name: value for name, value in columns.items() if name not in omitted}
    extras = {COLUMNS: json.dumps(kept, sort_keys=True), OMITTED: json.dumps(omitted)}
    return replace(conversation, extras=extras | {TURNS: json.dumps(conversation.messages)})


def _is_json(value: Any) -> bool:
    try:
        json.dumps(value, sort_keys=True)
    except (TypeError, ValueError):
        return False
    return True


def _from_prompt(row: dict[str, Any]) -> dict[str, Any]:
    """Return the row of `conversation.py` for a row with TRL's field `prompt`."""
    shared = {name: row[name] for name in ("system", "tools", "channel", *MEDIA) if name in row}
    prompt = row["prompt"]
    if isinstance(prompt, str):
        return {"query": prompt, **shared}
    return {"messages": prompt, **shared}
