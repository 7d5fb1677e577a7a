"""Format the last lines of `speedup`.

They show the loads at which drafts do not pay off, the speed, the acceptance, and the command that deploys the model.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from swiftlite.report.table import text_table
from swiftlite.speedup.state import Progress

MUCH_DRIFT = 0.1
"""Relative change of the speed without drafts during `bench` above which ratios are inaccurate."""


def final_lines(
    progress: Progress, best: str, bench: Mapping[str, Any], acceptance: Mapping[str, Sequence[float]]
) -> list[str]:
    """Return the last lines of the output.

    Args:
        best: name of the best heads: "model", or a round such as "round-1".
        bench: content of the bench.json of the best heads.
        acceptance: share of accepted drafts of the best heads per position, by channel.
    """
    choices = bench["recommendations"]
    lines = []
    for choice in choices:
        if not choice["num_speculative_tokens"]:
            lines.append(f"with {choice['concurrency']} concurrent requests, serve without drafts: {choice['reason']}")
        if abs(choice["drift"]) > MUCH_DRIFT:
            lines.append(
                f"with {choice['concurrency']} concurrent requests, the server without drafts was "
                f"{1 + choice['drift']:.2f}x as fast at the end of the measurement as at the start: other programs "
                f"used the machine, and ratios are inaccurate; delete {best}/bench and repeat the command"
            )
    lines += ["", text_table(_speeds(bench)), "", text_table(_acceptance(progress, best, acceptance)), ""]
    if best == "model":
        lines.append("The heads of --model are better than the trained ones and stay.")
    lines.append("Serve it:")
    if bench["schedule_command"]:
        commands = [bench["schedule_command"]]
    else:
        commands = list(dict.fromkeys(choice["command"] for choice in choices))
    lines += [f"    {command}" for command in commands]
    minutes = progress.spent / 60
    lines.append(f"time: {minutes:.0f} minutes, rounds: {len(progress.rounds)}; a larger --budget continues from here")
    return lines


def _speeds(bench: Mapping[str, Any]) -> list[Sequence[str]]:
    """Return a table row for each number of concurrent requests: tokens/s without drafts, and ratios of the speed with
    drafts.
    """
    choices = bench["recommendations"]
    numbers = list(choices[0]["ratios"])
    rows: list[Sequence[str]] = [["requests", "tokens/s without drafts", *(f"drafts: {k}" for k in numbers), "best"]]
    without = bench["servers"][0]["measured"]
    for choice, plain in zip(choices, without, strict=True):
        ratios = [f"{choice['ratios'][k]:.2f}x" for k in numbers]
        # As in the ratios, the faster of the two measurements.
        speed = f"{plain['tokens_per_second'] * max(1, 1 + choice['drift']):.1f}"
        rows.append([str(choice["concurrency"]), speed, *ratios, str(choice["num_speculative_tokens"])])
    return rows


def _acceptance(progress: Progress, best: str, by_channel: Mapping[str, Sequence[float]]) -> list[Sequence[str]]:
    """Return the rows of the acceptance table.

    Each round has a row over all held-out prompts. The best heads also have a row for each channel (label of dataset
    rows).
    """
    positions = len(progress.acceptance[best])
    rows: list[Sequence[str]] = [["held-out prompts", "heads", *(f"draft {place + 1}" for place in range(positions))]]
    for name, shares in progress.acceptance.items():
        rows.append(["all", name, *(f"{share:.1%}" for share in shares)])
    for channel, shares in by_channel.items():
        if channel != "all" and len(by_channel) > 2:
            rows.append([channel, best, *(f"{share:.1%}" for share in shares)])
    return rows
