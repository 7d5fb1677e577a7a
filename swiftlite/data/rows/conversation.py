"""Parse a row of a data file into a `Conversation`; errors name the invalid field.

Formats: `messages` (roles system, user, assistant, tool), ShareGPT `conversations`, alpaca (`instruction`), `query` and
`response` with `history`, and questions of benchmarks (`benchmark.py`). Files are read in `sources.py`; tokens are made
in `template.py`.
"""

import difflib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, TypeVar

from swiftlite.base.errors import clip
from swiftlite.base.json_file import MAX_DEPTH, is_deeper, parse_json
from swiftlite.data.rows.benchmark import is_question, question_of
from swiftlite.data.rows.image_parts import (
    Message,
    RowImage,
    has_image_parts,
    num_images,
    place_images,
    read_parts,
    texts_of,
)
from swiftlite.data.rows.row_error import RowError, shown

Kind = TypeVar("Kind")

MEDIA = ("images", "videos", "audios")
NO_IMAGES = "is not supported by this command"
"""Why images are refused by default: `megatron pt` reads texts."""
FIELDS = {"messages", "conversations", "instruction", "input", "output", "query", "response", "history", "system"}
FIELDS |= {"tools", "channel", *MEDIA}
FORMATS = 'messages, conversations, query + response, or instruction + output, as {"query": "...", "response": "..."}'

SHAREGPT_ROLES = {
    "system": "system",
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "model", "assistant", "function_call", "tool_call"), "assistant"),
    **dict.fromkeys(("function", "function_response", "observation", "tool", "tool_response"), "tool"),
}

LARGEST_WEIGHT = 1e6
"""Maximum loss weight of a turn, so that sums of weights do not overflow in float32."""
SURROGATE = re.compile("[\ud800-\udfff]")
HALF_A_PAIR = "contains half of a surrogate pair, such as \\ud83d, which is not a character"

# Allowed next roles after each role; None is the start. Two consecutive user or assistant turns usually mean that a
# turn between them is missing, and chat templates raise an error or merge them.
ORDER = {
    "system": (None,),
    "user": (None, "system", "assistant", "tool"),
    "assistant": ("user", "tool"),
    "tool": ("assistant", "tool"),
}


@dataclass(frozen=True)
class BadRow:
    """An invalid row: its location and the reason."""

    source: str
    problem: str
    hint: str = ""

    def __str__(self) -> str:
        return f"{self.source}: {self.problem}"


@dataclass(frozen=True)
class Conversation:
    """The turns of one row, in the format of `apply_chat_template`.

    Attributes:
        messages: the turns with role and content, and optional tool_calls, reasoning_content, name and tool_call_id.
        weights: for each message, the loss weight of its tokens if the turn is trained.
        tools: unchanged JSON schemas.
        channel: name of the row's domain.
        source: `file:line`; for Parquet, the number of the row instead of the line.
        rejected: the rejected answer, an alternative to the last turn; None if the row is not a pair.
        trains_heads: whether MTP heads are trained on the last turn.
        extras: values for the training method, such as a label; see `Sample.extras`.
        images: the images in the order of the turns. A turn with images has a list of parts as content, see
            `image_parts.py`.
    """

    messages: list[Message]
    weights: list[float] = field(default_factory=list)
    tools: list[dict[str, Any]] | None = None
    channel: str | None = None
    source: str = ""
    rejected: Message | None = None
    trains_heads: bool = True
    extras: Mapping[str, Any] = field(default_factory=dict)
    images: tuple[RowImage, ...] = ()

    def prompt(self) -> "Conversation":
        """Return the conversation without a final assistant turn."""
        if self.messages[-1]["role"] != "assistant":
            return self
        messages = self.messages[:-1]
        images = self.images[: num_images(messages)]
        return replace(self, messages=messages, weights=self.weights[:-1], rejected=None, images=images)

    def with_answer(self, text: str) -> "Conversation":
        """Return the conversation with an assistant turn appended."""
        turn = {"role": "assistant", "content": text}
        return replace(self, messages=[*self.messages, turn], weights=[*self.weights, 1.0])

    def other(self) -> "Conversation":
        """Return the conversation with the rejected answer instead of the chosen one."""
        assert self.rejected is not None
        return replace(self, messages=[*self.messages[:-1], self.rejected], rejected=None)

    def with_last_turn_alone(self) -> "Conversation":
        """Return the conversation with only the last turn trained.

        Tool calls before the answer then belong to the prompt.
        """
        return replace(self, weights=[0.0] * (len(self.messages) - 1) + self.weights[-1:])

    def answer(self) -> str | None:
        """Return the text of the last turn if this is an assistant turn; otherwise None."""
        last = self.messages[-1]
        if last["role"] != "assistant":
            return None
        return "".join(texts_of(last))

    def as_row(self) -> dict[str, Any]:
        """Return the row of a dataset file for this conversation."""
        messages = []
        for message, weight in zip(self.messages, self.weights, strict=True):
            if weight != 1:
                message = message | {"loss_scale": weight}
            messages.append(message)
        row: dict[str, Any] = {"messages": messages}
        if self.tools:
            row["tools"] = self.tools
        if self.channel:
            row["channel"] = self.channel
        if self.images:
            row["images"] = [image.to_text() for image in self.images]
        return row


