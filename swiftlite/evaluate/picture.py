"""evaluation.svg: acceptance by channel, a bar for each depth, the baseline's beside it."""

import io
from collections.abc import Mapping
from typing import Any

from matplotlib.figure import Figure


def rates(how: str, figures: dict[str, Any]) -> list[float]:
    """Acceptance by depth, or by the engine's draft position."""
    if how == "teacher_forced":
        return [head["acceptance"] for head in figures["heads"]]
    return figures["acceptance_per_position"]


def draw(results: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> bytes:
    """The picture, as SVG.

    Args:
        results: "model", and "baseline" where there is one -> how it was measured -> channel -> figures.
    """
    ways = list(results["model"])
    figure = Figure(figsize=(8, 3.2 * len(ways)), layout="constrained")
    axes = figure.subplots(len(ways), squeeze=False)[:, 0]
    for axis, how in zip(axes, ways, strict=True):
        channels = list(results["model"][how])
        bars = {}
        for name, measured in results.items():
            shares = [rates(how, each) if (each := measured.get(how, {}).get(channel)) else [] for channel in channels]
            for depth in range(max(map(len, shares))):
                heights = [100 * each[depth] if depth < len(each) else 0.0 for each in shares]
                bars[f"{name}, depth {depth + 1}"] = heights
        width = 0.8 / max(len(bars), 1)
        for number, (label, heights) in enumerate(bars.items()):
            axis.bar([place + number * width for place in range(len(channels))], heights, width, label=label)
        axis.set_xticks([place + 0.4 - width / 2 for place in range(len(channels))], channels)
        axis.set(title=how.replace("_", "-"), ylabel="accepted, %", ylim=(0, 100))
        axis.legend(fontsize="small")
    out = io.BytesIO()
    figure.savefig(out, format="svg", metadata={"Date": None})
    return out.getvalue()
