"""Measure an engine's speed at several values of `infer --draft_confidence` on the same prompts.

Stopping drafts early avoids draft tokens that would be rejected, but also loses some that would be accepted. The cost
of a draft token depends on the machine, so the values are compared by time.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from swiftlite.engines.engine import Engine, Sampling
from swiftlite.report.page import Table

COLUMNS = ["draft_confidence", "drafted per step", "tokens per step", "tokens/s", "ratio"]


def by_confidence(
    engine: Engine, prompts: Sequence[Sequence[int]], greedy: Sampling, confidences: Sequence[float]
) -> list[dict[str, Any]]:
    """Return the measurement at each draft confidence in the format of evaluation.json."""
    measured = []
    for confidence in confidences:
        before = engine.draft_counts()
        start = time.perf_counter()
        completions = engine.generate(prompts, replace(greedy, draft_confidence=confidence))
        seconds = time.perf_counter() - start
        counts = engine.draft_counts().since(before)
        steps = max(counts.drafts, 1)
        measured.append(
            {
                "draft_confidence": confidence,
                "drafted_per_step": counts.drafted / steps,
                "mean_accepted_length": 1 + counts.accepted / steps,
                "tokens_per_second": sum(len(each.token_ids) for each in completions) / seconds,
            }
        )
    return measured


def confidence_table(measured: Sequence[Mapping[str, Any]]) -> Table:
    """Return a table with a row for each draft confidence; ratios are relative to the first confidence."""
    first = measured[0]["tokens_per_second"]
    rows = []
    for each in measured:
        speed = each["tokens_per_second"]
        figures = [each["drafted_per_step"], each["mean_accepted_length"]]
        rows.append([f"{each['draft_confidence']:g}", *(f"{x:.2f}" for x in figures), f"{speed:.1f}"])
        rows[-1].append(f"{speed / first:.2f}")
    return Table("Speed on the same prompts", COLUMNS, rows)


def fastest_line(measured: Sequence[Mapping[str, Any]]) -> str:
    """Return a line with the fastest draft confidence."""
    fastest = max(measured, key=lambda each: each["tokens_per_second"])
    return f"fastest: --draft_confidence {fastest['draft_confidence']:g}"
