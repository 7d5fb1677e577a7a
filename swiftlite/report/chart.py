"""Charts as SVG."""

import io

from matplotlib import rc_context
from matplotlib.figure import Figure


def as_svg(figure: Figure) -> bytes:
    """The figure as a file, the same bytes each time it is drawn."""
    out = io.BytesIO()
    with rc_context({"svg.hashsalt": "swiftlite"}):  # the ids inside would be random
        figure.savefig(out, format="svg", metadata={"Date": None})
    return out.getvalue()
