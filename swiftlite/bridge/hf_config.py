"""config.json: read it, and change single keys of it. It is never written anew: engines read keys that no class of ours
or of transformers knows, so everything that is not declared as changed stays byte for byte.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from swiftlite.bridge.tensors import write_durably
from swiftlite.errors import UserError

_WHITESPACE = " \t\n\r"
REMOVE: Any = object()  # as a change: the key goes


def read_config(hf_dir: str | Path) -> dict[str, Any]:
    """The content of a model directory's config.json.

    Raises:
        UserError: there is none, or it is not a JSON object.
    """
    path = Path(hf_dir) / "config.json"
    try:
        hf_config = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(f"{hf_dir}: no config.json", "give the directory of a Hugging Face model") from None
    except ValueError as error:
        raise UserError(f"{path}: not valid JSON ({error})") from error
    if not isinstance(hf_config, dict):
        raise UserError(f"{path}: not a JSON object")
    return hf_config


def dtype_change(hf_config: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    """The change that declares another dtype, under the key that this config uses (formerly `torch_dtype`)."""
    key = "torch_dtype" if "torch_dtype" in hf_config else "dtype"
    return {} if hf_config.get(key) == dtype else {key: dtype}


def quantization_change(hf_config: Mapping[str, Any]) -> dict[str, Any]:
    """The change for a model that was read from a quantised checkpoint and is written without quantisation."""
    return {"quantization_config": REMOVE} if "quantization_config" in hf_config else {}


def write_patched(source_dir: str | Path, out_dir: str | Path, changes: Mapping[str, Any]) -> list[str]:
    """Copy config.json with some top-level keys changed, added or removed (REMOVE).

    Returns:
        The difference, one line per key that really changed: `key: old -> new`.
    """
    read_config(source_dir)
    # Bytes, because text mode would change the line endings.
    text, difference = patch((Path(source_dir) / "config.json").read_bytes().decode("utf-8"), changes)
    write_durably(Path(out_dir) / "config.json", text.encode("utf-8"))
    return difference


def patch(text: str, changes: Mapping[str, Any]) -> tuple[str, list[str]]:
    """Change, add or remove top-level keys of a JSON object, leaving every other byte as it is.

    Args:
        text: a valid JSON object.
        changes: new values by key; REMOVE takes a key out.

    Returns:
        The new text, and one line per key whose value differs from before.
    """
    difference = []
    for key, value in changes.items():
        while value is REMOVE and (member := _members(text).get(key)):
            difference.append(f"{key}: {text[member.value_start : member.value_end]} -> (none)")
            text = _remove(text, member)
    changes = {key: value for key, value in changes.items() if value is not REMOVE}
    members = _members(text)
    # From the end, so that the positions of what comes before stay true.
    for key, member in sorted(members.items(), key=lambda item: -item[1].value_start):
        if key in changes and json.loads(text[member.value_start : member.value_end]) != changes[key]:
            new = json.dumps(changes[key], ensure_ascii=False)
            difference.append(f"{key}: {text[member.value_start : member.value_end]} -> {new}")
            text = text[: member.value_start] + new + text[member.value_end :]
    for key in changes:
        if key not in members:
            new = json.dumps(changes[key], ensure_ascii=False)
            difference.append(f"{key}: (none) -> {new}")
            text = _insert(text, f"{json.dumps(key, ensure_ascii=False)}: {new}")
    return text, sorted(difference)


class _Member(NamedTuple):
    key_start: int
    value_start: int
    value_end: int


def _members(text: str) -> dict[str, _Member]:
    """Where each top-level member of a JSON object stands; of a repeated key the last, which JSON readers use."""
    members = {}
    position = _skip(text, text.index("{") + 1)
    while text[position] != "}":
        key_start = position
        key, position = json.JSONDecoder().raw_decode(text, position)
        value_start = _skip(text, _skip(text, position) + 1)  # past the colon
        _, value_end = json.JSONDecoder().raw_decode(text, value_start)
        members[key] = _Member(key_start, value_start, value_end)
        position = _skip(text, value_end)
        if text[position] == ",":
            position = _skip(text, position + 1)
    return members


def _remove(text: str, member: _Member) -> str:
    """Take a member out with the comma and the white space that set it off from its neighbours."""
    after = _skip(text, member.value_end)
    if text[after] == ",":
        return text[: member.key_start] + text[_skip(text, after + 1) :]
    before = text[: member.key_start].rstrip(_WHITESPACE)  # the last member: the comma before it goes
    return before.removesuffix(",") + text[member.value_end :]


def _insert(text: str, member: str) -> str:
    """Add a member at the end of the object, set off like the ones before it."""
    members = _members(text)
    if not members:
        opening = text.index("{") + 1
        return text[:opening] + member + text[opening:]
    last = max(members.values(), key=lambda one: one.key_start)
    before = text[: last.key_start]
    separator = before[len(before.rstrip(_WHITESPACE)) :]
    return f"{text[: last.value_end]},{separator}{member}{text[last.value_end :]}"


def _skip(text: str, position: int) -> int:
    while text[position] in _WHITESPACE:
        position += 1
    return position
