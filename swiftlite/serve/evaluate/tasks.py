"""Run `swiftlite evaluate --tasks`: measure quality, acceptance and speed of the same answers.

lm-evaluation-harness (`runtime/lm_eval.py`) reads the tasks, sends their questions to the server that `deploy` would
start, and scores the answers. Drafts, tokens and seconds are read from the server's counters, before and after
each task.
"""

import hashlib
import json
import os
import shutil
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from http.client import HTTPException
from pathlib import Path
from typing import Any

from swiftlite.args.commands import DeployArgs, EvaluateArgs
from swiftlite.base.atomic import atomic_write, check_writable
from swiftlite.base.direct import DIRECT
from swiftlite.base.errors import UserError, reason_of
from swiftlite.base.json_file import parse_json
from swiftlite.base.log import logger
from swiftlite.engines.interrupt import raises_at_sigterm
from swiftlite.engines.served_model import resolve_served
from swiftlite.engines.server.metrics import read_draft_counts, read_throughput
from swiftlite.engines.server.process import Server, serve
from swiftlite.families.resolved import HfModel
from swiftlite.hub.digest import digest_of_model
from swiftlite.hub.name import models_in
from swiftlite.report.page import render
from swiftlite.runtime import lm_eval
from swiftlite.serve import deploy
from swiftlite.serve.evaluate.over_time import engine_of, get_metrics
from swiftlite.serve.evaluate.task_page import MEANING, Compared, task_page, task_table
from swiftlite.serve.evaluate.task_results import (
    FINISHED,
    TaskRun,
    changes,
    read_finished,
    read_lm_eval,
    write_finished,
)
from swiftlite.serve.infer import logs_how_to_resume

DIRECTORY = "tasks"
_OF_ANSWERS = (
    *("torch_dtype", "num_speculative_tokens", "max_length", "num_fewshot", "limit", "apply_chat_template"),
    *("num_concurrent", "lm_eval_model_args"),
)
"""Options that change answers or their speed."""
_SECONDS_OF_REQUEST = 3600


@dataclass(frozen=True)
class Answering:
    """A server that answers the tasks.

    Attributes:
        name: "model" or "baseline".
        given: name or path of the model in the options.
        drafts: whether the server drafts.
    """

    name: str
    given: str
    model: HfModel
    drafts: bool

    @property
    def words(self) -> str:
        """Name of the server in directories and messages."""
        return self.name if self.drafts else f"{self.name}_without_drafts"

    def max_length(self, args: EvaluateArgs) -> int:
        """Return the maximum length of prompt and answer, within the limit of the model."""
        return min(args.max_length, self.model.config.get("max_position_embeddings", args.max_length))


@dataclass(frozen=True)
class Progress:
    """The state of all tasks, as a text for messages."""

    directory: Path
    total: int

    def __str__(self) -> str:
        finished = len(list(self.directory.glob(f"*/*/{FINISHED}")))
        return f"{finished} of {self.total} tasks are finished in {self.directory}"


def measure_tasks(args: EvaluateArgs) -> None:
    """Run all tasks with all servers, print a table, and write evaluation.json and evaluation.html.

    Raises:
        UserError: a task does not exist or fails, a server fails, or --output_dir has other results. Finished tasks are
            kept, and not repeated by the same command.
    """
    names = models_in(args)
    servers = list(_servers(args, names))
    output_dir = Path(args.output_dir)
    check_writable("--output_dir", output_dir)
    directory = (output_dir / DIRECTORY).resolve()
    directory.mkdir(exist_ok=True)
    finished = {each.words: _finished(args, each, directory / each.words) for each in servers}
    progress = Progress(directory, len(servers) * len(args.tasks))
    if any(len(runs) < len(args.tasks) for runs in finished.values()):
        _check_tasks(args, directory)
    with raises_at_sigterm(), logs_how_to_resume(progress):
        for each in servers:
            missing = [task for task in args.tasks if task not in finished[each.words]]
            if missing:
                finished[each.words] |= _run(args, each, missing, directory / each.words)
    compared = _compare(names, args.tasks, finished)
    print(f"{task_table(compared).text()}\n\n{MEANING}")
    report: dict[str, dict[str, Any]] = {name: {"directory": given, "tasks": {}} for name, given in names.items()}
    for each in compared:
        report[each.name]["tasks"][each.task] = each.to_json()
    atomic_write(output_dir / "evaluation.json", json.dumps(report, indent=2).encode() + b"\n")
    atomic_write(output_dir / "evaluation.html", render(task_page(compared, names)))
    logger.info("wrote %s and evaluation.html", output_dir / "evaluation.json")


