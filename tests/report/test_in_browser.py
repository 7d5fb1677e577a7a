"""Every kind of page in a real browser: on a phone, on a desk, in the dark. Pictures stay under pytest's directory.

What is asserted is what a reader would notice: complaints of the browser, figures without anything in them, a page that
has to be pushed sideways, letters that are too small or too pale, a keyboard that does not get there.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from swiftlite.evaluate.page import evaluation_page
from swiftlite.report.comparison import comparison_page
from swiftlite.report.page import render
from swiftlite.report.run_files import read_run
from swiftlite.report.run_page import run_page
from tests.browser import CHROMIUM, HOW_TO_GET_IT, Browser
from tests.report.files import HOSTILE, write_run

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason=HOW_TO_GET_IT)

NUM_FIGURES = {"run": 10, "hostile": 10, "runs": 13, "evaluation": 3}
VIEWS = {"phone": (360, False), "desk": (1280, False), "dark": (1280, True)}
SMALLEST_LETTERS = 8.5
"""Height in pixels of what is written in a figure, on a phone."""
CONTRAST = 4.5
"""Of text and what it stands on, as WCAG 2 wants it of small letters."""

EMPTY_FIGURES = """
[...document.querySelectorAll("figure")].filter(figure => {
    const marks = [...figure.querySelectorAll('svg g[id*="-mark-"] path')];
    return !marks.some(mark => mark.getBoundingClientRect().width > 1);
}).map(figure => figure.id)
"""
SMALL_LETTERS = """
Math.min(...[...document.querySelectorAll("figure > svg text")].map(text => {
    const scale = text.ownerSVGElement.getScreenCTM().a;
    return scale * parseFloat(getComputedStyle(text).fontSize);
}))
"""
PALE_TEXTS = """
(() => {
    const parse = color => color.match(/[\\d.]+/g).map(Number);
    const light = color => {
        const [r, g, b] = parse(color).map(value => value / 255)
            .map(value => value <= 0.03928 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4);
        return 0.2126 * r + 0.7152 * g + 0.0722 * b;
    };
    const ground = element => {
        for (; element; element = element.parentElement) {
            const color = getComputedStyle(element).backgroundColor;
            if (parse(color)[3] !== 0) return color;
        }
    };
    const found = [];
    for (const element of document.querySelectorAll("h1,h2,h3,p,dt,dd,th,td,caption,summary,li,code,del,.drafted")) {
        const pair = [light(getComputedStyle(element).color), light(ground(element))].sort((a, b) => b - a);
        const contrast = (pair[0] + 0.05) / (pair[1] + 0.05);
        if (contrast < CONTRAST) found.push(`${element.tagName}.${element.className} ${contrast.toFixed(2)}`);
    }
    return [...new Set(found)];
})()
""".replace("CONTRAST", str(CONTRAST))
UNNAMED_FIGURES = """
[...document.querySelectorAll("figure > svg")].filter(svg => {
    const title = document.getElementById(svg.getAttribute("aria-labelledby"));
    return svg.getAttribute("role") !== "img" || !title || !title.textContent.trim();
}).length
"""
DOUBLE_IDS = """
(() => {
    const ids = [...document.querySelectorAll("[id]")].map(element => element.id);
    return ids.filter((id, place) => ids.indexOf(id) !== place);
})()
"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory) -> Iterator[Browser]:
    browser = Browser(tmp_path_factory.mktemp("profile"))
    yield browser
    browser.close()


def figures(*rates: float) -> dict:
    return {"samples": 3, "loss": 1.0, "heads": [{"targets": 10, "loss": 1.0, "acceptance": rate} for rate in rates]}


