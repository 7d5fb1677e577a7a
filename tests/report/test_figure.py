"""Test charts: drawing one twice gives identical bytes, and stacks are means."""

from matplotlib.figure import Figure

from swiftlite.report.figure import Line, as_svg, averaged, draw_stacks


def draw() -> bytes:
    figure = Figure()
    axis = figure.subplots()
    axis.plot([1, 2], label="a line")
    axis.legend()
    return as_svg(figure)


def test_the_same_figure_is_the_same_file():
    assert draw() == draw()
    assert b"<svg" in draw()


def test_many_points_become_means_of_their_neighbours():
    points = [(step, float(step % 2)) for step in range(1, 8)]
    assert averaged(points, 7) == points
    assert averaged(points, 4) == [(1.5, 0.5), (3.5, 0.5), (5.5, 0.5), (7, 1.0)]


def test_a_stack_is_as_high_as_its_layers():
    layers = [Line("one", [(1, 1.0), (2, 2.0)]), Line("two", [(1, 0.5), (2, 0.25)])]
    figure = draw_stacks("stacks", "Stacks", layers, x="step", y="seconds")
    assert figure.table.rows == [["1", "1", "0.5"], ["2", "2", "0.25"]]
    assert [f'id="stacks-mark-{layer}-{step}.00"' in figure.svg for layer in (1, 2) for step in (1, 2)] == [True] * 4


def test_a_single_step_has_a_stack():
    assert 'id="one-mark-1-1.00"' in draw_stacks("one", "One", [Line("a", [(1, 1.0)])], x="step", y="seconds").svg
