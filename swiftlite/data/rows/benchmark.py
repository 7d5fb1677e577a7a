"""Read the prompts of SPEED-Bench and Spec-Bench, whose rows have categories and no answers.

Rows have `question_id`, `category` and the user's turns: as texts in `turns` (Spec-Bench, and SPEED-Bench prepared by
Model-Optimizer), or as user turns in `messages` (SPEED-Bench prepared by NeMo-Skills). As in `vllm bench serve`, only
the first turn is asked: the next ones follow answers that the rows do not have.
"""

from typing import Any

from swiftlite.data.rows.row_error import RowError, shown

PLACEHOLDER = "FULL BENCHMARK DATA SHOULD BE FETCHED"
"""Start of each text that SPEED-Bench does not redistribute, before it is prepared."""


def is_question(row: dict[str, Any]) -> bool:
    """Return whether a row is a question of one of these benchmarks."""
    if "question_id" not in row:
        return False
    if "turns" in row:
        return True
    messages = row.get("messages")
    return isinstance(messages, list) and all(
        isinstance(each, dict) and each.get("role") == "user" for each in messages
    )


def question_of(row: dict[str, Any], needs_answer: bool) -> tuple[str, str | None]:
    """Return the first turn of a question, and its category.

    Raises:
        RowError: a field is invalid, the row needs an answer, or its text is missing.
    """
    field = "turns" if "turns" in row else "messages"
    if needs_answer:
        hint = "use it as a prompt: swiftlite bench, or evaluate --infer_backend vllm"
        raise RowError(field, "is the question of a benchmark, without an answer", hint)
    turns = row[field]
    if not isinstance(turns, list) or not turns:
        raise RowError(field, f"is {shown(turns)}, not a list of turns")
    first = turns[0].get("content") if field == "messages" else turns[0]
    if not isinstance(first, str) or not first:
        raise RowError(f"{field}[0]", f"is {shown(first)}, not a text")
    if first.startswith(PLACEHOLDER):
        raise RowError(f"{field}[0]", "is a placeholder", "prepare SPEED-Bench with the script of its dataset card")
    category = row.get("category")
    if category is not None and not isinstance(category, str):
        raise RowError("category", f"is {shown(category)}, not a text")
    return first, category
