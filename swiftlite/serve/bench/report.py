"""Write the results of `bench` for all servers: the table, the recommendations and bench.json."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import Any

from swiftlite.args.command_line import command_line
from swiftlite.args.commands import BenchArgs, DeployArgs, deploy_args
from swiftlite.base.redact import redact
from swiftlite.engines.client import Answer
from swiftlite.engines.index import ENGINES
from swiftlite.report.table import text_table
from swiftlite.runtime.environment import describe_machine, versions_of
from swiftlite.serve.bench.measure import ServerResult
from swiftlite.serve.bench.results import Choice, ConcurrencyResult, choose

BENCH_JSON = "bench.json"
# On an idle machine, the speeds of two servers without drafts differ by a few percent.
MUCH_DRIFT = 0.1
COLUMNS = (
    "concurrency",
    "drafted",
    "tokens/s",
    "ratio",
    "first token",
    "per token",
    "cached",
    "accepted length",
    "answers equal",
)


def choose_all(servers: Sequence[ServerResult]) -> dict[int, Choice]:
    """Return the recommended number of draft tokens at each concurrency.

    Args:
        servers: measurements; the first and the last are without drafts.
    """
    first, *drafting, last = servers
    choices = {}
    for place, plain in enumerate(first.measured):
        results = {server.num_speculative_tokens: server.measured[place] for server in drafting}
        speeds = {k: result.speeds for k, result in results.items()}
        lengths = {k: result.mean_accepted_length for k, result in results.items()}
        choices[plain.concurrency] = choose(plain.speeds, speeds, last.measured[place].speeds, lengths)
    return choices


def expected_answers(args: BenchArgs, servers: Sequence[ServerResult]) -> list[Answer] | None:
    """Return the answers of the server without drafts at the first concurrency; None for sampled answers."""
    if args.temperature:
        return None
    return servers[0].measured[0].rounds[0].answers


def to_json(args: BenchArgs, servers: Sequence[ServerResult], is_complete: bool) -> dict[str, Any]:
    """Return the part of bench.json that changes with each server.

    Recommendations are included after the last server.
    """
    choices: dict[int, Choice] = {}
    if is_complete:
        choices = choose_all(servers)
    schedule_command = None
    if changes_with_load(args, choices):
        schedule_command = schedule_line(args)
    return {
        "complete": is_complete,
        "servers": [_server_json(server, expected_answers(args, servers)) for server in servers],
        "recommendations": [
            {"concurrency": concurrency, **asdict(choice), "command": deploy_line(args, choice)}
            for concurrency, choice in choices.items()
        ],
        "schedule_command": schedule_command,
    }


def _server_json(server: ServerResult, expected: Sequence[Answer] | None) -> dict[str, Any]:
    return vars(server) | {"measured": [result.to_json(expected) for result in server.measured]}


def describe_environment(args: BenchArgs) -> dict[str, Any]:
    """Return the options, versions and machine of the measurement."""
    distributions = packages_distributions()
    return {
        "options": redact(asdict(args)),
        "versions": versions_of(["torch", "transformers", *distributions.get(ENGINES[args.infer_backend].package, ())]),
        "machine": describe_machine(),
    }


def table(args: BenchArgs, servers: Sequence[ServerResult], choices: dict[int, Choice]) -> str:
    """Return a table with a line for each server and concurrency."""
    expected = expected_answers(args, servers)
    rows: list[tuple[str, ...]] = [COLUMNS]
    for place, choice in enumerate(choices.values()):
        for server in servers[:-1]:
            k = server.num_speculative_tokens
            ratio = ""
            if k:
                ratio = f"{choice.ratios[k]:.2f}"
            rows.append(_row(server.measured[place], str(k), ratio, expected))
        at_the_end = servers[-1].measured[place]
        rows.append(_row(at_the_end, "0, at the end", f"{1 + choice.drift:.2f}", expected))
    note = (
        "Medians of rounds (slowest to fastest), and of requests in ms (90th percentile); ratios relative to the "
        "server without drafts."
    )
    return f"{text_table(rows)}\n\n{note}"


def _row(result: ConcurrencyResult, drafted: str, ratio: str, expected: Sequence[Answer] | None) -> tuple[str, ...]:
    figures = result.to_json(expected)
    equal = ""
    if expected is not None:
        equal = f"{figures['answers_equal']} of {len(expected)}"
    return (
        str(result.concurrency),
        drafted,
        f"{figures['tokens_per_second']:.1f} ({min(result.speeds):.1f} to {max(result.speeds):.1f})",
        ratio,
        milliseconds(figures["time_to_first_token_ms"]),
        milliseconds(figures["time_per_token_ms"]),
        f"{result.cached_share:.0%}",
        f"{figures['mean_accepted_length']:.2f}",
        equal,
    )


def milliseconds(figures: Mapping[str, float] | None) -> str:
    """Format the median and the 90th percentile over requests; "" without values."""
    if not figures:
        return ""
    return f"{figures['p50']:.1f} ({figures['p90']:.1f})"


def recommendations(args: BenchArgs, choices: dict[int, Choice]) -> str:
    """Return the recommended command for each concurrency.

    If the numbers of draft tokens differ between concurrencies, also return a command whose server adapts to the load.
    """
    lines: list[str] = []
    for concurrency, choice in choices.items():
        lines.append(
            f"concurrency {concurrency}: --num_speculative_tokens {choice.num_speculative_tokens}: {choice.reason}"
        )
    commands = list(dict.fromkeys(deploy_line(args, choice) for choice in choices.values()))
    for command in commands:
        lines.append(f"\n    {command}")
    if changes_with_load(args, choices):
        lines.append(f"\nA server that adapts to the number of in-flight requests:\n\n    {schedule_line(args)}")
    return "\n".join(lines)


def changes_with_load(args: BenchArgs, choices: dict[int, Choice]) -> bool:
    """Return whether a server that adapts to the load is recommended."""
    info = ENGINES[args.infer_backend]
    is_possible = info.server_takes_draft_schedule and info.speculative_config(args) is None
    return is_possible and len({choice.num_speculative_tokens for choice in choices.values()}) > 1


def warnings(choices: dict[int, Choice]) -> list[str]:
    """Return a warning for each concurrency at which the two measurements of the server without drafts differ a lot."""
    return [
        f"concurrency {concurrency}: the server without drafts was {1 + choice.drift:.2f}x as fast at the end as at "
        "the start: the load of the machine changed, and ratios are inaccurate"
        for concurrency, choice in choices.items()
        if abs(choice.drift) > MUCH_DRIFT
    ]


def deploy_line(args: BenchArgs, choice: Choice) -> str:
    """Return the command that deploys the chosen configuration, with API keys replaced by ***."""
    return _shell_line(deploy_args(args, choice.num_speculative_tokens))


def schedule_line(args: BenchArgs) -> str:
    """Return the command of the recommended server that adapts to the load, with API keys replaced by ***."""
    bench_json = str(Path(args.output_dir) / BENCH_JSON)
    return _shell_line(replace(deploy_args(args, 1), num_speculative_tokens=None, draft_schedule=bench_json))


def _shell_line(args: DeployArgs) -> str:
    return command_line("deploy", DeployArgs, asdict(args), always=("infer_backend",))