def _servers(args: EvaluateArgs, names: dict[str, str]) -> Iterator[Answering]:
    """Yield all servers: for each model one that drafts if it has heads, and one without drafts with --compare."""
    for name, given in names.items():
        model = resolve_served(given)
        has_heads = model.heads.layers > 0
        if has_heads or args.server is not None:
            yield Answering(name, given, model, drafts=True)
        if args.server is None and (args.compare or not has_heads):
            yield Answering(name, given, model, drafts=False)


def _finished(args: EvaluateArgs, answering: Answering, directory: Path) -> dict[str, TaskRun]:
    """Return the tasks that a previous command has finished with the same settings.

    Raises:
        UserError: the settings have changed.
    """
    found = {}
    for task in args.tasks:
        try:
            found[task], before = read_finished(directory / task)
        except (OSError, ValueError, KeyError, TypeError):
            continue
        if changed := list(changes(before, _settings(args, answering))):
            raise UserError(
                f"--output_dir {args.output_dir} has results of {task} with other settings: {', '.join(changed)}",
                f"use another --output_dir, or delete {directory}",
            )
    return found


def _settings(args: EvaluateArgs, answering: Answering) -> dict[str, Any]:
    """Return the settings that determine the results of a task."""
    settings = {name: vars(args)[name] for name in _OF_ANSWERS}
    settings |= {"server": args.server, "infer_backend": args.task_engine, "lm_eval": lm_eval.RELEASE}
    settings |= {f"--{answering.name}": digest_of_model(answering.model.directory), "include_path": ""}
    if args.include_path:
        digest = hashlib.sha256()
        for path in sorted(Path(args.include_path).rglob("*.*")):
            if path.suffix != ".pyc":
                digest.update(f"{path.name} {path.stat().st_size} {path.stat().st_mtime_ns}".encode())
        settings["include_path"] = digest.hexdigest()
    return json.loads(json.dumps(settings))


def _check_tasks(args: EvaluateArgs, directory: Path) -> None:
    """Check that lm-eval knows all tasks, before a server is started.

    Raises:
        UserError: a task does not exist, or a file in --include_path is invalid.
    """
    words = ["validate", "--tasks", ",".join(args.tasks)]
    if args.include_path:
        words += ["--include_path", str(Path(args.include_path).resolve())]
    ended = lm_eval.run(words, directory, {})
    if ended.code:
        hint = f"{lm_eval.LM_EVAL.interpreter} -m lm_eval ls tasks lists all tasks; --include_path adds a directory"
        raise UserError(f"--tasks {' '.join(args.tasks)}: lm-eval does not find a task:{ended.tail}", hint)


def _run(args: EvaluateArgs, answering: Answering, tasks: Sequence[str], directory: Path) -> dict[str, TaskRun]:
    """Run tasks with one server.

    Raises:
        UserError: the server or a task failed.
    """
    directory.mkdir(exist_ok=True)
    found = {}
    with _server(args, answering, directory / "server.log") as (url, server):
        engine = engine_of(url, get_metrics(url))
        if not engine.measures_requests:
            raise UserError(
                f"--server {url} is a server of {engine.label}, which --tasks does not support",
                "use swiftlite deploy --infer_backend vllm",
            )
        served_name = _served_name(url)
        for task in tasks:
            logger.info("%s: %s", answering.words, task)
            before = get_metrics(url)
            results = _run_task(args, answering, task, (url, served_name, server), directory / task)
            after = get_metrics(url)
            counts = read_draft_counts(after, engine.metrics_prefix)
            counted_before = read_draft_counts(before, engine.metrics_prefix)
            if counts is not None and counted_before is not None:
                counts = counts.since(counted_before)
            throughput = read_throughput(after, engine.metrics_prefix)
            throughput = throughput.since(read_throughput(before, engine.metrics_prefix))
            run = TaskRun(results, counts, throughput, directory / task)
            atomic_write(directory / task / FINISHED, write_finished(run, _settings(args, answering)))
            found[task] = run
    return found


@contextmanager
def _server(args: EvaluateArgs, answering: Answering, log: Path) -> Iterator[tuple[str, Server | None]]:
    """Yield the address of the server, and its process if it was started here."""
    if args.server is not None:
        yield args.server.rstrip("/"), None
        return
    options = DeployArgs(
        model=answering.given,
        torch_dtype=args.torch_dtype,
        trust_remote_code=args.trust_remote_code,
        infer_backend=args.task_engine,
        speculative="mtp" if answering.drafts else "none",
        num_speculative_tokens=args.num_speculative_tokens if answering.drafts else None,
        max_model_len=answering.max_length(args),
    )
    command = deploy.server_command(options, answering.model)
    logger.info("starting the server of %s, log: %s", answering.words, log)
    with serve(command, log) as server:
        yield server.url, server