def parse_row(
    row: object,
    *,
    system: str | None = None,
    needs_answer: bool = True,
    source: str = "",
    no_images: str | None = NO_IMAGES,
) -> Conversation:
    """Detect a row's format by its fields, and check every turn.

    Args:
        row: a JSON object or table row. Fields that are None count as missing; unknown fields are ignored unless they
            look like a misspelled known field.
        system: system prompt for rows without one.
        needs_answer: whether the last turn must be an assistant turn, as required for training.
        source: `file:line`, stored in the result.
        no_images: why rows with images are refused; None accepts them.

    Raises:
        RowError: a field is invalid.
    """
    if is_deeper(row, MAX_DEPTH):  # only for tables; JSON was checked when it was parsed
        raise RowError("row", f"is nested more than {MAX_DEPTH} deep")
    if not isinstance(row, dict):
        hint = "rename the file to .json if it is one array" if isinstance(row, list) else ""
        raise RowError("row", f"is {_kind(row)}, not an object", hint)
    if is_question(row):
        text, category = question_of(row, needs_answer)
        row = {"query": text, "channel": category}
    given = row
    row = {key: value for key, value in given.items() if value is not None and value != ""}
    check_media(row, no_images)

    _check_spelling(row)
    if "messages" in row:
        turns = _from_messages(row, "messages", no_images)
    elif "conversations" in row:
        turns = _from_sharegpt(row, no_images)
    elif "instruction" in row or "output" in row:
        turns = _from_alpaca(row, needs_answer)
    elif "query" in given or "response" in given:
        turns = _from_query(row, needs_answer)
    else:
        found = clip(", ".join(map(str, given)), 200) or "nothing"
        hint = f"rows are {FORMATS}"
        if "text" in given:
            hint += "; plain text is for swiftlite megatron pt"
        raise RowError("row", f"has none of the known fields, only {found}", hint)

    if "system" in row:
        if turns and turns[0].message["role"] == "system":
            raise RowError("system", "is given twice, here and as the first turn")
        turns.insert(0, _Turn({"role": "system", "content": _text(row["system"], "system")}, "system"))
    elif system and turns and turns[0].message["role"] != "system":
        turns.insert(0, _Turn({"role": "system", "content": system}, "--system"))
    _check_order(turns, needs_answer)

    channel = row.get("channel")
    if channel is not None:
        _expect(str, channel, "channel", "text")
        if SURROGATE.search(channel):
            raise RowError("channel", HALF_A_PAIR)
    messages, images = [turn.message for turn in turns], ()
    if no_images is None:
        messages, images = place_images(messages, row.get("images"))
    return Conversation(
        messages=messages,
        weights=[turn.weight for turn in turns],
        tools=_tools(row.get("tools")),
        channel=channel,
        source=source,
        images=images,
    )


_INSTEAD = {
    "videos": "remove the row, or give frames of the videos in images",
    "audios": "remove the row, or write what is said in a turn",
}


def check_media(row: dict[str, Any], no_images: str | None) -> None:
    """Reject videos and audios, and images for the reason `no_images`; None accepts images.

    Raises:
        RowError: the row has media that are not supported.
    """
    for media in MEDIA:
        if not row.get(media):
            continue
        if media != "images":
            raise RowError(media, "is not supported", f"swiftlite trains on text and images; {_INSTEAD[media]}")
        if no_images is not None:
            raise RowError(media, no_images, f"remove {media} from the row")


def _check_spelling(row: dict[str, Any]) -> None:
    """Reject an unknown field with a name similar to a known field that is missing.

    Ignoring such a field would lose data.
    """
    if misspelt := _misspelt(frozenset(row)):
        name, meant = misspelt
        raise RowError(name, f"is an unknown field (did you mean {meant}?)", "rename the field if it is your own")


@lru_cache(maxsize=256)
def _misspelt(names: frozenset[str]) -> tuple[str, str] | None:
    """Return an unknown name and a similar known name that is missing; None without such a pair.

    The result is cached, because all rows of a file usually have the same names.
    """
    for name in sorted(map(str, names - FIELDS)):
        if close := difflib.get_close_matches(name, sorted(FIELDS - names), n=1, cutoff=0.8):
            return name, close[0]
    return None


