"""Run `swiftlite bench`: measure the servers that `deploy` would start to find the best number of draft tokens.

Without a GPU, and with enough memory, all servers are started at the beginning and answer in turn. Otherwise they are
started and measured one after another. The server without drafts is measured first and last; the difference between
these two measurements shows the noise of the machine. bench.json is written after each measurement, so that an
interrupted run keeps its results.
"""

import asyncio
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from swiftlite.args.commands import BenchArgs, deploy_args
from swiftlite.args.data_fields import ImageArgs
from swiftlite.base.atomic import atomic_write, check_writable
from swiftlite.base.errors import UserError
from swiftlite.base.log import logger
from swiftlite.data.dataset import load_prompts
from swiftlite.data.rows.conversation import Conversation
from swiftlite.data.template import load_tokenizer, stop_token_ids
from swiftlite.engines.engine import Sampling
from swiftlite.engines.index import ENGINES
from swiftlite.engines.interrupt import raises_at_sigterm
from swiftlite.engines.prompts import ChatPrompt, ImagePrompt, PromptEncoder
from swiftlite.engines.served_model import resolve_served
from swiftlite.families.resolved import HfModel
from swiftlite.report.page import render
from swiftlite.serve import deploy
from swiftlite.serve.bench import report
from swiftlite.serve.bench.measure import ServerResult, Target, describe, measure
from swiftlite.serve.bench.page import bench_chart, bench_page, group_tables
from swiftlite.serve.bench.results import ConcurrencyResult
from swiftlite.serve.bench.servers import GetServer, all_together, fit_together, one_at_a_time
from swiftlite.serve.prompt_groups import by_length, groups_to_json, length_group

DRAWN = ("bench.svg", "bench.html")


def run(args: BenchArgs) -> None:
    """Measure, print a table and recommendations, and write bench.json, bench.svg and bench.html.

    Raises:
        UserError: the engine does not support the number of draft tokens or the temperature, or a prompt is too long;
            these errors are detected before any server starts. Also if a server fails; previous measurements are then
            kept.
    """
    model = resolve_served(args.model)
    tokenizer = load_tokenizer(model.directory, args.trust_remote_code, args.chat_template_kwargs)
    info = ENGINES[args.infer_backend]
    # Without bounds of pixels: the server uses those of the model.
    encoder = PromptEncoder.open(ImageArgs(args.media_root), model, tokenizer, info)
    chats, prompts = load(args, model, encoder)
    info.check_temperature(args.temperature)
    stops = stop_token_ids(encoder.template, model.directory)
    sampling = Sampling(args.max_new_tokens, args.temperature, stop_token_ids=stops)
    numbers = [0, *sorted(set(args.num_speculative_tokens) - {0})]
    commands = {k: deploy.server_command(replace(deploy_args(args, k), **_counting(args, k)), model) for k in numbers}
    output_dir = Path(args.output_dir)
    check_writable("--output_dir", output_dir)
    for log in output_dir.glob("server_*.log"):  # of an earlier run
        log.unlink()
    are_together = fit_together(model, len(numbers))
    start = all_together if are_together else one_at_a_time
    names = ", ".join(describe(k) for k in numbers)
    logger.info("starting servers (%s), logs: %s", names, output_dir / "server_*.log")
    with raises_at_sigterm(), start(commands, output_dir) as get:
        groups = _groups(numbers, get, are_together=are_together)
        servers, content = _measure_all(args, groups, len(numbers) + 1, prompts, sampling)
        content |= _grouped(servers[:-1], chats, prompts)
        atomic_write(output_dir / report.BENCH_JSON, json.dumps(content, indent=2).encode() + b"\n")
    choices = report.choose_all(servers)
    print(report.table(args, servers, choices))
    for found in group_tables(content):
        print(f"\n{found.title}:\n{found.text()}")
    print(report.recommendations(args, choices))
    for warning in report.warnings(choices):
        logger.warning("%s", warning)
    atomic_write(output_dir / "bench.svg", bench_chart(content))
    atomic_write(output_dir / "bench.html", render(bench_page(content)))
    logger.info("wrote %s, bench.svg and bench.html", output_dir / report.BENCH_JSON)


def _counting(args: BenchArgs, num_speculative_tokens: int) -> dict[str, Any]:
    """Return the options of `deploy` with which the server counts the drafts of each request, if it needs any."""
    info = ENGINES[args.infer_backend]
    if not info.counts_per_request or not num_speculative_tokens:
        return {}
    return {info.kwargs_option: {**info.counts_per_request, **(vars(args)[info.kwargs_option] or {})}}


