"""Draw line and bar charts as inline SVG without scripts, with text as text.

matplotlib draws with placeholder colours, which are replaced by the CSS variables of templates/style.css, so charts
follow the dark mode of the browser. Lines also differ by their dashes and bars by their hatching.
"""

import io
import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup, escape
from matplotlib import figure as mpl_figure
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from swiftlite.errors import clip
from swiftlite.report.page import Figure, Table

Points = Sequence[tuple[float, float]]

INK = "#010101"
GRID = "#010102"
SERIES = ("#010111", "#010112", "#010113", "#010114", "#010115", "#010116")
"""One for each series of a figure; a seventh one looks like the first."""
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
"""In inches: 442 pixels wide, which a phone shows at three quarters: letters of 10 pixels."""
MAX_POINTS = 600
"""Of a line. There are no more pixels."""
MAX_ROWS = 40
"""Of the table behind a line."""
MAX_LABEL = 24
"""Characters of a name beside a bar."""


@dataclass(frozen=True)
class Line:
    """A named line through points (x, y) in the order of x."""

    name: str
    points: Points


@dataclass(frozen=True)
class Bars:
    """A named bar for each group; None where the group has none."""

    name: str
    heights: Sequence[float | None]


def draw_lines(
    name: str, title: str, lines: Sequence[Line], *, x: str, y: str, is_share: bool = False, has_ticks: bool = False
) -> Figure:
    """Lines over one another.

    Args:
        name: tells this figure from others of a page.
        lines: each with one point or more.
        x, y: what the axes show.
        is_share: whether y is a share of 1, shown in percent.
        has_ticks: whether x is named where there are points, and nowhere else.
    """
    factor = 100 if is_share else 1
    with _axes() as (figure, axis):
        for number, line in enumerate(lines):
            points = thin(line.points, MAX_POINTS)
            (drawn,) = axis.plot(
                [place for place, _ in points],
                [factor * value for _, value in points],
                color=SERIES[number % len(SERIES)],
                linestyle=DASHES[number % len(DASHES)],
                linewidth=1.8,
                marker="o" if len(points) <= 12 else "",
                markersize=4,
            )
            drawn.set_gid(f"mark-{number + 1}")
        axis.set(xlabel=x, ylabel=f"{y}, %" if is_share else y)
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


def draw_bars(name: str, title: str, groups: Sequence[str], bars: Sequence[Bars], *, what: str, y: str) -> Figure:
    """Draw groups of horizontal bars with their percentages, one group below the other.

    Args:
        groups: names of the groups, such as channels.
        bars: bars without a value in any group are omitted; at least one must have a value.
        what: kind of group, such as "channel".
        y: label of the values.
    """
    bars = [each for each in bars if set(each.heights) != {None}]
    thickness = 0.8 / len(bars)
    with _axes(height=max(1.2, 0.7 + 0.26 * len(groups) * len(bars))) as (figure, axis):
        for number, each in enumerate(bars):
            places = [group + number * thickness for group in range(len(groups))]
            widths = [100 * (height or 0.0) for height in each.heights]
            color = SERIES[number % len(SERIES)]
            is_filled = number % len(SERIES) == 0
            drawn = axis.barh(places, widths, 0.85 * thickness, color=color if is_filled else "none", edgecolor=color)
            for place, width, height, bar in zip(places, widths, each.heights, drawn, strict=True):
                bar.set_gid(f"mark-{number + 1}-{place:.2f}")
                bar.set_hatch(HATCHES[number % len(HATCHES)])
                if height is not None:
                    axis.annotate(
                        f"{width:.0f}\u00a0%", (width, place), (4, 0), textcoords="offset points", va="center"
                    )
        axis.set_yticks(
            [group + 0.4 - thickness / 2 for group in range(len(groups))],
            [clip(group, MAX_LABEL) for group in groups],
        )
        axis.invert_yaxis()
        axis.grid(visible=False, axis="y")
        axis.grid(visible=True, axis="x")
        axis.set(xlabel=f"{y}, %", xlim=(0, 108))
        axis.set_xticks([0, 25, 50, 75, 100])
        svg = _inline(figure, name, title)
    rows = []
    for number, group in enumerate(groups):
        rows.append([group, *(share(each.heights[number]) for each in bars)])
    table = Table(title, [what, *(each.name for each in bars)], rows)
    summaries = [f"{each.name}: {_lowest_to_highest(groups, each.heights)}" for each in bars]
    return Figure(name, title, "; ".join(summaries) + ".", svg, [each.name for each in bars], table, is_bars=True)


def share(value: float | None) -> str:
    """Format a share as a percentage; a dash if there is none."""
    return "–" if value is None else f"{100 * value:.1f}\u00a0%"


def number(value: float) -> str:
    """Four digits of a number, and no exponent where there need be none."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def thin(points: Points, most: int) -> Points:
    """Thin points evenly to about `most`, including the last one."""
    stride = max(1, -(-len(points) // most))
    chosen = list(points[::stride])
    if (len(points) - 1) % stride:
        chosen.append(points[-1])
    return chosen


@contextmanager
def _axes(height: float = HEIGHT) -> Iterator[tuple[mpl_figure.Figure, Axes]]:
    with rc_context(STYLE), warnings.catch_warnings():
        # Fonts are the reader's own; matplotlib only measures with one, which lacks signs of many languages.
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        figure = mpl_figure.Figure(figsize=(WIDTH, height), layout="constrained")
        yield figure, figure.subplots()


def as_svg(figure: mpl_figure.Figure) -> bytes:
    """The figure as a file, the same bytes each time it is drawn."""
    out = io.BytesIO()
    with rc_context({"svg.hashsalt": "swiftlite"}):  # the ids inside would be random
        figure.savefig(out, format="svg", metadata={"Date": None})
    return out.getvalue()


def _inline(figure: mpl_figure.Figure, name: str, title: str) -> Markup:
    """Return the SVG element with unique ids, the page's colours, and its title for screen readers."""
    text = as_svg(figure).decode()
    text = re.sub(r"\s*<(metadata|style)\b.*?</\1>", "", text, flags=re.DOTALL)  # the style would be the whole page's
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


def _from_to(points: Points, is_share: bool) -> str:
    show = share if is_share else number
    first = show(points[0][1])
    last = show(points[-1][1])
    return last if len(points) == 1 else f"{first} to {last}"


def _lowest_to_highest(groups: Sequence[str], heights: Sequence[float | None]) -> str:
    known = [(height, group) for height, group in zip(heights, groups, strict=True) if height is not None]
    lowest, lowest_name = min(known)
    highest, highest_name = max(known)
    if lowest == highest:
        return share(lowest)
    return f"{share(lowest)} ({lowest_name}) to {share(highest)} ({highest_name})"


def _table_of(lines: Sequence[Line], x: str, y: str, is_share: bool) -> Table:
    """A row for each x that is shown; a line may have no point there."""
    show = share if is_share else number
    values = [dict(line.points) for line in lines]
    places = sorted(set().union(*values))
    shown = [place for place, _ in thin([(place, 0.0) for place in places], MAX_ROWS)]
    rows = []
    for place in shown:
        cells = [show(points[place]) if place in points else "" for points in values]
        rows.append([number(place), *cells])
    title = y if len(shown) == len(places) else f"{y}: {len(shown)} of {len(places)} points"
    return Table(title, [x, *(line.name for line in lines)], rows)
