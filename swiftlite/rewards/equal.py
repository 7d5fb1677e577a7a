"""Compare answers with references by math-verify. Importing this module imports sympy."""

import logging
import re
from functools import partial

from math_verify import parse, verify  # pyright: ignore[reportMissingImports]

_parse = partial(parse, parsing_timeout=0)
_DELIMITED = re.compile(r"(?<!\\)(\$|\\\(|\\\[|\\boxed)")
_WORD = re.compile(r"(?<![\\\w{])[A-Za-z]{2,}")


def is_equal(pair: tuple[str, str]) -> float | None:
    """Return 1 if a reference and an answer are equal, otherwise 0; None if the reference has no expression.

    A bare reference is LaTeX, such as `(3, 5)` or `3\\sqrt{13}`; math-verify reads a part of it unless it is boxed. A
    sentence, or a text with its own delimiters, contains the answer. The caller limits the time.
    """
    reference, answer = pair
    forms = [f"$\\boxed{{{reference}}}$", reference]
    if _DELIMITED.search(reference) or len(_WORD.findall(reference)) > 1:
        forms.reverse()
    expected = next(filter(None, map(_parse, forms)), None)
    if expected is None:
        return None
    return float(verify(expected, _parse(answer), timeout_seconds=None))


logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that it does not limit the time itself
is_equal((r"\frac{1}{2}", r"$\boxed{x^2}$"))  # builds the parser, before workers are forked from this process
