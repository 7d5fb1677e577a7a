"""Define types of numbers with bounds. Fields of options have these types, and rules check the bounds.

The bounds are `annotated_types`, which pydantic supports. pydantic is imported only when a number is checked, because
importing it here would nearly double the time of `--help`.
"""

import math
import typing
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any

from annotated_types import Interval

if TYPE_CHECKING:
    from pydantic import TypeAdapter

PositiveInt = Annotated[int, Interval(ge=1)]
NonNegativeInt = Annotated[int, Interval(ge=0)]
MtpDepth = Annotated[int, Interval(ge=0, le=64)]
"""Number of MTP layers. The bound catches typing errors: planning 100,000 layers takes over a minute."""
DraftDepth = Annotated[int, Interval(ge=1, le=64)]
"""Number of draft tokens per step in training."""
DrafterDepth = Annotated[int, Interval(ge=1, le=16)]
"""Number of decoder layers of a block drafter, as in its config.json."""
MarkovRank = Annotated[int, Interval(ge=1, le=1024)]
"""Rank of the Markov head of a drafter, as in its config.json."""
Length = Annotated[int, Interval(ge=2)]
"""Number of tokens in a row: at least one input and one label."""
Seed = Annotated[int, Interval(ge=0, lt=2**32)]
Port = Annotated[int, Interval(ge=1, le=65535)]

# Below infinity, because infinity and NaN are not valid settings.
PositiveFloat = Annotated[float, Interval(gt=0, lt=math.inf)]
NonNegativeFloat = Annotated[float, Interval(ge=0, lt=math.inf)]
Fraction = Annotated[float, Interval(ge=0, le=1)]
PositiveFraction = Annotated[float, Interval(gt=0, le=1)]
ProperFraction = Annotated[float, Interval(ge=0, lt=1)]


@cache
def bounds_of(args_class: type) -> dict[str, Interval]:
    """Return the bounds of the class's numbers by field name."""
    found = {}
    for name, kind in typing.get_type_hints(args_class, include_extras=True).items():
        parts = typing.get_args(kind)
        values = [value for part in parts if typing.get_origin(part) is dict for value in typing.get_args(part)]
        for number in (kind, *parts, *values):  # PositiveInt, PositiveInt | None, or dict[str, PositiveInt] | None
            if typing.get_origin(number) is Annotated:
                found[name] = typing.get_args(number)[1]
    return found


def out_of_bounds(args: Any) -> dict[str, Interval]:
    """Return the violated bounds by field name.

    Args:
        args: instance of an argument class or of a group.
    """
    from pydantic import ValidationError

    bounds = bounds_of(type(args))
    try:
        _adapter(type(args)).validate_python(vars(args))
    except ValidationError as error:
        names = [str(each["loc"][0]) for each in error.errors()]
        return {name: bounds[name] for name in names if name in bounds}
    return {}


def describe(bounds: Interval) -> str:
    """Return a description of bounds for a sentence with "must be", such as "at least 0 and below 1"."""
    words = [f"at least {bounds.ge}"]
    if bounds.gt is not None:
        words = [f"above {bounds.gt}"]
    if bounds.le is not None:
        words.append(f"at most {bounds.le}")
    if bounds.lt is not None and bounds.lt != math.inf:
        words.append(f"below {bounds.lt}")
    return " and ".join(words)


@cache
def _adapter(args_class: type) -> "TypeAdapter[Any]":
    from pydantic import TypeAdapter

    return TypeAdapter(args_class)
