"""`swiftlite bench`: how many tokens to draft, found by measuring the servers that `deploy` would start.

One server after the other, drafting nothing at the beginning and again at the end: what differs between these two is
the machine. bench.json is written after each, so a run that is cut short keeps what it measured.
"""

import asyncio
import importlib.metadata
import json
import os
import platform
import shlex
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import aiohttp

import swiftlite
from swiftlite.args.commands import BenchArgs, DeployArgs, deploy_args
from swiftlite.args.docs import options
from swiftlite.bench.client import ask_all, connect
from swiftlite.bench.figures import Answer, Choice, Measured, Round, choose
from swiftlite.bench.picture import draw
from swiftlite.bench.server import free_url, serve
from swiftlite.bridge.tensors import write_durably
from swiftlite.data.dataset import load_prompts
from swiftlite.data.template import ChatTemplate, load_tokenizer, stop_token_ids
from swiftlite.engines.engine import Sampling
from swiftlite.engines.prompts import encode_prompt
from swiftlite.engines.served_model import ServedModel, read_model
from swiftlite.errors import UserError
from swiftlite.log import logger
from swiftlite.rules.common import as_typed
from swiftlite.serve import deploy

# Two servers that draft nothing differ by a few percent on a machine of their own.
MUCH_DRIFT = 0.1


@dataclass(frozen=True)
class Run:
    """One server, measured.

    Attributes:
        command: as it would be typed.
        seconds_to_start: until it was healthy.
        measured: one for each concurrency.
    """

    num_speculative_tokens: int
    command: str
    seconds_to_start: float
    measured: list[Measured]


def run(args: BenchArgs) -> None:
    """Measure, print a table and what to start; write bench.json and bench.svg.

    Raises:
        UserError: the engine would not draft so many tokens with these heads, or a prompt is too long: before any
            server starts. A server that fails: what was measured before it is kept.
    """
    model = read_model(args.model)
    template = ChatTemplate(load_tokenizer(model.directory, args.trust_remote_code))
    prompts = load(args, model, template)
    sampling = Sampling(args.max_new_tokens, stop_token_ids=stop_token_ids(template, model.directory))
    numbers = [0, *sorted(set(args.num_speculative_tokens) - {0})]
    url, port = free_url()
    commands = {k: deploy.server_command(replace(deploy_args(args, k), port=port), model) for k in numbers}
    output_dir = Path(args.output_dir)
    output_dir.mkdir(parents=True, exist_ok=True)
    for name in ("bench.json", "bench.svg"):  # of an earlier run
        (output_dir / name).unlink(missing_ok=True)
    surroundings = describe_surroundings(args)
    runs: list[Run] = []
    with ends_at_sigterm():
        for k in [*numbers, 0]:
            is_last = len(runs) == len(numbers)
            log = output_dir / f"server_{k}{'_again' if is_last else ''}.log"
            logger.info("%s: starting a server; its log: %s", _in_words(k), log)
            runs.append(measure(args, k, url, *commands[k], prompts, sampling, log))
            report = {**surroundings, "prompts": len(prompts), **to_json(args, runs, is_complete=is_last)}
            write_durably(output_dir / "bench.json", json.dumps(report, indent=2).encode() + b"\n")
    choices = choose_all(runs)
    write_durably(output_dir / "bench.svg", draw(*curves(runs)))
    print(table(runs, choices))
    print(recommendations(args, choices))
    for warning in warnings(choices):
        logger.warning("%s", warning)
    logger.info("%s and bench.svg", output_dir / "bench.json")


def load(args: BenchArgs, model: ServedModel, template: ChatTemplate) -> list[list[int]]:
    """The prompts as token ids.

    Raises:
        UserError: fewer than the largest concurrency, or one that leaves no room for an answer; names its row.
    """
    asked = [chat.prompt() for chat in load_prompts(args.val_dataset, system=args.system)][: args.max_prompts]
    if len(asked) < max(args.concurrency):
        raise UserError(
            f"--concurrency {max(args.concurrency)}, but --val_dataset has {len(asked)} prompts: so many are never "
            "under way",
            "give more rows, or a lower number",
        )
    prompts = [encode_prompt(template, chat) for chat in asked]
    limit = args.max_model_len or model.hf_config["max_position_embeddings"]
    for chat, prompt in zip(asked, prompts, strict=True):
        if len(prompt) + args.max_new_tokens > limit:
            name = "--max_model_len" if args.max_model_len else "max_position_embeddings"
            raise UserError(
                f"{chat.source}: the prompt has {len(prompt)} tokens; with --max_new_tokens {args.max_new_tokens} that "
                f"is more than {name} {limit}",
                "shorten one of them, or leave the row out",
            )
    return prompts