def _grouped(
    servers: Sequence[ServerResult], chats: Sequence[Conversation], prompts: Sequence[Sequence[int]]
) -> dict[str, Any]:
    """Return the draft counts of each server by category (channel) and by length of the prompt, if there are several.

    They are those of all rounds at all concurrencies, of servers that count the drafts of each request.
    """
    lengths = [length_group(len(prompt)) for prompt in prompts]
    kinds = {"category": [chat.channel or "" for chat in chats], "prompt_length": lengths}
    found: dict[str, Any] = {}
    for kind, names in kinds.items():
        if len(set(names)) < 2:
            continue
        of_kind = found.setdefault(f"by_{kind}", {})
        for server in servers:
            if groups := server.draft_groups(names):
                in_order = sorted(groups, key=by_length if kind == "prompt_length" else None)
                of_kind[str(server.num_speculative_tokens)] = groups_to_json({name: groups[name] for name in in_order})
    return found


def _groups(numbers: Sequence[int], get: GetServer, *, are_together: bool) -> Iterator[list[Target]]:
    """Yield the servers that are measured in turn: all at once, or each alone. Those without drafts are first and last.

    Args:
        numbers: numbers of draft tokens of the servers; the first one is 0.
        get: starts a server if it does not run.
    """
    last = "again "
    if are_together:
        yield [*(Target(k, get(k)) for k in numbers), Target(0, get(0), last)]
        return
    for k in numbers:
        yield [Target(k, get(k))]
    yield [Target(0, get(0), last)]


def _measure_all(
    args: BenchArgs,
    groups: Iterable[Sequence[Target]],
    number: int,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
) -> tuple[list[ServerResult], dict[str, Any]]:
    """Measure all servers at every concurrency, and write bench.json after each measurement.

    Args:
        number: number of servers to measure; the one without drafts counts twice.

    Returns:
        The results, and the content of bench.json.
    """
    output_dir = Path(args.output_dir)
    environment = report.describe_environment(args)
    servers: list[ServerResult] = []
    content: dict[str, Any] = {}
    seconds = _seconds_of_round(args, number)

    def write(results: Sequence[ConcurrencyResult]) -> None:
        for server, result in zip(servers[-len(results) :], results, strict=True):
            server.measured.append(result)
        is_last = len(servers) == number and len(servers[-1].measured) == len(args.concurrency)
        content.update(environment | {"prompts": len(results[0].rounds[0].answers)})
        content.update(report.to_json(args, servers, is_complete=is_last))
        atomic_write(output_dir / report.BENCH_JSON, json.dumps(content, indent=2).encode() + b"\n")
        for name in DRAWN:  # files of an earlier run
            (output_dir / name).unlink(missing_ok=True)

    for group in groups:
        servers += [ServerResult.of(target) for target in group]
        asyncio.run(measure(args, group, prompts, sampling, seconds, write))
        # The first measurement decides how many prompts there is time for.
        prompts, seconds = prompts[: content["prompts"]], None
    return servers, content


def _seconds_of_round(args: BenchArgs, num_measurements: int) -> float | None:
    """Return the time of one round over all prompts with which --max_seconds is kept; None without this option.

    The rounds of the first concurrency are usually the longest, so the share of each round is rather too small.
    """
    if args.max_seconds is None:
        return None
    return args.max_seconds / (num_measurements * args.rounds * len(args.concurrency))


def load(args: BenchArgs, model: HfModel, encoder: PromptEncoder) -> tuple[list[Conversation], list[Sequence[int]]]:
    """Load the conversations, and their prompts as token ids; with images, as `ChatPrompt`.

    Raises:
        UserError: there are fewer prompts than the largest concurrency, a prompt leaves no room for an answer, or an
            image cannot be used.
    """
    rows = load_prompts(args.val_dataset, system=args.system, no_images=encoder.no_images)
    asked = [chat.prompt() for chat in rows][: args.max_prompts]
    if len(asked) < max(args.concurrency):
        raise UserError(
            f"--concurrency {max(args.concurrency)} exceeds the {len(asked)} prompts in --val_dataset",
            "add rows to --val_dataset, or use a smaller --concurrency",
        )
    prompts = [_as_sent(encoder(chat), chat) for chat in asked]
    limit, name = model.config["max_position_embeddings"], "max_position_embeddings"
    if args.max_model_len:
        limit, name = args.max_model_len, "--max_model_len"
    for chat, prompt in zip(asked, prompts, strict=True):
        if len(prompt) + args.max_new_tokens > limit:
            raise UserError(
                f"{chat.source}: the prompt has {len(prompt)} tokens, which with --max_new_tokens "
                f"{args.max_new_tokens} exceeds {name} {limit}",
                "shorten one of them, or remove the row",
            )
    return asked, prompts


def _as_sent(prompt: Sequence[int], chat: Conversation) -> Sequence[int]:
    """Return a prompt in the form that clients send."""
    if isinstance(prompt, ImagePrompt):
        return ChatPrompt.of(prompt, chat)
    return prompt
