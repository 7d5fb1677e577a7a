"""Define the content of a page, and render its HTML.

All text is escaped, because prompts, tokens and options are untrusted.
"""

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

import swiftlite
from swiftlite.report.table import text_table

_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")
"""Characters that HTML does not allow; tokens of a model can contain them."""


@dataclass(frozen=True)
class Table:
    """A table of text cells. The first cell of each row is the row's name."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]

    def text(self) -> str:
        """Return columns and rows as text for stdout."""
        return text_table([self.columns, *self.rows])


@dataclass(frozen=True)
class Figure:
    """A chart together with its numbers.

    Attributes:
        name: unique name within the page.
        text: description in a sentence, also for screen readers.
        svg: SVG from `figure.py`, which escapes all text.
        series: names for the legend. For a single name, there is no legend.
        is_bars: whether the chart has bars instead of lines.
    """

    name: str
    title: str
    text: str
    svg: Markup
    series: Sequence[str]
    table: Table
    is_bars: bool = False


@dataclass(frozen=True)
class Tile:
    """One of the main numbers at the top of a page: its name, the formatted value and a note."""

    name: str
    value: str
    note: str = ""


@dataclass(frozen=True)
class MarkedAnswer:
    """A prompt and its answer, and for held-out prompts the answer before training, as tokens
    (`swiftlite.acceptance.answers.describe`).

    Attributes:
        note: text with the number of drafted tokens.
        images: images of the prompt as data URIs (`swiftlite.acceptance.thumbnails`); None for a missing image.
    """

    prompt: str
    channel: str
    note: str
    tokens: Sequence[Mapping[str, Any]]
    before: Sequence[Mapping[str, Any]] = ()
    images: Sequence[str | None] = ()


@dataclass(frozen=True)
class Section:
    """A part of a page under a heading. Fields without content are not shown."""

    title: str
    text: str = ""
    tiles: Sequence[Tile] = ()
    figures: Sequence[Figure] = ()
    answers: Sequence[MarkedAnswer] = ()
    tables: Sequence[Table] = ()
    commands: Sequence[str] = ()

    @property
    def marks_drafts(self) -> bool:
        """Whether a token of the answers is an accepted draft, or replaces a rejected one."""
        return self.marks_rejected or any(token["depth"] > 0 for answer in self.answers for token in answer.tokens)

    @property
    def marks_rejected(self) -> bool:
        """Whether a rejected draft is shown in the answers."""
        return any("refused" in token for answer in self.answers for token in answer.tokens)


@dataclass(frozen=True)
class Page:
    """A complete page.

    Attributes:
        lead: the main result, in one or two sentences.
        links: texts and addresses of other pages, on served pages.
    """

    title: str
    lead: str
    tiles: Sequence[Tile]
    sections: Sequence[Section] = field(default_factory=list)
    links: Sequence[tuple[str, str]] = ()


def render(page: Page, script: str = "") -> bytes:
    """Return the page as one HTML file.

    Args:
        script: address of a script on the server of the page.
    """
    environment = Environment(
        loader=PackageLoader("swiftlite.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["visible"] = _visible
    environment.filters["folded"] = _folded
    style = Markup(environment.get_template("style.css").render())  # contains no data
    template = environment.get_template("page.html")
    html = template.render(page=page, style=style, script=script, version=swiftlite.__version__)
    return _CONTROL.sub("\ufffd", html).encode(errors="replace") + b"\n"


def _folded(command: str) -> str:
    """Return a command line with each option on a separate line, in valid shell syntax."""
    lines: list[list[str]] = [[]]
    for word in shlex.split(command):
        if word.startswith("--"):
            lines.append([])
        lines[-1].append(word)
    return " \\\n    ".join(shlex.join(line) for line in lines)


def _visible(text: str) -> str:
    """Return a text that is only white space as visible symbols, such as ␣; return other texts unchanged."""
    if text.strip():
        return text
    return text.replace("\n", "↵").replace("\t", "⇥").replace(" ", "␣") or "∅"
