"""Format tables of text for stdout."""

from collections.abc import Sequence


def text_table(rows: Sequence[Sequence[str]], indent: str = "", numbers: bool = False) -> str:
    """Return the rows as lines, with two spaces between columns.

    Args:
        rows: cells of each line, the same number in each.
        indent: prefix of each line.
        numbers: whether cells are right-aligned, except the last cell of each line.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        if numbers:
            cells = [cell.rjust(width) for cell, width in zip(row, widths, strict=True)]
            cells[-1] = row[-1]
        else:
            cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        lines.append(indent + "  ".join(cells).rstrip())
    return "\n".join(lines)
