"""Define what the fuzzing tests share: number of examples, random JSON, and accepted results.

Each test is about one kind of untrusted input. Whatever the input contains, the result must be correct, or a single
`UserError` that names the place. Any other exception, and anything longer than DEADLINE, is a defect. Inputs that have
revealed defects are kept as `@example`.
"""

import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import hypothesis.strategies as st
from hypothesis import HealthCheck, settings

from swiftlite.base.errors import UserError

EXAMPLES = int(os.environ.get("SWIFTLITE_FUZZ_EXAMPLES", "15"))
"""Number of examples of each test; the default takes about a second. For a search for defects, use thousands
(docs/en/contributing.md)."""
DEADLINE = timedelta(seconds=20)
"""Maximum time of one example, on a machine with other processes."""

fuzz = settings(
    max_examples=EXAMPLES,
    deadline=DEADLINE,
    derandomize="SWIFTLITE_FUZZ_EXAMPLES" not in os.environ,  # CI is not where chance should speak
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    print_blob=True,
)

texts = st.one_of(
    st.text(max_size=12), st.sampled_from(["", "0", "1e999", "null", "\0", "\ud83d", "<|im_end|>", "{", "[[1"])
)
numbers = st.one_of(
    st.integers(-3, 100),
    st.sampled_from([0, -1, 10**9, 2**31, 2**63, 10**400, -(10**400)]),
    st.floats(),
)
scalars = st.one_of(st.none(), st.booleans(), numbers, texts)
junk = st.recursive(
    scalars,
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(texts, inner, max_size=4)),
    max_leaves=8,
)


@st.composite
def damaged(draw: st.DrawFn, whole: bytes) -> bytes:
    """Draw bytes of a file with some bytes removed, repeated, overwritten or inserted."""
    content = bytearray(whole)
    for _ in range(draw(st.integers(1, 4))):
        begin = draw(st.integers(0, len(content)))
        end = begin + draw(st.integers(0, 8))
        content[begin:end] = draw(st.one_of(st.binary(max_size=8), st.just(bytes(content[begin : end + 8]) * 2)))
    return bytes(content)


def answer(question: Callable[..., Any], *args: Any, names: str = "", **options: Any) -> Any:
    """Return the result of a function; None if it raises one printable UserError that contains `names`."""
    try:
        return question(*args, **options)
    except UserError as error:
        message = str(error)
        assert message.encode()
        assert names in message
        assert len(message) < 10_000
        return None
