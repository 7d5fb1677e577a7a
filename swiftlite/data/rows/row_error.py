"""`RowError`: an invalid field of a row."""

from swiftlite.base.errors import UserError, clip


class RowError(UserError):
    """An invalid field of a row. The message names the field; the reader of the file adds `file:line`, see `BadRow`."""

    def __init__(self, field: str, problem: str, hint: str = ""):
        super().__init__(f"{field}: {problem}", hint)


def shown(value: object) -> str:
    """Format a value for an error message, shortened because it can be a whole document."""
    return clip(repr(value), 80)
