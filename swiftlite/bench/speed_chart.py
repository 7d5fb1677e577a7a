"""bench.svg: tokens per second by concurrency, a line for each number of drafted tokens, every round a dot."""

from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure

from swiftlite.bench.measure import ServerResult, in_words
from swiftlite.report.chart import as_svg


def draw(servers: Sequence[ServerResult]) -> bytes:
    """The chart, as SVG.

    Args:
        servers: the last one drafts nothing, as the first did.
    """
    names = [in_words(server.num_speculative_tokens) for server in servers[:-1]]
    names.append("drafting nothing, again at the end")
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axis = figure.subplots()
    for name, server in zip(names, servers, strict=True):
        (line,) = axis.plot([np.median(result.speeds) for result in server.measured], label=name)
        for place, result in enumerate(server.measured):
            axis.plot([place] * len(result.speeds), result.speeds, ".", color=line.get_color(), alpha=0.5)
    concurrencies = [str(result.concurrency) for result in servers[0].measured]
    axis.set_xticks(range(len(concurrencies)), concurrencies)
    axis.set(xlabel="requests at once", ylabel="tokens/s", ylim=(0, None))
    axis.legend(fontsize="small")
    return as_svg(figure)
