"""Draw line and bar charts as inline SVG. The SVG contains no scripts, and its text is real text.

matplotlib draws with placeholder colors, which are replaced by the CSS variables of templates/style.css. Charts
therefore follow the dark mode of the browser. Lines also differ by their dashes and bars by their hatching.
"""

import io
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from markupsafe import Markup, escape
from matplotlib import figure as mpl_figure
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.ticker import MaxNLocator

from swiftlite.base.errors import clip
from swiftlite.report.page import Figure, Table

Points = Sequence[tuple[float, float]]

INK = "#010101"
GRID = "#010102"
SERIES = ("#010111", "#010112", "#010113", "#010114", "#010115", "#010116")
"""Placeholder colors of the series of a figure; the seventh series has the color of the first."""
VARIABLES = {INK: "--ink", GRID: "--line"} | {color: f"--series-{n + 1}" for n, color in enumerate(SERIES)}
DASHES = ("-", "--", ":", "-.", "-", "--")
HATCHES = ("", "////", "---", "", "xxx", "...")
STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "text.parse_math": False,  # a channel may be named $x$
    "font.size": 11,
    "hatch.linewidth": 1.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.facecolor": "none",
    "figure.facecolor": "none",
    "savefig.facecolor": "none",
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": GRID,
    "xtick.color": GRID,
    "ytick.color": GRID,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "axes.axisbelow": True,
}
WIDTH, HEIGHT = 4.6, 2.5
"""Size of charts in inches; the width is 442 pixels. A phone scales charts to three quarters, so that text has 10
pixels."""
MARGIN = 0.3
"""Space around the labels of a chart, relative to the font size."""
MAX_POINTS = 600
"""Maximum number of points of a line, about one per pixel."""
MAX_STACKS = 60
"""Maximum number of stacks of a chart."""
MAX_ROWS = 40
"""Maximum number of rows in the table of a line chart's values."""
MAX_LABEL = 24
"""Maximum number of characters of a bar's label."""


@dataclass(frozen=True)
class Line:
    """A named line through points (x, y) in the order of x."""

    name: str
    points: Points


@dataclass(frozen=True)
class Bars:
    """The bars of one series, with one value for each group; None for groups without a value."""

    name: str
    heights: Sequence[float | None]


def draw_lines(
    name: str, title: str, lines: Sequence[Line], *, x: str, y: str, is_share: bool = False, has_ticks: bool = False
) -> Figure:
    """Draw several lines.

    Args:
        name: unique name within the page.
        lines: the lines, each with at least one point.
        x, y: labels of the axes.
        is_share: whether y is a share of 1, shown in percent.
        has_ticks: whether the x axis has labels only at points.
    """
    factor, y_label = 1, y
    if is_share:
        factor, y_label = 100, f"{y}, %"
    with _axes() as (figure, axis):
        for number, line in enumerate(lines):
            points = thin(line.points, MAX_POINTS)
            marker = ""
            if len(points) <= 12:
                marker = "o"
            (drawn,) = axis.plot(
                [place for place, _ in points],
                [factor * value for _, value in points],
                color=SERIES[number % len(SERIES)],
                linestyle=DASHES[number % len(DASHES)],
                linewidth=1.8,
                marker=marker,
                markersize=4,
            )
            drawn.set_gid(f"mark-{number + 1}")
        axis.set(xlabel=x, ylabel=y_label)
        if has_ticks:
            axis.set_xticks(sorted({place for line in lines for place, _ in line.points}))
        else:
            axis.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
        if is_share or has_ticks:
            axis.set_ylim(bottom=0)
        svg = _inline(figure, name, title)
    summaries = [f"{line.name}: {_from_to(line.points, is_share)}" for line in lines]
    return Figure(
        name, title, "; ".join(summaries) + ".", svg, [line.name for line in lines], _table_of(lines, x, y, is_share)
    )


