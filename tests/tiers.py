"""Select which parameters of a test run in CI, and which run only in the tier `slow`.

If a test covers one code path for many families, layouts and kernels, CI runs every value or every pair of values. The
slow tier runs all combinations.
"""

from collections.abc import Collection, Iterable, Sequence
from itertools import product
from typing import Any

import pytest
from allpairspy import AllPairs


def some_of(values: Iterable[Any], *kept: Any) -> list[Any]:
    """Return the values as parameters. Values that are not in `kept` have the marker slow.

    Example: `some_of(FAMILIES, "qwen2", "mimo")`.
    """
    values = list(values)
    unknown = [value for value in kept if value not in values]
    assert not unknown, f"not among the values: {unknown}"
    return [_parameter(value, value in kept) for value in values]


def all_but(values: Iterable[Any], *slow: Any) -> list[Any]:
    """Return the values as parameters. Values in `slow` have the marker slow."""
    values = list(values)
    return some_of(values, *(value for value in values if value not in slow))


def pairwise(*factors: Sequence[Any]) -> list[Any]:
    """Return all combinations of the factors as parameters. A few of them cover every pair of values.

    The others have the marker slow. Example: of the 8 combinations of `pairwise("ab", "cd", "ef")`, 4 run in CI.
    """
    numbers = [list(range(len(factor))) for factor in factors]
    kept = {tuple(row) for row in AllPairs(numbers)}
    rows = zip(product(*numbers), product(*factors), strict=True)
    return [_parameter(values, row in kept) for row, values in rows]


def once(first: Sequence[Any], *factors: Sequence[Any]) -> list[Any]:
    """Return all combinations of the factors as parameters. CI runs each value of the first factor once.

    The values of the other factors alternate, so that CI runs all of their combinations too. The others have the marker
    slow. Example: `once(FAMILIES, [False, True])`, if a test has the same reason to run for every family.
    """
    others = list(product(*(range(len(factor)) for factor in factors)))
    kept = {(number, *others[number % len(others)]) for number in range(len(first))}
    numbers = product(range(len(first)), *(range(len(factor)) for factor in factors))
    rows = zip(numbers, product(first, *factors), strict=True)
    return [_parameter(values, row in kept) for row, values in rows]


def selected(request: pytest.FixtureRequest, *names: str) -> list[Any]:
    """Return the values of parameters with which selected tests of the module run; tuples, if there are several names.

    A fixture that computes results for all tests of a module can thus omit those that only tests of another tier need.
    """
    found = []
    for item in request.session.items:
        parameters = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
        if item.path == request.path and parameters.keys() >= {*names}:
            values = tuple(parameters[name] for name in names)
            found.append(values if len(names) > 1 else values[0])
    return list(dict.fromkeys(found))


def _parameter(value: Any, is_kept: bool) -> Any:
    values: Collection = value if isinstance(value, tuple) else (value,)
    return pytest.param(*values, marks=() if is_kept else pytest.mark.slow)
