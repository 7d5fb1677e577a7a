"""Parse rows with a chosen and a rejected answer into a `Conversation` with `rejected`.

Formats: any of `conversation.py` with `rejected_response` or `rejected_messages`, as in ms-swift; `chosen` and
`rejected` with or without `prompt`, as texts or lists of messages, as in TRL."""

from dataclasses import replace
from typing import Any

from swiftlite.data.rows.conversation import Conversation, RowError, parse_row

FORMATS = '{"query": "...", "response": "...", "rejected_response": "..."}, or prompt, chosen and rejected'
SHARED = ("system", "tools", "channel")
"""Fields of a row that stand beside the turns."""


def parse_pair(row: object, *, system: str | None = None, source: str = "") -> Conversation:
    """The conversation that ends with the preferred answer; `rejected` is the assistant's other turn.

    Args:
        row, system, source: as for `parse_row`.

    Raises:
        RowError: naming the field; also where the answers are equal, or follow different turns.
    """
    if not isinstance(row, dict):
        return parse_row(row, system=system, source=source)  # which is part of the message
    given = {name: value for name, value in row.items() if value is not None and value != ""}
    shared = {name: given[name] for name in SHARED if name in given}
    if "rejected_response" in given or "rejected_messages" in given:
        rest = {name: value for name, value in given.items() if not name.startswith("rejected_")}
        chosen, rejected = rest, _other_row(given, rest, shared)
        fields = ("response", "rejected_response" if "rejected_response" in given else "rejected_messages")
    elif "chosen" in row or "rejected" in row:
        chosen, rejected = ({**_turns(given, name), **shared} for name in ("chosen", "rejected"))
        fields = ("chosen", "rejected")
    else:
        found = ", ".join(map(str, row)) or "nothing"
        hint = "--loss_type kto learns from single answers with a label; or " if "label" in row else ""
        raise RowError("row", f"has no rejected answer, only {found[:200]}", f"{hint}rows are {FORMATS}")

    preferred = _parse(chosen, "", system, source)
    other = _parse(rejected, fields[1], system, source)
    if preferred.messages[:-1] != other.messages[:-1]:
        raise RowError(fields[1], "follows other turns than the preferred answer", "the two differ in the last turn")
    if preferred.messages[-1] == other.messages[-1]:
        raise RowError(fields[1], f"is the same as {fields[0]}: a tie teaches nothing", "leave the row out")
    return replace(preferred.with_last_turn_alone(), rejected=other.messages[-1])


def _other_row(given: dict[str, Any], rest: dict[str, Any], shared: dict[str, Any]) -> dict[str, Any]:
    """The row that ends with the rejected answer, of a row as ms-swift has it."""
    if "rejected_response" not in given:
        return {"messages": given["rejected_messages"], **shared}
    text = given["rejected_response"]
    if not isinstance(text, str) or not text.strip():
        raise RowError("rejected_response", "is empty or no text")
    conversation = parse_row(rest)
    turns = [*conversation.messages[:-1], {"role": "assistant", "content": text}]
    beside = {name: value for name, value in shared.items() if name != "system"}  # among the turns by now
    return {"messages": turns, **beside}


def _turns(given: dict[str, Any], name: str) -> dict[str, Any]:
    """The row that ends with one answer, of a row as TRL has it."""
    answer, prompt = given.get(name), given.get("prompt")
    if not answer or (isinstance(answer, str) and not answer.strip()):
        raise RowError(name, "is empty or missing", f"rows are {FORMATS}")
    if isinstance(answer, str):
        if prompt is None:
            raise RowError("prompt", f"is missing beside {name}, which is a text", "or give lists of messages")
        if isinstance(prompt, str):
            return {"query": prompt, "response": answer}
        answer = [{"role": "assistant", "content": answer}]
    begins_with_answer = (
        isinstance(answer, list) and isinstance(answer[0], dict) and answer[0].get("role") == "assistant"
    )
    if prompt is None or not begins_with_answer:  # a longer list contains the prompt
        return {"messages": answer}
    before = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    if not isinstance(before, list):
        raise RowError("prompt", "is neither a text nor a list of messages")
    return {"messages": [*before, *answer]}


def _parse(row: dict[str, Any], field: str, system: str | None, source: str) -> Conversation:
    """`parse_row`, whose errors name the field of the answer."""
    try:
        return parse_row(row, system=system, source=source)
    except RowError as error:
        if not field:
            raise
        raise RowError(field, error.problem, error.hint) from None
