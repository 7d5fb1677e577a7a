"""Rename the columns of rows before they are parsed (`--columns`), so that published files load as they are."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from swiftlite.data.rows.row_error import RowError

if TYPE_CHECKING:  # `conversation.py` and `sources.py` are imported by most other modules of rows
    from swiftlite.data.rows.conversation import Conversation
    from swiftlite.data.rows.sources import RowParser


@dataclass(frozen=True)
class WithColumns:
    """A `RowParser` that parses rows with other names of columns.

    Attributes:
        parse: parses a row with the new names.
        columns: the new name of each column; other columns keep their names.
    """

    parse: "RowParser"
    columns: Mapping[str, str]

    def __call__(self, row: object, *, system: str | None = None, source: str = "") -> "Conversation":
        """Parse a row.

        Raises:
            RowError: a field is invalid, or two columns have the same new name.
        """
        try:
            return self.parse(renamed(row, self.columns), system=system, source=source)
        except RowError as error:
            absent = [name for name in self.columns if isinstance(row, dict) and name not in row]
            if not absent or not isinstance(row, dict):
                raise
            field, _, problem = error.problem.partition(": ")
            given = f"--columns renames {', '.join(absent)}, but the row has {', '.join(map(str, row))}"
            raise RowError(field, problem, "; ".join(filter(None, (given, error.hint)))) from None


def renamed(row: object, columns: Mapping[str, str]) -> object:
    """Return a row with new names of columns; anything else than an object unchanged.

    Raises:
        RowError: two columns have the same new name.
    """
    if not isinstance(row, dict):
        return row
    result = {}
    for name, value in row.items():
        new = columns.get(name, name)
        if new in result:
            raise RowError(new, "is in the row, and --columns renames another column to it", "correct --columns")
        result[new] = value
    return result
