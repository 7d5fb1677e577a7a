"""Make bench.html and bench.svg from the content of bench.json."""

from collections.abc import Mapping
from typing import Any

from matplotlib import figure as mpl_figure

from swiftlite.args.command_line import shell_line
from swiftlite.report.figure import Bars, Line, as_svg, draw_bars, draw_lines, number
from swiftlite.report.page import Figure, Page, Section, Table, Tile
from swiftlite.serve.bench.measure import describe
from swiftlite.serve.bench.report import milliseconds
from swiftlite.serve.prompt_groups import group_table

COLUMNS = (
    "server",
    "concurrency",
    "tokens/s",
    "slowest round",
    "fastest round",
    "first token, ms",
    "per token, ms",
    "cached share of prompts",
    "tokens per step",
    "answers equal",
)
AGAIN = "without drafts, repeated at the end"


def bench_page(content: Mapping[str, Any]) -> Page:
    """Return the page of a complete bench.json."""
    servers = _named(content["servers"])
    choices = content["recommendations"]
    tiles = []
    for choice in choices:
        tiles.append(
            Tile(f"concurrency {choice['concurrency']}", describe(choice["num_speculative_tokens"]), choice["reason"])
        )
    lead = "Recommended numbers of draft tokens, by measured speed."
    commands = list(dict.fromkeys(choice["command"] for choice in choices))
    if content["schedule_command"]:
        commands.append(content["schedule_command"])
    sections = [
        Section("Recommended commands", commands=commands),
        Section("Speed", figures=_figures(servers), tables=[_table(servers, content["prompts"])]),
        Section("Environment", tables=_environment(content)),
    ]
    if groups := group_tables(content):
        sections.insert(2, Section("Groups of prompts", "Drafts that the servers accepted.", tables=groups))
    return Page(f"Speed of {content['options']['model']}", lead, tiles, sections)


def group_tables(content: Mapping[str, Any]) -> list[Table]:
    """Return a table of each server's drafts by category and by length of the prompt."""
    tables = []
    for kind in ("category", "prompt_length"):
        for k, found in content.get(f"by_{kind}", {}).items():
            name = kind.replace("_", " ")
            tables.append(group_table(f"{k} draft tokens, by {name}", name, found))
    return tables


def bench_chart(content: Mapping[str, Any]) -> bytes:
    """Draw bench.svg: tokens per second by concurrency, with a line for each server and a dot for each round."""
    figure = mpl_figure.Figure(figsize=(8, 4.5), layout="constrained")
    axis = figure.subplots()
    for name, results in _named(content["servers"]).items():
        (line,) = axis.plot([measured["tokens_per_second"] for measured in results], label=name)
        for place, measured in enumerate(results):
            speeds = measured["tokens_per_second_of_rounds"]
            axis.plot([place] * len(speeds), speeds, ".", color=line.get_color(), alpha=0.5)
    concurrencies = [str(measured["concurrency"]) for measured in content["servers"][0]["measured"]]
    axis.set_xticks(range(len(concurrencies)), concurrencies)
    axis.set(xlabel="concurrent requests", ylabel="tokens/s", ylim=(0, None))
    axis.legend(fontsize="small")
    return as_svg(figure)


def _named(servers: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Return the measurements of each server, by its number of draft tokens."""
    named = {describe(server["num_speculative_tokens"]): server["measured"] for server in servers[:-1]}
    return named | {AGAIN: servers[-1]["measured"]}


def _figures(servers: Mapping[str, list[dict[str, Any]]]) -> list[Figure]:
    drawn = (
        ("tokens_per_second", "Tokens per second", "tokens/s"),
        ("time_per_token_ms", "Time per token, median", "ms"),
        ("time_to_first_token_ms", "Time to the first token, median", "ms"),
    )
    figures = []
    for name, title, y in drawn:
        lines = []
        for server, measured in servers.items():
            points = [(each["concurrency"], _median(each[name])) for each in measured]
            known = sorted((place, value) for place, value in points if value is not None)
            if known:
                lines.append(Line(server, known))
        if not lines:
            continue
        if all(len(line.points) == 1 for line in lines):
            bars = [Bars(y, [line.points[0][1] for line in lines])]
            names = [line.name for line in lines]
            figures.append(draw_bars(name, title, names, bars, what="server", y=y, is_share=False))
        else:
            figures.append(draw_lines(name, title, lines, x="concurrent requests", y=y, has_ticks=True))
    return figures


def _median(figures: float | Mapping[str, float] | None) -> float | None:
    """Return the median if `figures` are percentiles over requests; return a single number or None unchanged."""
    if isinstance(figures, Mapping):
        return figures["p50"]
    return figures


def _table(servers: Mapping[str, list[dict[str, Any]]], num_prompts: int) -> Table:
    rows = []
    for name, results in servers.items():
        for measured in results:
            speeds = measured["tokens_per_second_of_rounds"]
            equal = ""
            if measured["answers_equal"] is not None:
                equal = f"{measured['answers_equal']} of {num_prompts}"
            rows.append(
                [
                    name,
                    str(measured["concurrency"]),
                    number(measured["tokens_per_second"]),
                    number(min(speeds)),
                    number(max(speeds)),
                    milliseconds(measured["time_to_first_token_ms"]),
                    milliseconds(measured["time_per_token_ms"]),
                    f"{measured['cached_share_of_prompts']:.0%}",
                    f"{measured['mean_accepted_length']:.2f}",
                    equal,
                ]
            )
    return Table("Medians of rounds, and of requests with their 90th percentile", COLUMNS, rows)


def _environment(content: Mapping[str, Any]) -> list[Table]:
    tables = []
    for title, name in (("Options", "options"), ("Versions", "versions"), ("Machine", "machine")):
        rows = [[key, shell_line(value)] for key, value in content[name].items()]
        tables.append(Table(title, ["what", "value"], rows))
    return tables
