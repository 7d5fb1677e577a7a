"""Test durations in options."""

import pytest

from swiftlite.args.duration import seconds_of


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90m", 5400),
        ("1h", 3600),
        ("1h30m", 5400),
        ("2h0m5s", 7205),
        ("45s", 45),
        ("3d", 259200),
        ("1d12h", 129600),
        ("0m", 0),
        ("", None),
        ("1", None),
        ("30m1h", None),
        ("1h1d", None),
        ("1.5h", None),
        ("-5m", None),
        ("an hour", None),
        ("1" + 400 * "0" + "h", None),
    ],
)
def test_seconds(text, seconds):
    assert seconds_of(text) == seconds