def draw_bars(
    name: str, title: str, groups: Sequence[str], bars: Sequence[Bars], *, what: str, y: str, is_share: bool = True
) -> Figure:
    """Draw groups of horizontal bars with their values, one group below the other.

    Args:
        groups: names of the groups, such as channels.
        bars: bars without a value in any group are omitted; at least one must have a value.
        what: kind of group, such as "channel".
        y: label of the values.
        is_share: whether the values are shares of 1, shown in percent.
    """
    factor, as_text = (100, share) if is_share else (1, number_or_dash)
    bars = [each for each in bars if set(each.heights) != {None}]
    thickness = 0.8 / len(bars)
    with _axes(height=max(1.2, 0.7 + 0.26 * len(groups) * len(bars))) as (figure, axis):
        for place_of, each in enumerate(bars):
            places = [group + place_of * thickness for group in range(len(groups))]
            widths = [factor * (height or 0.0) for height in each.heights]
            drawn = axis.barh(places, widths, 0.85 * thickness, **_look(place_of))
            for place, width, height, bar in zip(places, widths, each.heights, drawn, strict=True):
                bar.set_gid(f"mark-{place_of + 1}-{place:.2f}")
                if height is not None:
                    text = f"{width:.0f}\u00a0%" if is_share else number(width)
                    axis.annotate(text, (width, place), (4, 0), textcoords="offset points", va="center")
        axis.set_yticks(
            [group + 0.4 - thickness / 2 for group in range(len(groups))],
            [clip(group, MAX_LABEL) for group in groups],
        )
        axis.invert_yaxis()
        axis.grid(visible=False, axis="y")
        axis.grid(visible=True, axis="x")
        if is_share:
            axis.set(xlabel=f"{y}, %", xlim=(0, 108))
            axis.set_xticks([0, 25, 50, 75, 100])
        else:
            axis.set(xlabel=y)
            axis.margins(x=0.15)  # room for the values
        svg = _inline(figure, name, title)
    rows = []
    for place, group in enumerate(groups):
        rows.append([group, *(as_text(each.heights[place]) for each in bars)])
    table = Table(title, [what, *(each.name for each in bars)], rows)
    summaries = [f"{each.name}: {_lowest_to_highest(groups, each.heights, as_text)}" for each in bars]
    return Figure(name, title, "; ".join(summaries) + ".", svg, [each.name for each in bars], table, is_bars=True)


def draw_stacks(name: str, title: str, layers: Sequence[Line], *, x: str, y: str) -> Figure:
    """Draw stacked vertical bars; each is the mean over consecutive points if there are many.

    Args:
        layers: the layers from bottom to top, with the same places.
    """
    layers = [Line(layer.name, averaged(layer.points, MAX_STACKS)) for layer in layers]
    places = [place for place, _ in layers[0].points]
    width = 0.85 * min((after - before for before, after in pairwise(places)), default=1.0)
    bottoms = [0.0] * len(places)
    with _axes() as (figure, axis):
        for number, layer in enumerate(layers):
            heights = [value for _, value in layer.points]
            drawn = axis.bar(places, heights, width, bottoms, linewidth=0.8, **_look(number))
            for place, bar in zip(places, drawn, strict=True):
                bar.set_gid(f"mark-{number + 1}-{place:.2f}")
            bottoms = [bottom + height for bottom, height in zip(bottoms, heights, strict=True)]
        axis.set(xlabel=x, ylabel=y)
        axis.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
        svg = _inline(figure, name, title)
    summaries = [f"{layer.name}: {_from_to(layer.points, is_share=False)}" for layer in layers]
    names = [layer.name for layer in layers]
    table = _table_of(layers, x, y, is_share=False)
    return Figure(name, title, "; ".join(summaries) + ".", svg, names, table, is_bars=True)


def _look(number: int) -> dict[str, Any]:
    """Return color and hatching of the bars of a series; only the first one is filled."""
    place = number % len(SERIES)
    fill = "none"
    if place == 0:
        fill = SERIES[0]
    return {"color": fill, "edgecolor": SERIES[place], "hatch": HATCHES[place]}


def share(value: float | None) -> str:
    """Format a share as a percentage; a dash for None."""
    if value is None:
        return "–"
    return f"{100 * value:.1f}\u00a0%"


def number_or_dash(value: float | None) -> str:
    """Format a number; a dash for None."""
    if value is None:
        return "–"
    return number(value)