@pytest.fixture(scope="module")
def pages(tmp_path_factory) -> dict[str, Path]:
    """A page of each kind; "hostile" tells of a run whose texts would like to be HTML."""
    directory = tmp_path_factory.mktemp("pages")
    plain = write_run(directory / "a/run")
    hostile = write_run(directory / "b/run", text=HOSTILE, steps=1000, lr=1e-3)
    results = {
        "model": {"teacher_forced": {"all": figures(0.5, 0.25), HOSTILE: figures(0.75, 0.5), "$x$": figures(1, 0)}},
        "baseline": {"teacher_forced": {"all": figures(0.4)}},
    }
    results["model"]["vllm"] = {"all": {"prompts": 3, "acceptance_per_position": [0.5]}}
    made = {
        "run": run_page(read_run(plain)),
        "hostile": run_page(read_run(hostile)),
        "runs": comparison_page([plain, hostile]),
        "evaluation": evaluation_page(results, {"model": HOSTILE, "baseline": "before"}),
    }
    paths = {}
    for name, page in made.items():
        paths[name] = directory / f"{name}.html"
        paths[name].write_bytes(render(page))
    return paths


@pytest.mark.parametrize("view", list(VIEWS))
@pytest.mark.parametrize("name", list(NUM_FIGURES))
def test_a_page_as_a_reader_sees_it(browser, pages, tmp_path_factory, name, view):
    width, is_dark = VIEWS[view]
    browser.requests.clear()
    browser.errors.clear()
    browser.open(pages[name], width=width, is_dark=is_dark)
    browser.screenshot(tmp_path_factory.getbasetemp() / "screenshots" / f"{name}-{view}.png")

    assert browser.errors == []
    assert {url for url in browser.requests if not url.startswith("data:")} == {pages[name].as_uri()}
    assert browser.evaluate("document.querySelectorAll('figure').length") == NUM_FIGURES[name]
    assert browser.evaluate(EMPTY_FIGURES) == []
    assert browser.evaluate("document.documentElement.scrollWidth") <= width
    assert browser.evaluate(SMALL_LETTERS) >= SMALLEST_LETTERS
    assert browser.evaluate(PALE_TEXTS) == []


@pytest.mark.parametrize("name", list(NUM_FIGURES))
def test_a_page_for_those_who_do_not_see_it(browser, pages, name):
    browser.open(pages[name], width=1280)
    assert browser.evaluate("document.documentElement.lang") == "en"
    assert browser.evaluate("document.querySelectorAll('h1').length") == 1
    assert browser.evaluate(UNNAMED_FIGURES) == 0
    assert browser.evaluate(DOUBLE_IDS) == []
    tables = (
        "[...document.querySelectorAll('figure')].every(figure => figure.querySelectorAll('details tbody tr').length)"
    )
    assert browser.evaluate(tables)


def test_the_numbers_behind_a_figure_are_within_reach_of_the_keyboard(browser, pages):
    browser.open(pages["run"], width=1280)
    for _ in range(20):
        browser.press("Tab")
        if browser.evaluate("document.activeElement.tagName") == "SUMMARY":
            break
    opened = "document.activeElement.parentElement.open"
    assert browser.evaluate(opened) is False
    browser.press("Enter")
    assert browser.evaluate(opened) is True


def test_hostile_text_stays_text(browser, pages):
    browser.open(pages["hostile"], width=1280)
    assert browser.evaluate("document.querySelectorAll('script, img, [onerror]').length") == 0
    assert browser.evaluate("document.querySelectorAll('style').length") == 1
    assert browser.evaluate("document.querySelector('.prompt').textContent") == HOSTILE
    assert browser.evaluate("document.querySelector('.depth-2').textContent") in (HOSTILE, "second")
    assert HOSTILE in browser.evaluate("document.querySelector('.answer').textContent")


def test_the_judge_of_colours_sees_pale_text(browser, tmp_path):
    page = tmp_path / "pale.html"
    page.write_text("<body style='background: #fff'><p style='color: #bbb'>pale</p><p style='color: #111'>dark</p>")
    browser.open(page, width=360)
    assert browser.evaluate(PALE_TEXTS) == ["P. 1.92"]
