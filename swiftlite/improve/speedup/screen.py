"""Format the last lines of `speedup`: the speed, the acceptance, some answers, and the commands that use the model."""

from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from textwrap import shorten
from typing import Any

from swiftlite.improve.resumable import MODEL
from swiftlite.improve.speedup.plan import CANDIDATE
from swiftlite.improve.speedup.results import ALL
from swiftlite.improve.speedup.state import Progress
from swiftlite.report.table import text_table

MUCH_DRIFT = 0.1
"""Relative change of the speed without drafts during `bench` above which ratios are inaccurate."""
FEW_PROMPTS = 4
"""Number of prompts in `bench` below which ratios are inaccurate."""
NUM_ANSWERS = 3
ANSWER_LENGTH = 300
"""Number of characters after which a printed answer ends."""
GREEN, PLAIN = "\033[32m", "\033[0m"


def final_lines(
    progress: Progress, best: str, bench: Mapping[str, Any], acceptance: Mapping[str, Sequence[float]]
) -> list[str]:
    """Return the last lines of the output, without the answers.

    Args:
        best: name of the best heads: "model", or a round such as "round-1".
        bench: content of the bench.json of the best heads.
        acceptance: share of accepted drafts of the best heads per position, by channel.
    """
    lines = []
    for place, choice in enumerate(bench["recommendations"]):
        lines += _speedup(bench, place, choice)
        if abs(choice["drift"]) > MUCH_DRIFT:
            lines.append(
                f"  with {choice['concurrency']} concurrent requests, the server without drafts was "
                f"{1 + choice['drift']:.2f}x as fast at the end of the measurement as at the start: other programs "
                f"used the machine, and ratios are inaccurate; delete {best}/bench and repeat the command"
            )
    if bench["prompts"] < FEW_PROMPTS:
        lines.append(
            f"  there was time for only {bench['prompts']} prompts, and ratios are inaccurate; on an idle machine, "
            f"delete {best}/bench and repeat the command"
        )
    lines += ["", text_table(_speeds(bench)), "", text_table(_acceptance(progress, best, acceptance)), ""]
    if best == MODEL:
        lines.append("The heads of --model are better than the trained ones and stay.")
    lines.append("Serve it:")
    if bench["schedule_command"]:
        commands = [bench["schedule_command"]]
    else:
        commands = list(dict.fromkeys(choice["command"] for choice in bench["recommendations"]))
    lines += [f"    {command}" for command in commands]
    minutes = progress.spent / 60
    lines.append(f"time: {minutes:.0f} minutes, rounds: {len(progress.rounds)}; a larger --budget continues from here")
    return lines


def _speedup(bench: Mapping[str, Any], place: int, choice: Mapping[str, Any]) -> list[str]:
    """Return the lines about the speed at one number of concurrent requests.

    Args:
        place: index of this number in `bench`.
    """
    requests = _requests(choice)
    chosen = choice["num_speculative_tokens"]
    if not chosen:
        return [f"{requests}: 1.00x, because the server drafts nothing ({choice['reason']})"]
    ratio = choice["ratios"][str(chosen)]
    plain = _without_drafts(bench, place)
    (drafting,) = [server for server in bench["servers"] if server["num_speculative_tokens"] == chosen]
    measured = drafting["measured"][place]
    line = (
        f"{requests}: {ratio:.2f}x as fast, {measured['tokens_per_second']:.1f} tokens/s with drafts and {plain:.1f} "
    )
    line += f"without; answers are equal for {measured['answers_equal']} of {bench['prompts']} prompts"
    drafts = measured["drafts"]
    accepted = f"{drafts['accepted']} of {drafts['drafted']} ({drafts['acceptance_rate']:.1%})"
    lines = [line, f"  tokens per step: {measured['mean_accepted_length']:.2f}; accepted drafts: {accepted}"]
    dtype = bench["options"]["torch_dtype"]
    if dtype != "float32" and measured["answers_equal"] < bench["prompts"]:
        # A step with drafts computes several tokens at once, and the sums of its matrix products have another order.
        lines.append(
            f"  rounding in {dtype} can change answers; to rule it out: swiftlite infer --compare --torch_dtype float32"
        )
    return lines


def _requests(choice: Mapping[str, Any]) -> str:
    if choice["concurrency"] == 1:
        return "1 request at a time"
    return f"{choice['concurrency']} requests at a time"


def _without_drafts(bench: Mapping[str, Any], place: int) -> float:
    """Return the tokens/s without drafts; as in the ratios, the faster of the two measurements."""
    drift = bench["recommendations"][place]["drift"]
    return bench["servers"][0]["measured"][place]["tokens_per_second"] * max(1, 1 + drift)


