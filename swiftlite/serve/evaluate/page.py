"""Make evaluation.html and evaluation.svg from the content of evaluation.json."""

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib import figure as mpl_figure

from swiftlite.acceptance.report import AT_TEMPERATURE
from swiftlite.acceptance.teacher_forced import ALL
from swiftlite.report.figure import Bars, as_svg, draw_bars, share
from swiftlite.report.page import Figure, Page, Section, Table, Tile
from swiftlite.serve.evaluate.confidence import confidence_table
from swiftlite.serve.evaluate.position_tables import position_sections
from swiftlite.serve.evaluate.rates import REPLAYED, ModelFigures, describe, num_rows, rates
from swiftlite.serve.prompt_groups import group_table

METHODS = {
    "teacher_forced": "Share of labels where a head predicts the same token as its trunk.",
    "replayed": "Acceptance of simulated speculative decoding over the same rows, which skips accepted tokens.",
}
"""Descriptions of the measurements without an engine; `_meaning` describes those with an engine."""


def evaluation_page(
    results: Mapping[str, ModelFigures],
    directories: Mapping[str, str],
    trunks: Section | None = None,
    confidences: Sequence[Mapping[str, Any]] = (),
    groups: Mapping[str, Mapping[str, Mapping[str, Any]]] | None = None,
) -> Page:
    """Return the page of an evaluation.

    Args:
        results: figures of "model", and of "baseline" if there is one.
        directories: paths or names of the models, by the keys of `results`.
        trunks: section about the trunks, from `trunks.trunk_section`.
        confidences: speed at each draft confidence, from `confidence.by_confidence`; empty if not measured.
        groups: by kind of group, the result of `prompt_groups.groups_to_json`.
    """
    methods = list(results["model"])
    tiles = []
    for method in methods:
        found = {name: _first(figures, method) for name, figures in results.items()}
        note = ""
        if found.get("baseline") is not None:
            note = f"{share(found['baseline'])} in the baseline"
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
    if trunks:
        sections.append(trunks)
    if confidences:
        tables = [confidence_table(confidences)]
        sections.append(Section("Confidence threshold", "Speed at values of --draft_confidence.", tables=tables))
    if groups:
        tables = [group_table(f"By {kind}", kind, found) for kind, found in groups.items()]
        sections.append(Section("Groups of prompts", "Drafts that the engine accepted.", tables=tables))
    lead = f"Acceptance of the heads of {directories['model']}"
    if "baseline" in directories:
        lead += f", compared with {directories['baseline']}"
    return Page("Evaluation of heads", f"{lead}.", tiles, [*sections, *position_sections(results)])


def evaluation_chart(results: Mapping[str, ModelFigures]) -> bytes:
    """Draw evaluation.svg: acceptance by channel, with a bar for each depth of the model and the baseline.

    Args:
        results: figures of "model", and of "baseline" if there is one.
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
    """Return, for each model and depth, the percentages of all channels; 0 if a model lacks the channel or depth."""
    bars = {}
    for name, figures in results.items():
        shares = _shares(figures, method, channels)
        for depth in range(max(map(len, shares))):
            bars[f"{name}, depth {depth + 1}"] = [100 * (_at(each, depth) or 0.0) for each in shares]
    return bars


def _at(shares: Sequence[float], depth: int) -> float | None:
    if depth >= len(shares):
        return None
    return shares[depth]


def _meaning(method: str) -> str:
    if method in METHODS:
        return METHODS[method]
    if method.endswith(REPLAYED):
        engine = method.removesuffix(REPLAYED)
        return f"Simulated speculative decoding over the answers of {engine}, which should give the same counts."
    engine, is_drawn, temperature = method.partition(AT_TEMPERATURE)
    if is_drawn:
        return f"Counts of {engine} while it sampled answers and drafts at temperature {temperature}."
    return f"Counts of {method} while it generated greedily."


def _first(figures: ModelFigures, method: str) -> float | None:
    """Return the acceptance of the first draft over all rows; None if it was not measured."""
    found = figures.get(method, {}).get(ALL)
    if not found:
        return None
    return _at(rates(method, found), 0)


def _figures(results: Mapping[str, ModelFigures], method: str) -> list[Figure]:
    """Return, for each depth, a figure that compares the model and the baseline by channel."""
    channels = list(results["model"][method])
    by_name = {name: _shares(figures, method, channels) for name, figures in results.items()}
    depth = max(len(shares) for shares in by_name["model"])
    drawn = []
    for number in range(depth):
        bars = []
        for name, shares in by_name.items():
            heights = [_at(each, number) for each in shares]
            bars.append(Bars(name, heights))
        title = f"{describe(method).capitalize()}, depth {number + 1}"
        drawn.append(draw_bars(f"{method}-{number + 1}", title, channels, bars, what="channel", y="accepted"))
    return drawn


def _shares(figures: ModelFigures, method: str, channels: list[str]) -> list[list[float]]:
    """Return the acceptance, from 0 to 1, by channel and depth; an empty list for a channel that the model lacks."""
    shares = []
    for channel in channels:
        found = figures.get(method, {}).get(channel)
        if found is None:
            shares.append([])
        else:
            shares.append(rates(method, found))
    return shares


def _table(results: Mapping[str, ModelFigures], method: str) -> Table:
    rows = []
    for name, figures in results.items():
        for channel, found in figures.get(method, {}).items():
            rows.append([channel, name, str(num_rows(found)), *map(share, rates(method, found))])
    width = max(map(len, rows))
    columns = ["channel", "model", "rows", *(f"depth {depth + 1}" for depth in range(width - 3))]
    padded = [row + [""] * (width - len(row)) for row in rows]
    return Table("All figures", columns, padded)