def number(value: float) -> str:
    """Format a number with four digits, without an exponent if possible."""
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def thin(points: Points, most: int) -> Points:
    """Reduce points evenly to about `most`, including the last point."""
    stride = max(1, -(-len(points) // most))
    chosen = list(points[::stride])
    if (len(points) - 1) % stride:
        chosen.append(points[-1])
    return chosen


def averaged(points: Points, most: int) -> Points:
    """Reduce points to at most `most`, each the mean over equally many consecutive points (the last over fewer)."""
    size = max(1, -(-len(points) // most))
    means = []
    for first in range(0, len(points), size):
        group = points[first : first + size]
        means.append((sum(place for place, _ in group) / len(group), sum(value for _, value in group) / len(group)))
    return means


@contextmanager
def _axes(height: float = HEIGHT) -> Iterator[tuple[mpl_figure.Figure, Axes]]:
    with rc_context(STYLE), warnings.catch_warnings():
        # The browser selects fonts; matplotlib only measures text with its font, which lacks characters of many
        # languages.
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        figure = mpl_figure.Figure(figsize=(WIDTH, height), dpi=72)  # a pixel of the renderer is a point
        FigureCanvasSVG(figure)
        yield figure, figure.subplots()


def as_svg(figure: mpl_figure.Figure) -> bytes:
    """Return the figure as an SVG file. The same figure gives bitwise identical files."""
    out = io.BytesIO()
    with rc_context({"svg.hashsalt": "swiftlite"}):  # otherwise, ids are random
        figure.savefig(out, format="svg", metadata={"Date": None})
    return out.getvalue()


def _inline(figure: mpl_figure.Figure, name: str, title: str) -> Markup:
    """Return the SVG element with unique ids, the page's colors, and its title for screen readers."""
    # The constrained layout would measure the labels twice and draw the figure again.
    figure.tight_layout(pad=MARGIN)
    figure.set_layout_engine(None)  # the placeholder that it leaves would make savefig draw twice
    text = as_svg(figure).decode()
    text = re.sub(
        r"\s*<(metadata|style)\b.*?</\1>", "", text, flags=re.DOTALL
    )  # the style would apply to the whole page
    _, _, content = text[text.index("<svg") :].partition(">")
    box = re.search(r'viewBox="[^"]*"', text)
    assert box is not None
    for before in ('id="', "url(#", 'href="#'):
        content = content.replace(before, f"{before}{name}-")
    for color, variable in VARIABLES.items():
        content = content.replace(color, f"var({variable})")
    head = Markup('<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" ')
    head += Markup(f'{box.group()} role="img" aria-labelledby="{name}-title"><title id="{name}-title">')
    return head + escape(title) + Markup("</title>") + Markup(content)


def _format(is_share: bool) -> Callable[[float], str]:
    if is_share:
        return share
    return number


def _from_to(points: Points, is_share: bool) -> str:
    show = _format(is_share)
    last = show(points[-1][1])
    if len(points) == 1:
        return last
    return f"{show(points[0][1])} to {last}"


def _lowest_to_highest(groups: Sequence[str], heights: Sequence[float | None], as_text: Callable[[float], str]) -> str:
    known = [(height, group) for height, group in zip(heights, groups, strict=True) if height is not None]
    lowest, lowest_name = min(known)
    highest, highest_name = max(known)
    if lowest == highest:
        return as_text(lowest)
    return f"{as_text(lowest)} ({lowest_name}) to {as_text(highest)} ({highest_name})"


def _table_of(lines: Sequence[Line], x: str, y: str, is_share: bool) -> Table:
    """Return a table with a row for each x that is shown. A cell is empty if its line has no point at this x."""
    show = _format(is_share)
    values = [dict(line.points) for line in lines]
    places = sorted(set().union(*values))
    shown = [place for place, _ in thin([(place, 0.0) for place in places], MAX_ROWS)]
    rows = []
    for place in shown:
        row = [number(place)]
        for points in values:
            cell = ""
            if place in points:
                cell = show(points[place])
            row.append(cell)
        rows.append(row)
    title = y
    if len(shown) < len(places):
        title = f"{y}: {len(shown)} of {len(places)} points"
    return Table(title, [x, *(line.name for line in lines)], rows)
