"""Detect nulls in table rows that were added by the file format and not written by the author of the rows."""

from typing import Any

from swiftlite.data.rows.conversation import RowError


def padding_error(row: dict[str, Any]) -> RowError | None:
    """Return an error if a row contains nulls for fields of other rows; None otherwise.

    In a table, all structs of a column have the same fields. Fields that a row does not have therefore become null.
    """
    nested = [("tools", row.get("tools"))]
    for number, message in enumerate(_list(row.get("messages"))):
        for call in _list(_dict(message).get("tool_calls")):
            function = _dict(_dict(call).get("function"))
            nested.append((f"messages[{number}].tool_calls", function.get("arguments")))
    for path, value in nested:
        if value is not None and _holds_null(value):
            problem = "has nulls: Parquet padded it with fields of other rows"
            return RowError(path, problem, "store it as JSON text (json.dumps) in a text column")
    return None


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _holds_null(value: Any) -> bool:
    if isinstance(value, dict):
        return any(map(_holds_null, value.values()))
    if isinstance(value, list):
        return any(map(_holds_null, value))
    return value is None
