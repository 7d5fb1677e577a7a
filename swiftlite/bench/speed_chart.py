"""bench.svg: tokens per second by concurrency, a line for each number of drafted tokens, every round a dot."""

import io
from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.figure import Figure


def draw(concurrencies: Sequence[int], speeds: Mapping[str, Sequence[Sequence[float]]]) -> bytes:
    """The chart, as SVG.

    Args:
        speeds: name of a server -> for each concurrency the tokens per second of its rounds.
    """
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axis = figure.subplots()
    places = range(len(concurrencies))
    for name, of_levels in speeds.items():
        (line,) = axis.plot(places, [np.median(rounds) for rounds in of_levels], label=name)
        for place, rounds in zip(places, of_levels, strict=True):
            axis.plot([place] * len(rounds), rounds, ".", color=line.get_color(), alpha=0.5)
    axis.set_xticks(places, [str(number) for number in concurrencies])
    axis.set(xlabel="requests at once", ylabel="tokens/s", ylim=(0, None))
    axis.legend(fontsize="small")
    out = io.BytesIO()
    figure.savefig(out, format="svg", metadata={"Date": None})
    return out.getvalue()
