"""JSON that nobody vouches for: what the standard library reads, where every fault of a text is a JSONDecodeError and
nothing is so deep that code which walks through it would end in a RecursionError.
"""

import errno
import json
from pathlib import Path
from typing import Any

MAX_DEPTH = 100
"""Lists and objects within each other. Tools of real rows nest some 20; Python gives up near 1000."""


def parse_json(text: str) -> Any:
    """The value that a text is.

    Raises:
        JSONDecodeError: it is none, is nested too deeply, or has a number of too many digits.
    """
    value, end = decode_json(text, skip_space(text, 0))
    end = skip_space(text, end)
    if end < len(text):
        raise json.JSONDecodeError("Extra data", text, end)
    return value


def decode_json(text: str, position: int) -> tuple[Any, int]:
    """The value that begins at a place in a text, and where it ends.

    Raises:
        JSONDecodeError: see `parse_json`.
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


def read_json(path: Path) -> Any:
    """The value in a file.

    Raises:
        OSError: there is no such file, or it is none that ends: a pipe, a device.
        ValueError: it is not UTF-8, or not JSON (JSONDecodeError).
    """
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return parse_json(path.read_text(encoding="utf-8"))


def skip_space(text: str, position: int) -> int:
    """Where the white space that JSON allows at a place ends."""
    while position < len(text) and text[position] in " \t\r\n":
        position += 1
    return position


def is_deeper(value: Any, depth: int) -> bool:
    """Whether more than `depth` lists and objects stand within each other."""
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
