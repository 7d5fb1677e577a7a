"""Test tables of text."""

from swiftlite.report.table import text_table

ROWS = [("name", "count", "what it is"), ("a", "12", "short"), ("longer", "3", "")]


def test_columns_are_two_spaces_apart_and_no_line_ends_in_spaces():
    assert text_table(ROWS).splitlines() == [
        "name    count  what it is",
        "a       12     short",
        "longer  3",
    ]


def test_numbers_are_set_to_the_right_but_for_the_last_column():
    assert text_table(ROWS, indent="  ", numbers=True).splitlines() == [
        "    name  count  what it is",
        "       a     12  short",
        "  longer      3",
    ]