def _speeds(bench: Mapping[str, Any]) -> list[Sequence[str]]:
    """Return a table row for each number of concurrent requests: tokens/s without drafts, and ratios of the speed with
    drafts.
    """
    choices = bench["recommendations"]
    numbers = list(choices[0]["ratios"])
    rows: list[Sequence[str]] = [["requests", "tokens/s without drafts", *(f"drafts: {k}" for k in numbers), "best"]]
    for place, choice in enumerate(choices):
        ratios = [f"{choice['ratios'][k]:.2f}x" for k in numbers]
        speed = f"{_without_drafts(bench, place):.1f}"
        rows.append([str(choice["concurrency"]), speed, *ratios, str(choice["num_speculative_tokens"])])
    return rows


def _acceptance(progress: Progress, best: str, by_channel: Mapping[str, Sequence[float]]) -> list[Sequence[str]]:
    """Return the rows of the acceptance table.

    Each round has a row over all held-out prompts. The best heads also have a row for each channel (label of dataset
    rows).
    """
    measured: list[tuple[str, str, Sequence[float]]] = [
        (ALL, name, shares) for name, shares in progress.acceptance.items()
    ]
    if progress.candidate:
        measured.append((ALL, CANDIDATE, progress.candidate))
    for channel, shares in by_channel.items():
        if channel != ALL and len(by_channel) > 2:
            measured.append((channel, best, shares))
    positions = range(max(len(shares) for _, _, shares in measured))
    rows: list[Sequence[str]] = [["held-out prompts", "heads", *(f"draft {place + 1}" for place in positions)]]
    for channel, name, shares in measured:
        rows.append([channel, name, *(f"{share:.1%}" for share in shares)])
    return rows


def best_server(bench: Mapping[str, Any]) -> tuple[float, str]:
    """Return the tokens/s of the recommended server at the first number of concurrent requests, and its command."""
    return _without_drafts(bench, 0) * best_ratio(bench), bench["recommendations"][0]["command"]


def best_ratio(bench: Mapping[str, Any]) -> float:
    """Return the speed of the recommended server at the first number of concurrent requests, relative to the server
    without drafts in the same measurement."""
    choice = bench["recommendations"][0]
    return choice["ratios"].get(str(choice["num_speculative_tokens"]), 1.0)


def other_lines(best: tuple[float, str], label: str, bench: Mapping[str, Any]) -> list[str]:
    """Return lines about the speed of another engine.

    Args:
        best: tokens/s and command of the server with heads (`best_server`).
        label: name of the other engine.
        bench: content of its bench.json, with one server that drafts from the text.
    """
    (ratio,) = bench["recommendations"][0]["ratios"].values()
    speed, command = best_server(bench)
    model = Path(bench["options"]["model"]).name
    line = f"{label} with {model}: {_without_drafts(bench, 0):.1f} tokens/s without drafts, "
    lines = ["", f"{line}{ratio:.2f}x with drafts from the text"]
    if speed > best[0]:
        requests = _requests(bench["recommendations"][0])
        lines.append(f"It is the fastest server on this machine for {requests}, {speed / best[0]:.1f}x the one above:")
        lines.append(f"    {command}")
    return lines


def answer_lines(answers: Sequence[Mapping[str, Any]], with_color: bool) -> list[str]:
    """Return some prompts and answers with marked draft tokens.

    Args:
        answers: answers of one model in the format of drafts.json.
        with_color: whether draft tokens are green; otherwise they are in brackets.
    """
    if not answers:
        return []
    mark = "green" if with_color else "in [brackets]"
    lines = ["", f"Held-out prompts and answers. Accepted drafts of the heads are {mark}:"]
    for answer in answers[:NUM_ANSWERS]:
        prompt = shorten(_printable(answer["prompt"]), 200, placeholder=" …")
        lines += ["", f"    > {prompt}"]
        lines.append(f"    {_marked(answer['tokens'], with_color)}")
    return lines


def _marked(tokens: Sequence[Mapping[str, Any]], with_color: bool) -> str:
    """Return the start of an answer with marked draft tokens."""
    begin, end = (GREEN, PLAIN) if with_color else ("[", "]")
    parts, length = [], 0
    for is_drafted, group in groupby(tokens, key=lambda token: token["depth"] > 0):
        text = _printable("".join(token["text"] for token in group))[: ANSWER_LENGTH - length]
        length += len(text)
        parts.append(f"{begin}{text}{end}" if is_drafted and text else text)
    return "".join(parts) + (" …" if length >= ANSWER_LENGTH else "")


def _printable(text: str) -> str:
    """Replace control characters, with which a prompt or an answer could control the terminal, by spaces."""
    return "".join(letter if letter.isprintable() else " " for letter in text)


def run_with(best: str) -> Path:
    """Return the directory of the training run that measured the heads called `best`, relative to --output_dir."""
    return Path("round-1" if best == MODEL else best) / "run"