@dataclass
class _Turn:
    message: Message
    path: str  # its location in the row, for errors
    weight: float = 1.0


def _from_messages(row: dict[str, Any], name: str, no_images: str | None) -> list[_Turn]:
    turns = []
    for i, given in enumerate(_list_of_objects(row[name], name)):
        path = f"{name}[{i}]"
        message = {key: value for key, value in given.items() if value is not None}
        weight = _weight(message, path)
        role = message.get("role")
        if not isinstance(role, str) or role not in ORDER:
            raise RowError(f"{path}.role", f"is {shown(role)}, not one of {', '.join(ORDER)}")
        if "tool_calls" in message:
            message["tool_calls"] = _tool_calls(message["tool_calls"], f"{path}.tool_calls")
        if not message.get("tool_calls"):
            message.pop("tool_calls", None)
        elif role != "assistant":
            raise RowError(f"{path}.tool_calls", f"is on a {role} turn; only the assistant calls tools")
        content = message.get("content", "")
        if role == "system" and content == "":
            continue  # many programs write an empty turn instead of no system turn
        if role == "tool" and not isinstance(content, str) and not _is_parts(content):
            content = json.dumps(content, ensure_ascii=False)
        if "reasoning_content" in message:
            _expect(str, message["reasoning_content"], f"{path}.reasoning_content", "text")
        may_be_empty = role == "tool" or "tool_calls" in message
        if no_images is None and isinstance(content, list) and _is_parts(content) and has_image_parts(content):
            message["content"] = read_parts(content, f"{path}.content")
        else:
            message["content"] = _text(content, f"{path}.content", may_be_empty)
        turns.append(_Turn(message, path, weight))
    return turns


def _from_sharegpt(row: dict[str, Any], no_images: str | None) -> list[_Turn]:
    given_turns = _list_of_objects(row["conversations"], "conversations")
    if "role" in given_turns[0]:
        return _from_messages(row, "conversations", no_images)  # many ShareGPT files have role and content
    turns = []
    for i, given in enumerate(given_turns):
        path = f"conversations[{i}]"
        speaker = given.get("from")
        if not isinstance(speaker, str) or speaker not in SHAREGPT_ROLES:
            raise RowError(f"{path}.from", f"is {shown(speaker)}, not one of {', '.join(SHAREGPT_ROLES)}")
        role = SHAREGPT_ROLES[speaker]
        value = given.get("value")
        if role == "system" and value in (None, ""):
            continue
        if speaker in ("function_call", "tool_call"):
            calls = _tool_calls(value, f"{path}.value")
            if not calls:
                raise RowError(f"{path}.value", "is empty")
            message: Message = {"role": role, "content": "", "tool_calls": calls}
        else:
            message = {"role": role, "content": _text(value, f"{path}.value", may_be_empty=role == "tool")}
        turns.append(_Turn(message, path, _weight(dict(given, role=role), path)))
    return turns


def _from_alpaca(row: dict[str, Any], needs_answer: bool) -> list[_Turn]:
    parts = [_text(row[name], name) for name in ("instruction", "input") if name in row]
    if not parts:
        raise RowError("instruction", "is empty")
    question = "\n".join(parts)
    return _history(row) + _question_and_answer(row, question, "output", needs_answer)


def _from_query(row: dict[str, Any], needs_answer: bool) -> list[_Turn]:
    question = _text(row.get("query"), "query")
    return _history(row) + _question_and_answer(row, question, "response", needs_answer)


def _question_and_answer(row: dict[str, Any], question: str, answer_field: str, needs_answer: bool) -> list[_Turn]:
    turns = [_Turn({"role": "user", "content": question}, "query")]
    if needs_answer or answer_field in row:
        answer = _text(row.get(answer_field), answer_field)
        turns.append(_Turn({"role": "assistant", "content": answer}, answer_field))
    return turns


def _history(row: dict[str, Any]) -> list[_Turn]:
    history = _expect(list, _parsed(row.get("history", []), "history"), "history", "a list of [question, answer]")
    turns = []
    for i, pair in enumerate(history):
        if not isinstance(pair, list) or len(pair) != 2:
            raise RowError(f"history[{i}]", "is not a pair [question, answer]")
        for j, role in enumerate(("user", "assistant")):
            path = f"history[{i}][{j}]"
            turns.append(_Turn({"role": role, "content": _text(pair[j], path)}, path))
    return turns


def _check_order(turns: list[_Turn], needs_answer: bool) -> None:
    before = None
    for turn in turns:
        role = turn.message["role"]
        if before not in ORDER[role]:
            if before is None:
                raise RowError(turn.path, f"wrong order: {role} comes first")
            raise RowError(turn.path, f"wrong order: {role} follows {before}")
        before = role
    if not turns:
        raise RowError("row", "has no user turn")
    if before == "system":
        raise RowError(turns[-1].path, "is the last turn; the row has no user turn")
    if needs_answer and before != "assistant":
        raise RowError(turns[-1].path, f"is the last turn and the {before}'s; it must be the assistant's")


