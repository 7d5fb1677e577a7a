"""Report the acceptance by context length and by position in the answer, to show where heads predict badly."""

from collections.abc import Mapping
from typing import Any

from swiftlite.acceptance.by_position import PLACES
from swiftlite.acceptance.teacher_forced import ALL
from swiftlite.report.figure import Bars, draw_bars, share
from swiftlite.report.page import Section, Table
from swiftlite.report.table import text_table
from swiftlite.serve.evaluate.rates import ModelFigures, share_cells

WORDS = dict(zip(PLACES, ("tokens before", "tokens of the answer before"), strict=True))
Bucket = Mapping[str, Any]
"""One bucket of `acceptance.by_position.describe`."""


def position_tables(results: Mapping[str, ModelFigures]) -> str:
    """Return a table by context length and one by position; empty for a model without heads.

    Differences from the baseline are in percentage points.

    Args:
        results: figures of "model", and of "baseline" if there is one.
    """
    tables = []
    for place in PLACES:
        buckets = _buckets(results, "model", place)
        before = {_name(bucket): _shares(bucket) for bucket in _buckets(results, "baseline", place)}
        lines = []
        for bucket in buckets:
            found = share_cells(_shares(bucket), before.get(_name(bucket), []))
            lines.append([_name(bucket), str(bucket["heads"][0]["targets"]), *found])
        if lines:
            head = [WORDS[place], "drafts", *(f"depth {k}" for k in range(1, len(lines[0]) - 1))]
            tables.append(text_table([head, *lines]))
    return "\n\n".join(tables)


def position_sections(results: Mapping[str, ModelFigures]) -> list[Section]:
    """Return the tables as a section of a page; empty for a model without heads."""
    figures, tables = [], []
    for place in PLACES:
        buckets = _buckets(results, "model", place)
        if not buckets:
            continue
        names = [_name(bucket) for bucket in buckets]
        depths = range(len(buckets[0]["heads"]))
        bars = [Bars(f"depth {depth + 1}", [_shares(bucket)[depth] for bucket in buckets]) for depth in depths]
        title = f"By {WORDS[place]}"
        figures.append(draw_bars(place, title, names, bars, what=WORDS[place], y="accepted"))
        rows = []
        for name, bucket in zip(names, buckets, strict=True):
            rows.append([name, str(bucket["heads"][0]["targets"]), *map(share, _shares(bucket))])
        tables.append(Table(title, [WORDS[place], "drafts", *(bar.name for bar in bars)], rows))
    if not figures:
        return []
    meaning = "Share of labels where a head predicts the same token as its trunk, by the position of the label."
    return [Section("Acceptance by position", meaning, figures=figures, tables=tables)]


def _buckets(results: Mapping[str, ModelFigures], name: str, place: str) -> list[Bucket]:
    found = results.get(name, {}).get("teacher_forced", {}).get(ALL, {})
    return found.get(place, [])


def _name(bucket: Bucket) -> str:
    return f"{bucket['from']} to {bucket['to']}"


def _shares(bucket: Bucket) -> list[float]:
    return [head["acceptance"] for head in bucket["heads"]]
