"""Test pages in a real browser: in a small and a large window, light and dark.

Pictures are stored in `screenshots` of pytest's directory.
"""

from pathlib import Path

import pytest

from swiftlite.acceptance.counts import DraftCounts
from swiftlite.engines.server.metrics import Throughput
from swiftlite.report.comparison import comparison_page
from swiftlite.report.page import render
from swiftlite.report.run_files import read_run
from swiftlite.report.run_page import run_page
from swiftlite.serve.evaluate.page import evaluation_page
from swiftlite.serve.evaluate.task_page import Compared, task_page
from swiftlite.serve.evaluate.task_results import TaskRun
from tests.browser import CHROMIUM, HOW_TO_GET_IT
from tests.data.images import data_uri, noise
from tests.report.files import HOSTILE, write_run
from tests.report.look import PALE_TEXTS, VIEWS, listen, look

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason=HOW_TO_GET_IT)

NUM_FIGURES = {"run": 11, "images": 11, "hostile": 11, "runs": 13, "evaluation": 3, "tasks": 2}


def figures(*rates: float) -> dict:
    return {"samples": 3, "loss": 1.0, "heads": [{"targets": 10, "loss": 1.0, "acceptance": rate} for rate in rates]}


@pytest.fixture(scope="module")
def pages(tmp_path_factory) -> dict[str, Path]:
    """Write a page of each kind; "hostile" is the page of a run whose texts contain HTML."""
    directory = tmp_path_factory.mktemp("pages")
    plain = write_run(directory / "a/run")
    images = [data_uri(noise(*size)) for size in ((300, 200), (20, 20))]
    with_images = write_run(directory / "c/run", images=[*images, None])
    hostile = write_run(directory / "b/run", text=HOSTILE, steps=1000, lr=1e-3)
    results = {
        "model": {"teacher_forced": {"all": figures(0.5, 0.25), HOSTILE: figures(0.75, 0.5), "$x$": figures(1, 0)}},
        "baseline": {"teacher_forced": {"all": figures(0.4)}},
    }
    results["model"]["vllm"] = {"all": {"prompts": 3, "acceptance_per_position": [0.5]}}
    made = {
        "run": run_page(read_run(plain)),
        "images": run_page(read_run(with_images)),
        "hostile": run_page(read_run(hostile)),
        "runs": comparison_page([plain, hostile]),
        "evaluation": evaluation_page(results, {"model": HOSTILE, "baseline": "before"}),
    }
    results = {"results": {HOSTILE: {"acc,none": 0.5, "acc_stderr,none": 0.1}, "t": {"acc,none": 0.25}}}
    results |= {"n-samples": {"t": {"effective": 4}}, "configs": {"t": {"output_type": "generate_until"}}}
    drafting = TaskRun(results, DraftCounts(10, 20, (6, 3)), Throughput(40, 2.0), directory)
    tasks = [Compared("t", "model", drafting, drafting, drafting), Compared("t", "baseline", None, drafting)]
    made["tasks"] = task_page(tasks, {"model": HOSTILE, "baseline": "before"})
    paths = {}
    for name, page in made.items():
        paths[name] = directory / f"{name}.html"
        paths[name].write_bytes(render(page))
    return paths


@pytest.mark.parametrize("view", list(VIEWS))
@pytest.mark.parametrize("name", list(NUM_FIGURES))
def test_a_page_as_a_reader_sees_it(browser, pages, tmp_path_factory, name, view):
    picture = tmp_path_factory.getbasetemp() / "screenshots" / f"{name}-{view}.png"
    look(browser, pages[name], VIEWS[view], NUM_FIGURES[name], picture)


@pytest.mark.parametrize("name", list(NUM_FIGURES))
def test_a_page_for_those_who_do_not_see_it(browser, pages, name):
    browser.open(pages[name], width=1280)
    listen(browser)


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


def test_images_are_shown(browser, pages):
    browser.open(pages["images"], width=1280)
    sizes = "[image.naturalWidth, image.naturalHeight, image.width, image.height]"
    found = browser.evaluate(f"[...document.querySelectorAll('.images img')].map(image => {sizes})")
    assert found == [[256, 171] * 2, [20, 20] * 2] * 2


def test_hostile_text_stays_text(browser, pages):
    browser.open(pages["hostile"], width=1280)
    assert browser.evaluate("document.querySelectorAll('script, img, [onerror]').length") == 0
    assert browser.evaluate("document.querySelectorAll('style').length") == 1
    assert browser.evaluate("document.querySelector('.prompt').textContent") == HOSTILE
    assert browser.evaluate("document.querySelector('.depth-2').textContent") in (HOSTILE, "second")
    assert HOSTILE in browser.evaluate("document.querySelector('.answer').textContent")


def test_the_judge_of_colors_sees_pale_text(browser, tmp_path):
    page = tmp_path / "pale.html"
    page.write_text("<body style='background: #fff'><p style='color: #bbb'>pale</p><p style='color: #111'>dark</p>")
    browser.open(page, width=360)
    assert browser.evaluate(PALE_TEXTS) == ["P. 1.92"]
