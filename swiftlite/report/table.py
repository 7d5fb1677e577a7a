"""Format tables of text for stdout."""

from collections.abc import Sequence
from itertools import zip_longest


def text_table(rows: Sequence[Sequence[str]], indent: str = "", numbers: bool = False) -> str:
    """Return the rows as lines, with two spaces between columns.

    Args:
        rows: cells of each line; a line can have fewer than others.
        indent: prefix of each line.
        numbers: whether cells are right-aligned, except the last cell of each line.
    """
    widths = [max(map(len, column)) for column in zip_longest(*rows, fillvalue="")]
    lines = []
    for row in rows:
        if numbers:
            cells = [cell.rjust(width) for cell, width in zip(row, widths, strict=False)]
            cells[-1] = row[-1]
        else:
            cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=False)]
        lines.append(indent + "  ".join(cells).rstrip())
    return "\n".join(lines)
