"""Replace keys, tokens and passwords with *** in log lines and in files that describe a run.

Secrets are identified by names such as api_key, hf_token or ssl_keyfile_password; for example, max_tokens is not a
secret. After `remember`, the values of the given options are hidden wherever they occur. In other texts, such as errors
in options that could not be parsed, the end of a value must be inferred.
"""

import json
import re
from collections.abc import Iterator
from typing import Any

HIDDEN = "***"
_NAME = r"[\w-]*(?:(?:api|access|private|secret)[_-]?keys?|token|secret|password|passwd|credentials?)"
_STRING = r""""(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*'"""
# "api_key": VALUE, in JSON or Python; {api_key: VALUE, which a shell leaves of it without quotes.
_IN_DICT = (
    rf"""(?:["']{_NAME}["']|[{{,]\s*{_NAME})\s*:\s*)({_STRING}|\[(?:{_STRING}|[^\]"'])*\]|\[[^\]]*\]?|[^\s,}}"']+"""
)
# --api-key VALUE, --hf_token=VALUE, API_KEY=VALUE; parts of a shell word can be quoted: 'it'"'"'s'.
_IN_SHELL = rf"""(?:--{_NAME}(?:=|[ \t]+)|\b{_NAME}=))((?:{_STRING}|[^\s"'])+"""
_IN_TEXT = tuple(re.compile(f"({pattern})", re.IGNORECASE) for pattern in (_IN_DICT, _IN_SHELL))
_UNTOLD = ("null", "none", "true", "false")
_SHORTEST = 4
"""Shorter values are not searched for in texts, where they would mostly be something else."""
_known: set[str] = set()


def remember(options: Any) -> None:
    """Let `redact_text` hide the secrets of nested options wherever they occur in a text."""
    for secret in map(str, _secrets(options)):
        if len(secret) >= _SHORTEST:
            in_json = [json.dumps(secret, ensure_ascii=is_ascii) for is_ascii in (True, False)]
            written = [secret, *(text[1:-1] for text in (*in_json, repr(secret)))]
            _known.update(written)
            _known.update(text.replace("'", "'\"'\"'") for text in written)  # within a word that is quoted for a shell


def _secrets(value: Any) -> Iterator[Any]:
    """Yield the secrets of nested options, each element of a list separately."""
    if isinstance(value, dict):
        for name, part in value.items():
            if is_secret(name, part):
                yield from part if isinstance(part, list | tuple) else [part]
            else:
                yield from _secrets(part)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _secrets(part)


def redact(value: Any) -> Any:
    """Return a copy of nested options, with *** for each value whose name identifies a secret."""
    if isinstance(value, dict):
        return {name: _redact_named(name, part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [redact(part) for part in value]
    return value


def _redact_named(name: object, value: Any) -> Any:
    if is_secret(name, value):
        return HIDDEN
    return redact(value)


def redact_text(text: str) -> str:
    """Return a text with *** for each remembered secret, and for each value whose name identifies a secret."""
    for secret in sorted(_known, key=len, reverse=True):  # one can be a part of another
        text = text.replace(secret, HIDDEN)
    for pattern in _IN_TEXT:
        text = pattern.sub(_hide, text)
    return text


def is_secret(name: object, value: Any) -> bool:
    """Return whether an option of this name has a secret as its value."""
    is_told = value is None or isinstance(value, bool | dict)
    return not is_told and re.fullmatch(_NAME, str(name), re.IGNORECASE) is not None


def _hide(found: re.Match[str]) -> str:
    name, value = found.groups()
    if value.lower() in _UNTOLD:
        return found.group()
    quote = ""
    if value[0] in "\"'":
        quote = value[0]
    return f"{name}{quote}{HIDDEN}{quote}"
