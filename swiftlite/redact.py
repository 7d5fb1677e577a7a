"""Replace keys, tokens and passwords with *** in log lines and in files that describe a run.

Secrets are identified by names such as api_key, hf_token or ssl_keyfile_password; for example, max_tokens is not a
secret.
"""

import re
from typing import Any

HIDDEN = "***"
_NAME = r"[\w-]*(?:api[_-]?key|token|secret|password|passwd|credentials?)"
_STRING = r""""(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*'"""
# "api_key": VALUE, in JSON or Python.
_IN_DICT = rf"""["']{_NAME}["']\s*:\s*)({_STRING}|\[[^\]]*\]|[^\s,}}"']+"""
# --api-key VALUE, --hf_token=VALUE, API_KEY=VALUE; parts of a shell word can be quoted: 'it'"'"'s'.
_IN_SHELL = rf"""(?:--{_NAME}(?:=|\s+)|\b{_NAME}=))((?:{_STRING}|[^\s,}}"'])+"""
_IN_TEXT = tuple(re.compile(f"({pattern})", re.IGNORECASE) for pattern in (_IN_DICT, _IN_SHELL))
_UNTOLD = ("null", "none", "true", "false")


def redact(value: Any) -> Any:
    """Return a copy of nested options, with *** for each value whose name identifies a secret."""
    if isinstance(value, dict):
        return {name: _redact_named(name, part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [redact(part) for part in value]
    return value


def _redact_named(name: object, value: Any) -> Any:
    if _is_secret(name, value):
        return HIDDEN
    return redact(value)


def redact_text(text: str) -> str:
    """Return a line of text, with *** for each value whose name identifies a secret."""
    for pattern in _IN_TEXT:
        text = pattern.sub(_hide, text)
    return text


def _is_secret(name: object, value: Any) -> bool:
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
