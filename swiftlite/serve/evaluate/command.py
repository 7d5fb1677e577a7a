"""Run `swiftlite evaluate`: measure the heads and the trunk of a model and of a baseline, by channel."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from swiftlite.acceptance.report import add_compared_engines, named, read_acceptance
from swiftlite.acceptance.teacher_forced import ALL, Measured, measure_rows, teacher_forced
from swiftlite.args.commands import EvaluateArgs
from swiftlite.base.atomic import atomic_write, check_writable
from swiftlite.base.errors import UserError
from swiftlite.base.log import logger
from swiftlite.data.dataset import Data
from swiftlite.engines.engine import EngineConfig
from swiftlite.engines.index import ENGINES
from swiftlite.engines.interrupt import raises_at_sigterm
from swiftlite.engines.prompts import PromptEncoder
from swiftlite.engines.served_model import resolve_served
from swiftlite.families.resolved import HfModel
from swiftlite.hub.name import models_in
from swiftlite.report.page import render
from swiftlite.runtime.distributed import session
from swiftlite.runtime.mesh import Mesh
from swiftlite.serve.evaluate.by_engine import EngineStats, by_engine
from swiftlite.serve.evaluate.confidence import confidence_table, fastest_line
from swiftlite.serve.evaluate.evaluation_rows import have_answers, load_rows
from swiftlite.serve.evaluate.over_time import measure_over_time
from swiftlite.serve.evaluate.page import evaluation_chart, evaluation_page
from swiftlite.serve.evaluate.position_tables import position_tables
from swiftlite.serve.evaluate.rates import REPLAYED, ModelFigures, compare_with_engine, legend, table
from swiftlite.serve.evaluate.tasks import measure_tasks
from swiftlite.serve.evaluate.trunks import Trunk, have_same_tokens, trunk_of, trunk_section, trunk_table
from swiftlite.serve.prompt_groups import group_table, groups_to_json


def run(args: EvaluateArgs) -> None:
    """Measure the acceptance of a model or of a running server (`over_time.py`), or tasks (`tasks.py`).

    Raises:
        UserError: rows, a model or a server are invalid, or --output_dir cannot be written.
    """
    if args.tasks:
        measure_tasks(args)
    elif args.server is not None:
        measure_over_time(args)
    else:
        _measure_models(args)


def _measure_models(args: EvaluateArgs) -> None:
    """Measure the acceptance, print a table, and write evaluation.json, evaluation.svg and evaluation.html.

    Raises:
        UserError: rows or a model are invalid, or --output_dir cannot be written.
    """
    if args.acceptance_json:
        read_acceptance(Path(args.acceptance_json))
    names = models_in(args)
    models = {option: resolve_served(name) for option, name in names.items()}
    rows = {name: _read_rows(args, model) for name, model in models.items()}
    output_dir = Path(args.output_dir)
    check_writable("--output_dir", output_dir)
    served: dict[str, EngineStats] = {}
    if args.infer_backend in ENGINES:
        for name, model in models.items():
            if model.heads.layers:
                served[name] = _serve(args, model, *rows[name])
            else:
                logger.info("%s has no heads and is not measured with an engine", model.directory)
    results: dict[str, ModelFigures] = {}
    measured: dict[str, dict[str, Measured]] = {}
    with session() as mesh:
        for name, model in models.items():
            _, data = rows[name]
            results[name] = {}
            if data.val:
                measured[name] = measure_rows(model, data.val, torch_dtype=args.torch_dtype, mesh=mesh)
                forced = {channel: found.to_json() for channel, found in measured[name].items()}
                results[name] = {"teacher_forced": _without_walks(forced), "replayed": _walks(forced)}
            if name in served:
                results[name] |= _compare_with_engine(args, model, served[name], mesh, is_replayed=len(data.val) > 0)
    trunks: dict[str, Trunk] = {}
    print(f"{table(results)}\n\n{legend(results['model'])}")
    if measured:
        trunks = _trunks(models, rows, measured)
        print(f"\n{trunk_table(trunks).text()}")
    groups = _groups(served["model"]) if "model" in served else {}
    for kind, found in groups.items():
        print(f"\n{group_table(kind, kind, found).text()}")
    if by_place := position_tables(results):
        print(f"\n{by_place}")
    report = _report(names, results, trunks, served)
    confidences = []
    if args.draft_confidence:
        confidences = served["model"].by_confidence
    if confidences:
        print(f"\n{confidence_table(confidences).text()}\n\n{fastest_line(confidences)}")
        report["model"]["by_draft_confidence"] = confidences
    atomic_write(output_dir / "evaluation.json", json.dumps(report, indent=2).encode() + b"\n")
    atomic_write(output_dir / "evaluation.svg", evaluation_chart(results))
    section = trunk_section(trunks) if trunks else None
    page = evaluation_page(results, names, section, confidences, groups)
    atomic_write(output_dir / "evaluation.html", render(page))
    if args.acceptance_json:
        add_compared_engines(Path(args.acceptance_json), _counts_of_engine(args, results))
    logger.info("wrote %s, evaluation.svg and evaluation.html", output_dir / "evaluation.json")


def _report(
    names: Mapping[str, str],
    results: Mapping[str, ModelFigures],
    trunks: Mapping[str, Trunk],
    served: Mapping[str, EngineStats],
) -> dict[str, dict[str, Any]]:
    """Return the figures of each model in the format of evaluation.json."""
    report: dict[str, dict[str, Any]] = {}
    for name, figures in results.items():
        report[name] = {"directory": names[name], **figures}
        if name in trunks:
            report[name] |= trunks[name].to_json()
        if name in served:
            report[name] |= {f"by_{kind.replace(' ', '_')}": found for kind, found in _groups(served[name]).items()}
    return report


def _groups(stats: EngineStats) -> dict[str, dict[str, Any]]:
    """Return the counts of an engine by category (channel) and by length of the prompt, if there are several."""
    kinds = {"category": stats.by_category, "prompt length": stats.by_length}
    return {kind: groups_to_json(groups) for kind, groups in kinds.items() if len(groups) > 1}


def _trunks(
    models: Mapping[str, HfModel],
    rows: Mapping[str, tuple[PromptEncoder, Data]],
    measured: Mapping[str, Mapping[str, Measured]],
) -> dict[str, Trunk]:
    """Return the trunks of the model and of the baseline, if there is one, by name."""
    trunks = {name: trunk_of(model, measured[name]) for name, model in models.items()}
    if "baseline" not in models:
        return trunks
    if have_same_tokens(rows["model"][1].val, rows["baseline"][1].val):
        trunks["model"] = trunk_of(models["model"], measured["model"], measured["baseline"])
    else:
        logger.info("model and baseline tokenize the rows differently: the predictions of trunks are not compared")
    return trunks


def _read_rows(args: EvaluateArgs, model: HfModel) -> tuple[PromptEncoder, Data]:
    has_answers = have_answers(args.dataset)
    if not has_answers and args.infer_backend not in ENGINES:
        problem = f"--dataset {args.dataset[0]}: the rows have no answers"
        raise UserError(problem, "add --infer_backend vllm, which answers them")
    return load_rows(
        model,
        args.dataset,
        has_answers=has_answers,
        offered=vars(args),
        trust_remote_code=args.trust_remote_code,
        chat_template_kwargs=args.chat_template_kwargs,
        max_length=args.max_length,
        max_bad_rows=args.max_bad_rows,
        system=args.system,
        images=args,
        info=ENGINES.get(args.infer_backend),
    )


def _serve(args: EvaluateArgs, model: HfModel, encoder: PromptEncoder, data: Data) -> EngineStats:
    config = EngineConfig(
        model=model,
        torch_dtype=args.torch_dtype,
        trust_remote_code=args.trust_remote_code,
        num_speculative_tokens=args.num_speculative_tokens,
        draws_drafts=args.temperature > 0,
    )
    with raises_at_sigterm():  # ends the engine's processes too
        return by_engine(
            args.infer_backend,
            config,
            data.val_conversations,
            encoder,
            max_new_tokens=args.max_new_tokens,
            max_prompts=args.max_prompts,
            temperature=args.temperature,
            confidences=args.draft_confidence,
        )


def _compare_with_engine(
    args: EvaluateArgs, model: HfModel, served: EngineStats, mesh: Mesh, *, is_replayed: bool
) -> ModelFigures:
    """Return the draft counts of the engine.

    If the engine drafts as many tokens as the heads were trained for, also return the counts of speculative decoding
    simulated on the engine's answers.

    Args:
        is_replayed: False for questions of benchmarks, which can be too long for one pass in this process.
    """
    engine = args.infer_backend
    counted = served.by_channel
    drawn = {}
    if args.temperature:
        drawn = {named(engine, args.temperature): served.drawn_by_channel}
    if not is_replayed:
        return {engine: counted, **drawn}
    if served.num_speculative_tokens > model.heads.drafts:
        logger.info(
            "%s drafts %d tokens, the heads were trained for %d: its answers are not replayed",
            engine,
            served.num_speculative_tokens,
            model.heads.drafts,
        )
        return {engine: counted, **drawn}
    forced = teacher_forced(
        model,
        served.answers,
        torch_dtype=args.torch_dtype,
        mesh=mesh,
        num_drafts=served.num_speculative_tokens,
    )
    walks = _walks(forced)
    logger.info("%s", compare_with_engine(engine, counted[ALL], walks[ALL], args.torch_dtype))
    return {engine: counted, f"{engine}{REPLAYED}": walks, **drawn}


def _counts_of_engine(args: EvaluateArgs, results: Mapping[str, ModelFigures]) -> dict[str, dict[str, dict[str, Any]]]:
    """Return the engine's counts over all channels, by model and by the engine's name with its temperature."""
    keys = dict.fromkeys([named(args.infer_backend, 0), named(args.infer_backend, args.temperature)])
    counts = {}
    for name, figures in results.items():
        counts[name] = {key: figures[key][ALL] for key in keys if key in figures}
    return counts


def _walks(forced: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return, by channel, only the counts of simulated decoding (`replayed`) of a `teacher_forced` result."""
    return {channel: {"samples": found["samples"], **found["replayed"]} for channel, found in forced.items()}


def _without_walks(forced: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return, by channel, a `teacher_forced` result without the counts of simulated decoding (`replayed`)."""
    rest = {}
    for channel, found in forced.items():
        rest[channel] = {name: value for name, value in found.items() if name != "replayed"}
    return rest
