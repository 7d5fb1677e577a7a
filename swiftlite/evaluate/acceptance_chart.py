"""evaluation.svg: acceptance by channel, a bar for each depth, the baseline's beside it."""

from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure

from swiftlite.evaluate.figures import ModelFigures, in_words, rates
from swiftlite.report.chart import as_svg


def draw(results: Mapping[str, ModelFigures]) -> bytes:
    """The chart, as SVG.

    Args:
        results: by name: "model", and "baseline" where there is one.
    """
    methods = list(results["model"])
    chart = Figure(figsize=(8, 3.2 * len(methods)), layout="constrained")
    axes = chart.subplots(len(methods), squeeze=False)[:, 0]
    for axis, method in zip(axes, methods, strict=True):
        channels = list(results["model"][method])
        bars = _bars(results, method, channels)
        width = 0.8 / max(len(bars), 1)
        for number, (label, heights) in enumerate(bars.items()):
            axis.bar([place + number * width for place in range(len(channels))], heights, width, label=label)
        axis.set_xticks([place + 0.4 - width / 2 for place in range(len(channels))], channels)
        axis.set(title=in_words(method), ylabel="accepted, %", ylim=(0, 100))
        axis.legend(fontsize="small")
    return as_svg(chart)


def _bars(results: Mapping[str, ModelFigures], method: str, channels: Sequence[str]) -> dict[str, list[float]]:
    """For each model and depth the percentage of each channel; 0 where a model has no such channel or depth."""
    bars = {}
    for name, measured in results.items():
        by_channel = measured.get(method, {})
        shares = [rates(method, by_channel[channel]) if channel in by_channel else [] for channel in channels]
        for depth in range(max(map(len, shares))):
            heights = [100 * each[depth] if depth < len(each) else 0.0 for each in shares]
            bars[f"{name}, depth {depth + 1}"] = heights
    return bars