def _weight(message: Message, path: str) -> float:
    """Remove `loss` and `loss_scale` from a message, and return its weight."""
    loss = message.pop("loss", None)
    scale = message.pop("loss_scale", None)
    if loss is None and scale is None:
        return 1.0
    if loss is not None and scale is not None:
        raise RowError(f"{path}.loss", "is given together with loss_scale; give only one")
    name, value = "loss", loss
    if loss is None:
        name, value = "loss_scale", scale
    if name == "loss" and not isinstance(value, bool):
        raise RowError(f"{path}.loss", f"is {shown(value)}, not true or false", "use loss_scale for a weight")
    is_number = isinstance(value, int | float) and 0 <= value <= LARGEST_WEIGHT
    if name == "loss_scale" and (isinstance(value, bool) or not is_number):
        raise RowError(f"{path}.loss_scale", f"is {shown(value)}, not a number from 0 to {LARGEST_WEIGHT:g}")
    if value and message.get("role") != "assistant":
        raise RowError(
            f"{path}.{name}", "is on a turn that is not the assistant's", "use --loss_scale all to train on every turn"
        )
    return float(value or 0)


def _tool_calls(value: Any, path: str) -> list[Message]:
    """Return tool calls in the format of chat templates, with arguments as an object.

    Templates pass the arguments to `tojson`.
    """
    calls = _parsed(value, path)
    if calls is None:
        return []
    if isinstance(calls, dict):
        calls = [calls]
    result = []
    for i, call in enumerate(_expect(list, calls, path, "a list of calls")):
        at = f"{path}[{i}]"
        function = None
        if isinstance(call, dict):
            function = call.get("function", call)
        if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
            raise RowError(at, 'is not a call {"function": {"name": "...", "arguments": {...}}}')
        arguments = _parsed(function.get("arguments", function.get("parameters")) or {}, f"{at}.arguments")
        _expect(dict, arguments, f"{at}.arguments", "an object")
        parsed: Message = {"type": "function", "function": {"name": function["name"], "arguments": arguments}}
        if call.get("id") is not None:
            parsed["id"] = call["id"]
        result.append(parsed)
    return result


def _tools(value: Any) -> list[dict[str, Any]] | None:
    tools = _parsed(value, "tools")
    if not tools:
        return None
    for i, tool in enumerate(_expect(list, tools, "tools", "a list of JSON schemas")):
        _expect(dict, tool, f"tools[{i}]", "an object")
    return tools


def _list_of_objects(value: Any, path: str) -> list[dict[str, Any]]:
    items = _expect(list, _parsed(value, path), path, "a list of turns")
    if not items:
        raise RowError(path, "is empty")
    for i, item in enumerate(items):
        _expect(dict, item, f"{path}[{i}]", "an object")
    return items


def _parsed(value: Any, path: str) -> Any:
    """Parse a value that is JSON text; return other values unchanged.

    Tables store nested fields as JSON text.
    """
    if not isinstance(value, str):
        return value
    try:
        return parse_json(value)
    except json.JSONDecodeError as error:
        raise RowError(path, f"is not JSON: {error}") from None


def _is_parts(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(part, dict) and "type" in part for part in value)


def _text(value: Any, path: str, may_be_empty: bool = False) -> str:
    if _is_parts(value):
        others = sorted({str(part["type"]) for part in value} - {"text"})
        if others:
            raise RowError(path, f"has parts of type {', '.join(others)}, which are not supported here")
        value = "".join(_part_text(part, f"{path}[{i}].text") for i, part in enumerate(value))
    if value is None:
        value = ""
    _expect(str, value, path, "text")
    if not value.strip() and not may_be_empty:
        raise RowError(path, "is empty")
    return value


def _part_text(part: dict[str, Any], path: str) -> str:
    text = part.get("text")
    if text is None:
        return ""
    return _expect(str, text, path, "text")


def _expect(kind: type[Kind], value: Any, path: str, words: str) -> Kind:
    """Return the value if it is of this type; `words` names the type, such as "a list of turns"."""
    if not isinstance(value, kind):
        raise RowError(path, f"is {_kind(value)}, not {words}")
    return value


def _kind(value: object) -> str:
    names: list[tuple[type, str]] = [(bool, "a boolean"), (int, "a number"), (float, "a number"), (str, "text")]
    names += [(list, "a list"), (dict, "an object"), (type(None), "null")]
    return next((name for kind, name in names if isinstance(value, kind)), type(value).__name__)
