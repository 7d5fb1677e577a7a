"""Test that drawing a chart twice gives identical bytes."""

from matplotlib.figure import Figure

from swiftlite.report.figure import as_svg


def draw() -> bytes:
    figure = Figure()
    axis = figure.subplots()
    axis.plot([1, 2], label="a line")
    axis.legend()
    return as_svg(figure)


def test_the_same_figure_is_the_same_file():
    assert draw() == draw()
    assert b"<svg" in draw()
