"""Check a page as a reader would see it: errors of the browser, empty figures, horizontal scrolling, small or pale
text.
"""

from pathlib import Path

from tests.browser import Browser

VIEWS = {"phone": (360, False), "desk": (1280, False), "dark": (1280, True)}
SMALLEST_LETTERS = 8.5
"""Minimum height in pixels of text in a figure, on a phone."""
CONTRAST = 4.5
"""Minimum contrast of text and its background, as WCAG 2 requires for small text."""

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


def look(browser: Browser, page: Path, view: tuple[int, bool], num_figures: int, picture: Path) -> None:
    """Check a page in a window of a width, dark or not, and save a picture of it."""
    width, is_dark = view
    browser.requests.clear()
    browser.errors.clear()
    browser.open(page, width=width, is_dark=is_dark)
    browser.screenshot(picture)
    assert browser.errors == []
    assert {url for url in browser.requests if not url.startswith("data:")} == {page.as_uri()}
    assert browser.evaluate("document.querySelectorAll('figure').length") == num_figures
    assert browser.evaluate(EMPTY_FIGURES) == []
    assert browser.evaluate("document.documentElement.scrollWidth") <= width
    assert browser.evaluate(SMALL_LETTERS) >= SMALLEST_LETTERS
    assert browser.evaluate(PALE_TEXTS) == []


def listen(browser: Browser) -> None:
    """Check that the open page is accessible to screen readers."""
    assert browser.evaluate("document.documentElement.lang") == "en"
    assert browser.evaluate("document.querySelectorAll('h1').length") == 1
    assert browser.evaluate(UNNAMED_FIGURES) == 0
    assert browser.evaluate(DOUBLE_IDS) == []
    assert browser.evaluate("[...document.querySelectorAll('figure')].every(e => e.querySelector('details tbody td'))")
