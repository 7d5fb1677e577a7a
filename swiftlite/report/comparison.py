"""Make the page that compares several runs: figures, differing options and curves."""

from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path

from swiftlite.args.command_line import shell_line
from swiftlite.args.commands import SftArgs
from swiftlite.args.docs import options
from swiftlite.report.figure import Line, draw_lines, number, share
from swiftlite.report.metrics import curve
from swiftlite.report.page import Figure, Page, Section, Table, Tile
from swiftlite.report.run_files import RunFiles, read_run
from swiftlite.report.run_page import held_out_agreement, lines_of, position_bars

CURVES = (
    ("loss", "Training loss of the trunk", "loss"),
    ("eval_loss", "Held-out loss of the trunk", "loss"),
    ("reward", "Mean reward", "reward"),
    ("eval_reward", "Mean reward of held-out prompts", "reward"),
    ("grad_norm", "Gradient norm", "norm"),
    ("learning_rate", "Learning rate", "learning rate"),
    ("tokens_per_second", "Speed", "tokens/s"),
    ("peak_memory_gb", "Peak memory of the first rank", "GB"),
)
"""Metrics that are plotted, as (name, title, label of the y axis)."""
MISSING = "–"


def comparison_page(directories: Sequence[Path]) -> Page:
    """Return the page of the runs in these directories."""
    runs = _named([(directory, read_run(directory)) for directory in directories])
    measured = {name: run.generated("after") for name, run in runs.items() if run.generated("after")}
    lead = "Acceptance of drafts was not measured in these runs."
    if measured:
        # Not the acceptance rate, which decreases if more tokens are drafted.
        best = max(measured, key=lambda name: measured[name]["mean_accepted_length"])
        length = measured[best]["mean_accepted_length"]
        lead = f"{best} has the most tokens per step on held-out prompts: {length:.2f}, including one of the trunk."
    tiles = []
    for name, counts in measured.items():
        note = f"tokens per step; {share(counts['acceptance_rate'])} of drafts accepted"
        tiles.append(Tile(name, f"{counts['mean_accepted_length']:.2f}", note))
    sections = [
        Section("Results", tables=[_final_figures(runs)]),
        Section("Options", tables=[_differences(runs)]),
        Section("Curves", figures=_curves(runs)),
    ]
    return Page(f"{len(runs)} runs", lead, tiles, sections)


def _named(runs: Sequence[tuple[Path, RunFiles]]) -> dict[str, RunFiles]:
    """Return the runs by the names of their directories, or by their paths if names are not unique."""
    names = {run.name for _, run in runs}
    if len(names) == len(runs):
        return {run.name: run for _, run in runs}
    return {str(directory): run for directory, run in runs}


def _final_figures(runs: dict[str, RunFiles]) -> Table:
    """Return a table with a row for each final figure that any run has."""
    lines = chain.from_iterable(run.metrics for run in runs.values())
    metrics = sorted(set().union(*lines) - {"step"})
    rows = [["steps", *(number(run.last_step) for run in runs.values())]]
    for name, title, show in (
        ("acceptance_rate", "drafts accepted", share),
        ("mean_accepted_length", "tokens per step", number),
    ):
        for when in ("before", "after"):
            values = [run.generated(when).get(name) for run in runs.values()]
            rows.append([f"{title} {when}", *_cells(values, show)])
    for metric in metrics:
        values = [run.last(metric) for run in runs.values()]
        show = number
        if metric.endswith("_acceptance"):
            show = share
        rows.append([metric, *_cells(values, show)])
    filled = [row for row in rows if set(row[1:]) != {MISSING}]
    return Table("Last figures of each run", ["figure", *runs], filled)


def _cells(values: Sequence[float | None], show: Callable[[float], str]) -> list[str]:
    cells = []
    for value in values:
        if value is None:
            cells.append(MISSING)
        else:
            cells.append(show(value))
    return cells


def _differences(runs: dict[str, RunFiles]) -> Table:
    """Return a table of the options that differ between the runs. Missing options count as their defaults."""
    known = options(SftArgs)
    rows = []
    for name, option in known.items():
        if name == "output_dir":  # always differs
            continue
        values = [shell_line(run.options.get(name, option.default)) for run in runs.values()]
        if len(set(values)) > 1:
            rows.append([f"--{name}", *values])
    return Table("Options that differ", ["option", *runs], rows)


def _curves(runs: dict[str, RunFiles]) -> list[Figure]:
    figures = []
    after = {name: run.generated("after") for name, run in runs.items() if run.generated("after")}
    if after:
        figures.append(position_bars(after))
    agreement = {name: held_out_agreement(run) for name, run in runs.items()}
    for depth, lines in _by_name(agreement).items():
        title = f"Agreement on held-out rows, {depth}"
        place = depth.replace(" ", "-")
        figures.append(draw_lines(f"agreement-{place}", title, lines, x="step", y="agreement", is_share=True))
    heads = {name: lines_of(run, r"mtp_(\d+)_loss", "depth {}") for name, run in runs.items()}
    for depth, lines in _by_name(heads).items():
        place = depth.replace(" ", "-")
        figures.append(draw_lines(f"loss-{place}", f"Training loss of {depth}", lines, x="step", y="loss"))
    for metric, title, y in CURVES:
        lines = []
        for name, run in runs.items():
            if points := curve(run.metrics, metric):
                lines.append(Line(name, points))
        if lines:
            figures.append(draw_lines(metric, title, lines, x="step", y=y))
    return figures


def _by_name(lines_of_runs: dict[str, list[Line]]) -> dict[str, list[Line]]:
    """Group the lines of all runs by their name, such as "depth 1". Each line in a group gets the name of its run."""
    found: dict[str, list[Line]] = {}
    for run, lines in lines_of_runs.items():
        for line in lines:
            found.setdefault(line.name, []).append(Line(run, line.points))
    return dict(sorted(found.items()))