def measure(
    args: BenchArgs,
    num_speculative_tokens: int,
    url: str,
    command: list[str],
    variables: Mapping[str, str],
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    log: Path,
) -> Run:
    """Start a server, send it every prompt at every concurrency `args.rounds` times, stop it."""
    start = time.perf_counter()
    with serve(command, variables, url, log) as server:
        seconds_to_start = time.perf_counter() - start
        asking = _ask(args, url, num_speculative_tokens, prompts, sampling)
        try:
            measured = asyncio.run(asking)
        except aiohttp.ClientError as error:
            raise server.failure(f"the server stopped answering: {error}") from None
    return Run(num_speculative_tokens, deploy.as_typed(command, variables), seconds_to_start, measured)


async def _ask(
    args: BenchArgs, url: str, num_speculative_tokens: int, prompts: Sequence[Sequence[int]], sampling: Sampling
) -> list[Measured]:
    measured = []
    async with connect(args.infer_backend, url, sampling, num_speculative_tokens) as client:
        # The first answers pay for kernels and memory that later ones find ready.
        await ask_all(client, prompts, max(args.concurrency), "warm-up")
        for concurrency in args.concurrency:
            before = await client.draft_counts()
            rounds: list[Round] = []
            for number in range(args.rounds):
                # A prompt is computed anew in each round, and shares its beginning with others of the round alone.
                rounds.append(await ask_all(client, prompts, concurrency, f"{concurrency} {number}"))
            counts = (await client.draft_counts()).since(before)
            result = Measured(concurrency, rounds, counts if num_speculative_tokens else None)
            measured.append(result)
            logger.info(
                "%s, %d at once: %s tokens/s",
                _in_words(num_speculative_tokens),
                concurrency,
                ", ".join(f"{speed:.1f}" for speed in result.speeds),
            )
    return measured


def choose_all(runs: Sequence[Run]) -> dict[int, Choice]:
    """By concurrency; the first and the last run draft nothing."""
    first, *drafting, last = runs
    return {
        plain.concurrency: choose(
            plain.speeds,
            {each.num_speculative_tokens: each.measured[place].speeds for each in drafting},
            last.measured[place].speeds,
            {each.num_speculative_tokens: each.measured[place].mean_accepted_length for each in drafting},
        )
        for place, plain in enumerate(first.measured)
    }


def expected_answers(runs: Sequence[Run]) -> list[Answer]:
    """Those of the first run that drafts nothing, at its first concurrency."""
    return runs[0].measured[0].rounds[0].answers


def to_json(args: BenchArgs, runs: Sequence[Run], is_complete: bool) -> dict[str, Any]:
    """What changes from server to server; recommendations come with the last."""
    expected = expected_answers(runs)
    return {
        "complete": is_complete,
        "servers": [
            {
                "num_speculative_tokens": each.num_speculative_tokens,
                "command": each.command,
                "seconds_to_start": each.seconds_to_start,
                "measured": [measured.to_json(expected) for measured in each.measured],
            }
            for each in runs
        ],
        "recommendations": [
            {"concurrency": concurrency, **asdict(choice), "command": deploy_line(args, choice)}
            for concurrency, choice in (choose_all(runs) if is_complete else {}).items()
        ],
    }


def describe_surroundings(args: BenchArgs) -> dict[str, Any]:
    """What was asked, of which versions, on what machine."""
    distributions = importlib.metadata.packages_distributions()
    names = ["torch", "transformers", *distributions.get(args.infer_backend, ())]
    gpus = []
    if shutil.which("nvidia-smi"):  # torch would take memory of the GPU to answer
        query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
        gpus = subprocess.run(query, capture_output=True, text=True).stdout.splitlines()
    return {
        "options": asdict(args),
        "versions": {
            "swiftlite": swiftlite.__version__,
            "python": platform.python_version(),
            **{name: importlib.metadata.version(name) for name in names},
        },
        "machine": {
            "platform": platform.platform(),
            "cpus": os.cpu_count(),
            "gpus": gpus,
            "load_average": os.getloadavg()[0],
        },
    }