def _run_task(
    args: EvaluateArgs, answering: Answering, task: str, served: tuple[str, str, Server | None], directory: Path
) -> dict[str, Any]:
    """Run one task, and return the results of lm-eval.

    Args:
        served: address of the server, name of its model, and its process if it was started here.

    Raises:
        UserError: the server or lm-eval failed.
    """
    url, name, server = served
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir()
    options = _lm_eval_options(args, answering, task, url, name, directory)
    file = directory / "lm_eval.json"
    atomic_write(file, json.dumps(options, indent=2).encode())
    variables = {}
    if args.server is None:
        variables = {"NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"}
    if args.confirm_run_unsafe_code:
        variables["HF_ALLOW_CODE_EVAL"] = "1"  # required by the package evaluate
    ended = lm_eval.run(["run", "--config", str(file)], Path(options.get("include_path", directory)), variables)
    again = "run the same command again: finished tasks are not repeated"
    if ended.code and server is not None and server.process.poll() is not None:
        failure = server.failure(f"the server ended with code {server.process.returncode} during the task {task}")
        raise UserError(failure.problem, f"{failure.hint}; {again}")
    if ended.code and any("marked as unsafe" in line for line in ended.lines):
        raise UserError(
            f"--tasks {task} executes programs that the model writes, without a sandbox",
            "run it on a machine without anything of value: add --confirm_run_unsafe_code",
        )
    if ended.code:
        problem = f"lm-eval failed in the task {task} with exit code {ended.code}; end of its output:{ended.tail}"
        raise UserError(problem, f"see the lines above; {again}")
    return read_lm_eval(directory)


def _lm_eval_options(
    args: EvaluateArgs, answering: Answering, task: str, url: str, name: str, directory: Path
) -> dict[str, Any]:
    """Return the options of `lm_eval run`, as for --config."""
    model_args = {
        "model": name,
        "base_url": f"{url}/v1/completions",
        "tokenizer": str(answering.model.directory.absolute()),
        "tokenizer_backend": "huggingface",
        "trust_remote_code": args.trust_remote_code,
        "num_concurrent": args.num_concurrent,
        "max_length": answering.max_length(args),
        "timeout": _SECONDS_OF_REQUEST,
    }
    options: dict[str, Any] = {
        "model": "local-completions",
        "model_args": model_args | (args.lm_eval_model_args or {}),
        "tasks": [task],
        "apply_chat_template": args.apply_chat_template,
        "confirm_run_unsafe_code": args.confirm_run_unsafe_code,
        "output_path": str(directory),
        "log_samples": True,
    }
    if args.num_fewshot is not None:
        options["num_fewshot"] = args.num_fewshot
    if args.limit is not None:
        options["limit"] = int(args.limit) if args.limit >= 1 else args.limit
    if args.include_path:
        options["include_path"] = str(Path(args.include_path).resolve())
    return options


def _served_name(url: str) -> str:
    """Return the name of the model of a server.

    Raises:
        UserError: the server does not answer.
    """
    key = os.environ.get("OPENAI_API_KEY", "")  # as lm-eval
    request = urllib.request.Request(f"{url}/v1/models", headers={"Authorization": f"Bearer {key}"})
    try:
        with DIRECT.open(request, timeout=60) as response:
            return parse_json(response.read().decode())["data"][0]["id"]
    except (OSError, HTTPException, ValueError, KeyError, IndexError, TypeError) as error:
        raise UserError(
            f"{url}/v1/models does not name a model: {reason_of(error)}",
            "give the address of a running server; its key, if any, is in the variable OPENAI_API_KEY",
        ) from None


def _compare(names: dict[str, str], tasks: Sequence[str], finished: dict[str, dict[str, TaskRun]]) -> list[Compared]:
    """Return the results by task and model."""
    compared = []
    for task in tasks:
        baseline = None
        of_task = []
        for name in names:
            with_drafts = finished.get(name, {}).get(task)
            without = finished.get(f"{name}_without_drafts", {}).get(task)
            of_task.append(Compared(task, name, with_drafts, without))
            if name == "baseline":
                baseline = of_task[-1].run
        compared += [replace(each, baseline=baseline if each.name == "model" else None) for each in of_task]
    return compared
