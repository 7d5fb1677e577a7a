"""Test the HTML of a page with Python's parser."""

import shlex
import subprocess
from html.parser import HTMLParser

import pytest

from swiftlite.report.figure import Bars, Line, draw_bars, draw_lines, thin
from swiftlite.report.page import MarkedAnswer, Page, Section, Table, Tile, render
from tests.messages import mentions
from tests.report.files import HOSTILE


class Reader(HTMLParser):
    """Collects tags, attributes and text."""

    def __init__(self, html: bytes):
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.texts: list[str] = []
        self.feed(html.decode())
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs

    def handle_data(self, data):
        self.texts.append(data)


def test_every_text_is_escaped():
    token = {"text": HOSTILE, "depth": 1, "refused": HOSTILE}
    page = Page(
        HOSTILE,
        HOSTILE,
        [Tile(HOSTILE, HOSTILE, HOSTILE)],
        [
            Section(
                HOSTILE,
                HOSTILE,
                [Tile(HOSTILE, HOSTILE)],
                [
                    draw_lines("a", HOSTILE, [Line(HOSTILE, [(1, 1)]), Line("b", [(1, 2)])], x=HOSTILE, y=HOSTILE),
                    draw_bars("b", HOSTILE, [HOSTILE], [Bars(HOSTILE, [0.5])], what=HOSTILE, y=HOSTILE),
                ],
                [MarkedAnswer(HOSTILE, HOSTILE, HOSTILE, [token], [token])],
                [Table(HOSTILE, [HOSTILE], [[HOSTILE]])],
                [shlex.quote(HOSTILE)],
            )
        ],
    )
    found = Reader(render(page))
    assert not {"script", "img"} & set(found.tags)
    assert found.tags.count("style") == 1
    assert "onerror" not in dict(found.attributes)
    assert sum(HOSTILE in text for text in found.texts) >= 15


def test_nothing_is_loaded():
    figure = draw_lines("a", "A line", [Line("a", [(1, 1), (2, 4)])], x="x", y="y")
    html = render(Page("t", "l", [], [Section("s", figures=[figure])]))
    links = [value for name, value in Reader(html).attributes if name.endswith(("href", "src")) and value]
    assert [link for link in links if not link.startswith(("#", "data:"))] == []
    assert b"url(http" not in html


def test_white_space_that_was_refused_can_be_seen():
    answer = MarkedAnswer(
        "p", "", "n", [{"text": "a", "depth": 0, "refused": " \n"}, {"text": "b", "depth": 0, "refused": ""}]
    )
    html = render(Page("t", "l", [], [Section("s", answers=[answer])])).decode()
    assert "␣↵</del>a" in html
    assert "∅</del>b" in html


def test_a_command_that_is_folded_says_the_same():
    command = shlex.join(["swiftlite", "bench", "--model", "a --b", "--system", "two\nlines", "--x", "1", "2"])
    html = render(Page("t", "l", [], [Section("s", commands=[command])])).decode()
    shown = "".join(Reader(html.encode()).texts)
    folded = shown[shown.index("swiftlite bench") : shown.index("1 2") + 3]
    assert len(folded.splitlines()) > 3
    script = f"swiftlite() {{ printf '%s\\0' swiftlite \"$@\"; }}; {folded}"
    words = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True).stdout
    assert words.split("\0")[:-1] == shlex.split(command)


def test_half_a_surrogate_pair_is_no_reason_to_fail():
    assert b"?" in render(Page("\ud83d", "", []))


@pytest.mark.parametrize("count", [1, 2, 5, 599, 600, 601, 12_345])
def test_thin_points_keep_both_ends(count):
    points = [(step, float(step)) for step in range(count)]
    found = thin(points, 600)
    assert found[0] == points[0]
    assert found[-1] == points[-1]
    assert len(found) <= 601
    assert set(found) <= set(points)


def test_bars_that_no_group_has_are_left_out():
    figure = draw_bars(
        "b", "t", ["x", "y"], [Bars("here", [0.5, 0.25]), Bars("gone", [None, None])], what="g", y="share"
    )
    assert figure.series == ["here"]
    assert mentions(figure.text, "here: 25.0 y 50.0 x")
    assert figure.table.rows == [["x", "50.0\u00a0%"], ["y", "25.0\u00a0%"]]


def test_a_name_in_any_script_draws_without_a_warning(recwarn):
    draw_bars("b", "t", ["算术", "$\\frac$", "a" * 200], [Bars("here", [0.5, 0.2, 0.1])], what="通道", y="份额")
    assert [str(each.message) for each in recwarn] == []


def test_the_same_figure_is_the_same_bytes_and_has_ids_of_its_own():
    def draw(name: str) -> str:
        return draw_lines(name, "t", [Line("a", [(1, 1), (2, 2)])], x="x", y="y").svg

    assert draw("first") == draw("first")
    assert draw("first").replace("first-", "second-") == draw("second")


def test_control_characters_are_replaced():
    answer = MarkedAnswer("p", "", "n", [{"text": "a\x00b\x1b[0m\tc\n", "depth": 0}])
    html = render(Page("t", "l", [], [Section("s", answers=[answer])])).decode()
    assert "a\ufffdb\ufffd[0m\tc\n" in html
    assert not {"\x00", "\x1b"} & set(html)