def table(runs: Sequence[Run], choices: dict[int, Choice]) -> str:
    """A line for each server and concurrency."""
    expected = expected_answers(runs)
    rows = [("at once", "drafted", "tokens/s", "ratio", "first token", "per token", "accepted length", "answers equal")]
    for place, (concurrency, choice) in enumerate(choices.items()):
        for each in runs:
            figures = each.measured[place].to_json(expected)
            k = each.num_speculative_tokens
            slow, fast = min(each.measured[place].speeds), max(each.measured[place].speeds)
            is_last = each is runs[-1]
            first, token = figures["time_to_first_token_ms"], figures["time_per_token_ms"]
            rows.append(
                (
                    str(concurrency),
                    f"{k}{', at the end' if is_last else ''}",
                    f"{figures['tokens_per_second']:.1f} ({slow:.1f} to {fast:.1f})",
                    f"{choice.ratios[k]:.2f}" if k else f"{1 + choice.drift:.2f}" if is_last else "",
                    _milliseconds(first),
                    _milliseconds(token),
                    f"{figures['mean_accepted_length']:.2f}",
                    f"{figures['answers_equal']} of {len(expected)}",
                )
            )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    note = (
        "Medians of rounds (slowest to fastest), and of requests in ms (90th percentile); ratios to drafting nothing."
    )
    return "\n".join([*lines, "", note])


def recommendations(args: BenchArgs, choices: dict[int, Choice]) -> str:
    """What to draft at each concurrency, and the commands that serve so."""
    lines: list[str] = []
    for concurrency, choice in choices.items():
        lines.append(
            f"{concurrency} at once: --num_speculative_tokens {choice.num_speculative_tokens}: {choice.reason}"
        )
    commands = {choice.num_speculative_tokens: deploy_line(args, choice) for choice in choices.values()}
    return "\n".join([*lines, *(f"\n    {command}" for command in commands.values())])


def warnings(choices: dict[int, Choice]) -> list[str]:
    """What the machine did by itself, where that is much."""
    return [
        f"{concurrency} at once: without drafts, tokens/s at the end were {1 + choice.drift:.2f}x those at the "
        "beginning: something else was at work here; ratios are no better than that"
        for concurrency, choice in choices.items()
        if abs(choice.drift) > MUCH_DRIFT
    ]


def deploy_line(args: BenchArgs, choice: Choice) -> str:
    """The command that starts the server of a choice."""
    chosen = deploy_args(args, choice.num_speculative_tokens)
    words = ["swiftlite", "deploy", "--infer_backend", chosen.infer_backend]
    for name, option in options(DeployArgs).items():
        value = vars(chosen)[name]
        if value != option.default and name != "infer_backend":
            words += [f"--{name}", json.dumps(value) if isinstance(value, dict) else as_typed(value)]
    return shlex.join(words)


def curves(runs: Sequence[Run]) -> tuple[list[int], dict[str, list[list[float]]]]:
    """For the picture: the concurrencies, and for each server the rounds' tokens per second at each."""
    names = [_in_words(each.num_speculative_tokens) for each in runs[:-1]] + ["drafting nothing, again at the end"]
    speeds = [[measured.speeds for measured in each.measured] for each in runs]
    return [measured.concurrency for measured in runs[0].measured], dict(zip(names, speeds, strict=True))


@contextmanager
def ends_at_sigterm() -> Iterator[None]:
    """SIGTERM, a batch system's, ends this process as Ctrl-C does: after its server."""

    def stop(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _in_words(num_speculative_tokens: int) -> str:
    return f"drafting {num_speculative_tokens or 'nothing'}"


def _milliseconds(figures: dict[str, float] | None) -> str:
    return f"{figures['p50']:.1f} ({figures['p90']:.1f})" if figures else ""
