"""evaluation.html and evaluation.svg: the same as evaluation.json, to look at."""

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib import figure as mpl_figure

from swiftlite.acceptance.report import AT_TEMPERATURE
from swiftlite.acceptance.teacher_forced import ALL
from swiftlite.evaluate.confidence import COLUMNS, confidence_rows
from swiftlite.evaluate.position_tables import position_sections
from swiftlite.evaluate.rates import REPLAYED, ModelFigures, describe, rates
from swiftlite.report.figure import Bars, as_svg, draw_bars, share
from swiftlite.report.page import Figure, Page, Section, Table, Tile

METHODS = {
    "teacher_forced": "The share of labels where a head says what its trunk says.",
    "replayed": "What an engine would accept that walks over the same rows and skips what it has accepted.",
}
"""What is said of a way to measure; see `_meaning` for the others."""


def evaluation_page(
    results: Mapping[str, ModelFigures],
    directories: Mapping[str, str],
    confidences: Sequence[Mapping[str, Any]] = (),
) -> Page:
    """The page of what was measured.

    Args:
        results: by name: "model", and "baseline" where there is one.
        directories: of the models, by the same names.
        confidences: see `confidence.by_confidence`.
    """
    methods = list(results["model"])
    tiles = []
    for method in methods:
        found = {name: _first(figures, method) for name, figures in results.items()}
        before = found.get("baseline")
        note = "" if before is None else f"{share(before)} in the baseline"
        tiles.append(Tile(f"{describe(method)}, depth 1", share(found["model"]), note))
    sections = [
        Section(
            describe(method).capitalize(),
            _meaning(method),
            figures=_figures(results, method),
            tables=[_table(results, method)],
        )
        for method in methods
    ]
    if confidences:
        table = Table("The same answers at each value", COLUMNS, confidence_rows(confidences))
        sections.append(Section("Where to stop drafting", "Speed at values of --draft_confidence.", tables=[table]))
    lead = f"How often the heads of {directories['model']} are right"
    if "baseline" in directories:
        lead += f", beside those of {directories['baseline']}"
    return Page("Evaluation of heads", f"{lead}.", tiles, [*sections, *position_sections(results)])


def evaluation_chart(results: Mapping[str, ModelFigures]) -> bytes:
    """evaluation.svg: acceptance by channel, a bar for each depth, the baseline's next to it.

    Args:
        results: as for `evaluation_page`.
    """
    methods = list(results["model"])
    chart = mpl_figure.Figure(figsize=(8, 3.2 * len(methods)), layout="constrained")
    axes = chart.subplots(len(methods), squeeze=False)[:, 0]
    for axis, method in zip(axes, methods, strict=True):
        channels = list(results["model"][method])
        bars = _percentages(results, method, channels)
        width = 0.8 / max(len(bars), 1)
        for number, (label, heights) in enumerate(bars.items()):
            axis.bar([place + number * width for place in range(len(channels))], heights, width, label=label)
        axis.set_xticks([place + 0.4 - width / 2 for place in range(len(channels))], channels)
        axis.set(title=describe(method), ylabel="accepted, %", ylim=(0, 100))
        axis.legend(fontsize="small")
    return as_svg(chart)


def _percentages(results: Mapping[str, ModelFigures], method: str, channels: list[str]) -> dict[str, list[float]]:
    """For each model and depth the percentage of each channel; 0 where a model has no such channel or depth."""
    bars = {}
    for name, figures in results.items():
        shares = _shares(figures, method, channels)
        for depth in range(max(map(len, shares))):
            bars[f"{name}, depth {depth + 1}"] = [100 * each[depth] if depth < len(each) else 0.0 for each in shares]
    return bars


def _meaning(method: str) -> str:
    if method in METHODS:
        return METHODS[method]
    if method.endswith(REPLAYED):
        engine = method.removesuffix(REPLAYED)
        return f"The same walk over the answers that {engine} gave: what it should have counted."
    engine, is_drawn, temperature = method.partition(AT_TEMPERATURE)
    if is_drawn:
        return f"What {engine} counted itself while it drew answers, and their drafts, at temperature {temperature}."
    return f"What {method} counted itself while it generated greedily."


def _first(figures: ModelFigures, method: str) -> float | None:
    """Acceptance of the first draft over all rows."""
    found = figures.get(method, {}).get(ALL)
    shares = rates(method, found) if found else []
    return shares[0] if shares else None


def _figures(results: Mapping[str, ModelFigures], method: str) -> list[Figure]:
    """Return a figure for each depth with the model and the baseline by channel."""
    channels = list(results["model"][method])
    by_name = {name: _shares(figures, method, channels) for name, figures in results.items()}
    depth = max(len(shares) for shares in by_name["model"])
    drawn = []
    for number in range(depth):
        bars = []
        for name, shares in by_name.items():
            heights = [each[number] if number < len(each) else None for each in shares]
            bars.append(Bars(name, heights))
        title = f"{describe(method).capitalize()}, depth {number + 1}"
        drawn.append(draw_bars(f"{method}-{number + 1}", title, channels, bars, what="channel", y="accepted"))
    return drawn


def _shares(figures: ModelFigures, method: str, channels: list[str]) -> list[list[float]]:
    """Return the shares by channel and depth; empty if a model lacks the channel."""
    found = figures.get(method, {})
    return [rates(method, found[channel]) if channel in found else [] for channel in channels]


def _table(results: Mapping[str, ModelFigures], method: str) -> Table:
    rows = []
    for name, figures in results.items():
        for channel, found in figures.get(method, {}).items():
            count = found["samples" if "samples" in found else "prompts"]
            rows.append([channel, name, str(count), *map(share, rates(method, found))])
    width = max(map(len, rows))
    columns = ["channel", "model", "rows", *(f"depth {depth + 1}" for depth in range(width - 3))]
    padded = [row + [""] * (width - len(row)) for row in rows]
    return Table("All figures", columns, padded)
