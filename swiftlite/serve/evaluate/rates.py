"""Define the measurements of `evaluate` and their table."""

from collections.abc import Iterable
from typing import Any

from swiftlite.acceptance import report
from swiftlite.report.table import text_table

ModelFigures = dict[str, dict[str, dict[str, Any]]]
"""Figures by method and channel, in the format of evaluation.json. A method is "teacher_forced", "replayed", an
engine's name, an engine's name followed by `REPLAYED`, or an engine's name with a temperature
(`acceptance.report.named`).
"""
REPLAYED = "_replayed"
"""Suffix of an engine's name, for the figures of speculative decoding that is simulated on this engine's answers."""


def rates(method: str, figures: dict[str, Any]) -> list[float]:
    """Return the acceptance by depth of the head or, for an engine, by position of the draft token."""
    if method == "teacher_forced":
        return [head["acceptance"] for head in figures["heads"]]
    return figures["acceptance_per_position"]


def describe(method: str) -> str:
    """Return the name of a method for pages."""
    return report.describe(method).replace("_", "-")


def num_rows(figures: dict[str, Any]) -> int:
    """Return the number of samples or, for an engine, the number of prompts."""
    if "samples" in figures:
        return figures["samples"]
    return figures["prompts"]


def compare_with_engine(engine: str, counted: dict[str, Any], walk: dict[str, Any], torch_dtype: str) -> str:
    """Compare, in one sentence, an engine's counts with the counts of decoding simulated on the engine's answers."""
    its, own = (f"{each['accepted']} of {each['drafted']}" for each in (counted, walk))
    if all(counted[name] == walk[name] for name in ("drafts", "drafted", "acceptance_per_position")):
        return f"{engine} accepted {its} drafted tokens, equal to the replay of its answers"
    if torch_dtype == "float32":
        advice = f"they should be equal in float32: run swiftlite doctor --engine {engine}"
    else:
        advice = f"{torch_dtype} is rounded differently: compare with --torch_dtype float32"
    return f"{engine} accepted {its} drafted tokens, the replay of its answers {own}; {advice}"


def legend(methods: Iterable[str]) -> str:
    """Return one line for each of the methods, which says what it measures."""
    meanings = {
        "teacher_forced": "predictions that equal the model's most likely token, at all positions of the rows' answers",
        "replayed": "accepted drafts if an engine is simulated on the rows' answers",
    }
    lines = []
    for method in methods:
        if method in meanings:
            meaning = meanings[method]
        elif method.endswith(REPLAYED):
            meaning = "accepted drafts if an engine is simulated on the engine's answers"
        else:
            meaning = "accepted drafts, counted by the engine while it generated its answers"
        lines.append(f"{method}: {meaning}")
    return "\n".join(lines)


def table(results: dict[str, ModelFigures]) -> str:
    """Return a table of the acceptance with a line for each channel; differences from the baseline are in percentage
    points.

    Args:
        results: figures of "model", and of "baseline" if there is one.
    """
    baseline = results.get("baseline", {})
    lines = []
    for method, channels in results["model"].items():
        for channel, figures in channels.items():
            before: list[float] = []
            if found := baseline.get(method, {}).get(channel):
                before = rates(method, found)
            shares = share_cells(rates(method, figures), before)
            lines.append([method, channel, str(num_rows(figures)), *shares])
    head = ["measured by", "channel", "rows", *(f"depth {k}" for k in range(1, max(map(len, lines)) - 2))]
    return text_table([head, *lines])


def share_cells(found: list[float], before: list[float]) -> list[str]:
    """Return one cell per depth: "50.0%", or "50.0% (+10.0)" if the baseline has this depth."""
    cells = []
    for depth, rate in enumerate(found):
        cell = f"{rate:.1%}"
        if depth < len(before):
            cell += f" ({100 * (rate - before[depth]):+.1f})"
        cells.append(cell)
    return cells
