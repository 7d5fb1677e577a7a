"""Test the content of bench.html, and the page in a browser."""

import pytest

from swiftlite.report.page import Page, render
from swiftlite.serve.bench.measure import describe
from swiftlite.serve.bench.page import AGAIN, bench_page
from swiftlite.serve.bench.report import to_json
from tests.browser import CHROMIUM, HOW_TO_GET_IT
from tests.messages import mention_each, mentions
from tests.report.look import VIEWS, listen, look
from tests.serve.bench.test_report import ARGS, SERVERS

SURROUNDINGS = {
    "options": {"model": "a model", "concurrency": [1, 8], "system": None},
    "versions": {"torch": "2"},
    "machine": {"cpus": 2, "gpus": []},
    "prompts": 1,
}


@pytest.fixture
def page() -> Page:
    return bench_page(SURROUNDINGS | to_json(ARGS, SERVERS, is_complete=True))


def test_what_was_chosen_comes_first(page):
    assert mention_each([(tile.name, tile.note) for tile in page.tiles], ["1 2.00x", "8"])
    assert [mentions(tile.value, "1") for tile in page.tiles] == [True, False]
    one, none, changing = page.sections[0].commands
    assert "--speculative mtp" in one
    assert "--speculative none" in none
    assert "--draft_schedule figures/bench.json" in changing


def test_each_server_has_a_line_in_each_figure_and_rows_in_the_table(page):
    names = [describe(0), describe(1), describe(2), AGAIN]
    figures = page.sections[1].figures
    assert [list(figure.series) for figure in figures] == [names] * 3
    assert figures[0].table.rows == [
        ["1", "99.9", "199.6", "124.8", "99.9"],
        ["8", "199.6", "166.4", "99.9", "199.6"],
    ]
    rows = page.sections[1].tables[0].rows
    assert [row[:2] for row in rows] == [[name, number] for name in names for number in "18"]
    assert rows[2][-2] == "2.00"
    assert mentions(rows[2][-1], "1")
    assert mentions(rows[4][-1], "0 1")


def test_a_single_concurrency_is_drawn_as_bars():
    content = SURROUNDINGS | to_json(ARGS, SERVERS, is_complete=True)
    for server in content["servers"]:
        del server["measured"][1:]
    figure = bench_page(content).sections[1].figures[0]
    assert figure.is_bars
    assert figure.table.rows == [[describe(0), "99.9"], [describe(1), "199.6"], [describe(2), "124.8"], [AGAIN, "99.9"]]
    assert ">199.6<" in figure.svg


@pytest.mark.skipif(CHROMIUM is None, reason=HOW_TO_GET_IT)
def test_the_page_in_a_browser(browser, page, tmp_path, tmp_path_factory):
    path = tmp_path / "bench.html"
    path.write_bytes(render(page))
    for name, view in VIEWS.items():
        look(browser, path, view, 3, tmp_path_factory.getbasetemp() / f"screenshots/bench-{name}.png")
    listen(browser)
