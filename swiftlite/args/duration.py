"""Parse durations such as 90m, 1h or 1h30m."""

import re

_PATTERN = re.compile(r"(?:(\d{1,6})h)?(?:(\d{1,6})m)?(?:(\d{1,6})s)?")


def seconds_of(text: str) -> int | None:
    """Return the seconds of a duration of hours, minutes and seconds; None if the text is not a duration."""
    found = _PATTERN.fullmatch(text)
    if not text or not found:
        return None
    hours, minutes, seconds = (int(number or 0) for number in found.groups())
    return 3600 * hours + 60 * minutes + seconds
