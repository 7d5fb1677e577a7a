"""Make report.json: counts of rows, how answers ended, and the lengths of answers."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from swiftlite.args.commands import RegenerateArgs
from swiftlite.data.rows.conversation import Conversation
from swiftlite.improve.regenerate.dataset_rows import DatasetRows
from swiftlite.improve.regenerate.dialogue import Dialogues
from swiftlite.improve.regenerate.self_dialogues import SelfPrompts


def make_report(
    dialogues: Dialogues, rows: DatasetRows, chats: Sequence[Conversation], num_asking: int, written: SelfPrompts
) -> dict[str, Any]:
    """Return the content of report.json. It contains no times, so that a resumed run writes the same file.

    Args:
        chats: every row of the dataset, and every conversation of `written`.
        num_asking: number of rows with a prompt. Rows without a prompt are those in which the assistant only calls
            tools.
    """
    said = []
    for row, answer in dialogues:
        said += dialogues.turns_so_far(row, answer)
    ends = Counter(dialogues.end(*each) for each in dialogues)
    finish_reasons = Counter(each.finish_reason for each in said)
    num_gold = len(rows.gold)
    num_rows = len(rows.regenerated) + num_gold
    report: dict[str, Any] = {}
    if written.total:
        report["self_prompts"] = {
            "total": written.total,
            "kept": len(written.conversations),
            "dropped": written.dropped,
        }
    return report | {
        "dataset": {
            "rows": len(chats),
            "asked": len(dialogues.chats),
            "equal": num_asking - len(dialogues.chats),
            "only_calls": len(chats) - num_asking,
        },
        "conversations": {end: ends[end] for end in ("last_turn", "truncated", "empty", "no_room")},
        "answers": {
            "total": len(said),
            "stop": finish_reasons["stop"],
            "length": finish_reasons["length"],
            "completion_tokens": lengths([each.completion_tokens for each in said]),
        },
        "rows": {
            "total": num_rows,
            "regenerated": len(rows.regenerated),
            "gold": num_gold,
            "gold_fraction": num_gold / max(num_rows, 1),
            "equal": rows.num_equal,
        },
    }


def lengths(numbers: Sequence[int]) -> dict[str, int]:
    """Return the sum, minimum, maximum, median and 90th percentile; all 0 for an empty list."""
    percentiles = np.percentile(numbers or [0], (0, 50, 90, 100), method="inverted_cdf").tolist()
    return {"sum": sum(numbers), **dict(zip(("min", "median", "p90", "max"), percentiles, strict=True))}


def summary_line(report: dict[str, Any], args: RegenerateArgs) -> list[str]:
    """Return the report as lines for the log; zero counts are omitted."""
    dataset, ends, answers, rows = (report[name] for name in ("dataset", "conversations", "answers", "rows"))
    lines = [f"{dataset['asked']} of {dataset['rows']} prompts answered"]
    if dataset["equal"]:
        lines[0] += f"; {dataset['equal']} with the same prompt as another one"
    if dataset["only_calls"]:
        lines[0] += f"; {dataset['only_calls']} with only tool calls of the assistant"
    tokens = answers["completion_tokens"]
    lines.append(
        f"{answers['total']} answers; tokens per answer: min {tokens['min']}, median {tokens['median']}, "
        f"p90 {tokens['p90']}, max {tokens['max']}"
    )
    if answers["length"]:
        treatment = "kept; --drop_truncated removes them"
        if args.drop_truncated:
            treatment = "removed"
        lines.append(f"answers truncated at --max_new_tokens {args.max_new_tokens}: {answers['length']}, {treatment}")
    if ends["empty"]:
        lines.append(f"conversations that end at an empty answer: {ends['empty']}; the answer is removed")
    if ends["no_room"]:
        lines.append(f"conversations that end without room for an answer: {ends['no_room']}")
    if rows["equal"]:
        lines.append(f"conversations with the same answers as another one: {rows['equal']}, removed")
    lines.append(f"{rows['total']} rows: {rows['regenerated']} regenerated, {rows['gold']} gold")
    return lines
