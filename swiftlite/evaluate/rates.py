"""Define the measurements of `evaluate` and their table."""

from typing import Any

from swiftlite.acceptance import report
from swiftlite.report.table import text_table

ModelFigures = dict[str, dict[str, dict[str, Any]]]
"""Method (teacher_forced, replayed, an engine's name, that and `REPLAYED`, or that at a temperature, see
`acceptance.report.named`) -> channel -> figures, as evaluation.json has them."""
REPLAYED = "_replayed"
"""Behind an engine's name: the walk over the answers that this engine gave, token by token."""


def rates(method: str, figures: dict[str, Any]) -> list[float]:
    """Acceptance by depth, or by the engine's draft position."""
    if method == "teacher_forced":
        return [head["acceptance"] for head in figures["heads"]]
    return figures["acceptance_per_position"]


def describe(method: str) -> str:
    """A method for readers."""
    return report.describe(method).replace("_", "-")


def compare_with_engine(engine: str, counted: dict[str, Any], walk: dict[str, Any], torch_dtype: str) -> str:
    """One sentence: what an engine counted, and what the model itself accepts over the same answers."""
    its, own = (f"{each['accepted']} of {each['drafted']}" for each in (counted, walk))
    if all(counted[name] == walk[name] for name in ("drafts", "drafted", "acceptance_per_position")):
        return f"{engine} accepted {its} drafted tokens; so does the model itself over the same answers"
    if torch_dtype == "float32":
        advice = f"in float32 they should be equal: ask swiftlite doctor --engine {engine}"
    else:
        advice = f"two programs round {torch_dtype} differently: compare with --torch_dtype float32"
    return f"{engine} accepted {its} drafted tokens, the model itself over the same answers {own}; {advice}"


def table(results: dict[str, ModelFigures]) -> str:
    """A line for each channel, with what changed against the baseline in points.

    Args:
        results: by name: "model", and "baseline" where there is one.
    """
    baseline = results.get("baseline", {})
    lines = []
    for method, channels in results["model"].items():
        for channel, figures in channels.items():
            before = baseline.get(method, {}).get(channel)
            number = figures["samples" if "samples" in figures else "prompts"]
            shares = share_cells(rates(method, figures), rates(method, before) if before else [])
            lines.append([method, channel, str(number), *shares])
    num_columns = max(map(len, lines))
    head = ["measured by", "channel", "rows", *(f"depth {k}" for k in range(1, num_columns - 2))]
    return text_table([head, *(line + [""] * (num_columns - len(line)) for line in lines)])


def share_cells(found: list[float], before: list[float]) -> list[str]:
    """One cell for each depth: 50.0%, or 50.0% (+10.0) where the baseline has that depth."""
    cells = []
    for depth, rate in enumerate(found):
        change = f" ({100 * (rate - before[depth]):+.1f})" if depth < len(before) else ""
        cells.append(f"{rate:.1%}{change}")
    return cells
