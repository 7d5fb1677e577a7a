"""Parse durations such as 90m, 1h, 1h30m or 3d."""

import re

_PATTERN = re.compile(r"(?:(\d{1,6})d)?(?:(\d{1,6})h)?(?:(\d{1,6})m)?(?:(\d{1,6})s)?")
_SECONDS = (24 * 3600, 3600, 60, 1)


def seconds_of(text: str) -> int | None:
    """Return the seconds of a duration of days, hours, minutes and seconds; None if the text is not a duration."""
    found = _PATTERN.fullmatch(text)
    if not text or not found:
        return None
    return sum(int(number or 0) * seconds for number, seconds in zip(found.groups(), _SECONDS, strict=True))
