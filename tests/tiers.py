"""Which parameters of a test run in CI, and which only in the tier `slow`."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def some_of(values: Iterable[Any], *kept: Any) -> list[Any]:
    """Return the values as parameters, of which those in `kept` run in CI and all others in the tier `slow`.

    For tests of one code path over a product of families, layouts or kernels: CI runs each value of each factor, and
    the whole product runs where time allows.

    Example: `some_of(FAMILIES, "qwen2", "mimo")`.
    """
    values = list(values)
    unknown = [value for value in kept if value not in values]
    assert not unknown, f"not among the values: {unknown}"
    return [value if value in kept else _slow(value) for value in values]


def _slow(value: Any) -> Any:
    values: Collection = value if isinstance(value, tuple) else (value,)
    return pytest.param(*values, marks=pytest.mark.slow)
