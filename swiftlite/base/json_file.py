"""Read untrusted JSON. Every invalid text raises a JSONDecodeError.

The accepted texts are those of the standard library, except deeply nested values, for which recursive code could raise
a RecursionError.
"""

import errno
import json
from collections import Counter
from pathlib import Path
from typing import Any

MAX_DEPTH = 100
"""Maximum depth of nested lists and objects. Rows with tools have a depth of about 20; Python fails near 1000."""


def parse_json(text: str) -> Any:
    """Return the value of a JSON text.

    Raises:
        JSONDecodeError: the text is not JSON, is nested too deeply, or has a number with too many digits.
    """
    value, end = decode_json(text, skip_space(text, 0))
    end = skip_space(text, end)
    if end < len(text):
        raise json.JSONDecodeError("Extra data", text, end)
    return value


def decode_json(text: str, position: int) -> tuple[Any, int]:
    """Return the value that starts at a position in a text, and the position where it ends.

    Raises:
        JSONDecodeError: the text is not JSON, is nested too deeply, or has a number with too many digits.
    """
    try:
        value, end = _DECODER.raw_decode(text, position)
    except json.JSONDecodeError:
        raise
    except RecursionError:
        raise _too_deep(text, position) from None
    except ValueError:  # sys.get_int_max_str_digits()
        raise json.JSONDecodeError("a number of more than 4300 digits", text, position) from None
    brackets = text.count("[", position, end) + text.count("{", position, end)
    if brackets > MAX_DEPTH and is_deeper(value, MAX_DEPTH):
        raise _too_deep(text, position)
    return value, end


def repeated_keys(text: str) -> list[str]:
    """Return the keys that an object in a text has more than once.

    Args:
        text: a text that `parse_json` accepts.
    """
    found: list[str] = []

    def look(pairs: list[tuple[str, Any]]) -> None:
        counts = Counter(key for key, _ in pairs)
        found.extend(key for key, count in counts.items() if count > 1)

    json.loads(text, object_pairs_hook=look)
    return found


def read_json(path: Path) -> Any:
    """Return the value in a JSON file.

    Raises:
        OSError: the file does not exist, or is not a regular file. Pipes and devices are rejected, because they may
            never end.
        ValueError: the file is not UTF-8, or not JSON (JSONDecodeError).
    """
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return parse_json(path.read_text(encoding="utf-8"))


def skip_space(text: str, position: int) -> int:
    """Return the position after the JSON white space that starts at `position`."""
    while position < len(text) and text[position] in " \t\r\n":
        position += 1
    return position


def is_deeper(value: Any, depth: int) -> bool:
    """Return whether lists and objects in a value are nested more than `depth` levels deep."""
    level = [value]
    for _ in range(depth):
        inner: list[Any] = []
        for outer in level:
            if isinstance(outer, dict):
                inner += outer.values()
            elif isinstance(outer, list):
                inner += outer
        level = inner
    return any(isinstance(value, dict | list) for value in level)


_DECODER = json.JSONDecoder()


def _too_deep(text: str, position: int) -> json.JSONDecodeError:
    return json.JSONDecodeError(f"nested more than {MAX_DEPTH} deep", text, position)
