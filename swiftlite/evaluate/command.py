"""`swiftlite evaluate`: acceptance by depth and channel, of a model and of the one before it."""

import json
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from swiftlite.acceptance.teacher_forced import teacher_forced
from swiftlite.args.commands import EvaluateArgs
from swiftlite.data.dataset import Data
from swiftlite.durable import check_writable, write_durably
from swiftlite.engines.engine import EngineConfig
from swiftlite.engines.index import ENGINES
from swiftlite.engines.interrupt import ends_at_sigterm
from swiftlite.engines.served_model import ServedModel, read_model
from swiftlite.evaluate.acceptance_chart import draw
from swiftlite.evaluate.by_engine import by_engine
from swiftlite.evaluate.figures import ModelFigures, table
from swiftlite.evaluate.page import evaluation_page
from swiftlite.evaluate.rows import load_rows
from swiftlite.log import logger
from swiftlite.report.page import render
from swiftlite.runtime.distributed import session


def run(args: EvaluateArgs) -> None:
    """Measure, print a table, write evaluation.json, evaluation.svg and evaluation.html.

    Raises:
        UserError: rows that cannot be used, a model that is not whole.
    """
    names = {"model": args.model} | ({"baseline": args.baseline} if args.baseline else {})
    models = {name: read_model(directory) for name, directory in names.items()}
    output_dir = Path(args.output_dir)
    check_writable("--output_dir", output_dir)
    results: dict[str, ModelFigures] = {}
    tokenizers: dict[str, PreTrainedTokenizerBase] = {}
    data: dict[str, Data] = {}
    with session() as mesh:
        for name, model in models.items():
            tokenizers[name], data[name] = load_rows(
                model.directory,
                args.dataset,
                offered=vars(args),
                trust_remote_code=args.trust_remote_code,
                max_length=args.max_length,
                max_bad_rows=args.max_bad_rows,
                system=args.system,
            )
            forced = teacher_forced(model.directory, data[name].val, torch_dtype=args.torch_dtype, mesh=mesh)
            replayed = {
                channel: {"samples": figures["samples"], **figures.pop("replayed")}
                for channel, figures in forced.items()
            }
            results[name] = {"teacher_forced": forced, "replayed": replayed}
    if args.infer_backend in ENGINES:
        for name, model in models.items():
            if not model.heads.layers:
                logger.info("%s has no heads: no engine is started for it", model.directory)
                continue
            with ends_at_sigterm():
                results[name][args.infer_backend] = by_engine(
                    args.infer_backend,
                    _engine_config(args, model),
                    data[name].val_conversations,
                    tokenizers[name],
                    max_new_tokens=args.max_new_tokens,
                    max_prompts=args.max_prompts,
                )
    print(table(results))
    report = {name: {"directory": names[name], **measured} for name, measured in results.items()}
    write_durably(output_dir / "evaluation.json", json.dumps(report, indent=2).encode() + b"\n")
    write_durably(output_dir / "evaluation.svg", draw(results))
    write_durably(output_dir / "evaluation.html", render(evaluation_page(results, names)))
    logger.info("%s, evaluation.svg and evaluation.html", output_dir / "evaluation.json")


def _engine_config(args: EvaluateArgs, model: ServedModel) -> EngineConfig:
    return EngineConfig(
        model=model.directory,
        torch_dtype=args.torch_dtype,
        trust_remote_code=args.trust_remote_code,
        num_speculative_tokens=args.num_speculative_tokens,
        in_this_process=True,
    )
