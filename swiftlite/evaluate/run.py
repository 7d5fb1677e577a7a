"""`swiftlite evaluate`: acceptance by depth and channel, of a model and of the one before it."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from swiftlite.acceptance.teacher_forced import teacher_forced
from swiftlite.args.commands import EvaluateArgs
from swiftlite.bridge.tensors import write_durably
from swiftlite.data.dataset import Data, load_train_val
from swiftlite.data.template import load_tokenizer
from swiftlite.engines.engine import EngineConfig
from swiftlite.engines.served_model import read_model
from swiftlite.evaluate.by_engine import by_engine
from swiftlite.evaluate.picture import draw, rates
from swiftlite.log import logger
from swiftlite.runtime.distributed import session

Measured = dict[str, dict[str, Any]]
"""How it was measured (teacher_forced, replayed, or an engine's name) -> channel -> figures."""


def run(args: EvaluateArgs) -> None:
    """Measure, print a table, write evaluation.json and evaluation.svg.

    Raises:
        UserError: rows that cannot be used, a model that is not whole.
    """
    names = {"model": args.model} | ({"baseline": args.baseline} if args.baseline else {})
    models = {name: read_model(directory) for name, directory in names.items()}
    results: dict[str, Measured] = {}
    data: dict[str, tuple[PreTrainedTokenizerBase, Data]] = {}
    with session() as mesh:
        for name, model in models.items():
            data[name] = load_rows(
                model.directory,
                args.dataset,
                trust_remote_code=args.trust_remote_code,
                max_length=args.max_length,
                max_bad_rows=args.max_bad_rows,
                system=args.system,
            )
            forced = teacher_forced(model.directory, data[name][1].val, torch_dtype=args.torch_dtype, mesh=mesh)
            replayed = {
                channel: {"samples": figures["samples"], **figures.pop("replayed")}
                for channel, figures in forced.items()
            }
            results[name] = {"teacher_forced": forced, "replayed": replayed}
    if args.infer_backend != "none":
        for name, model in models.items():
            if not model.heads.layers:
                logger.info("%s has no heads: no engine is started for it", model.directory)
                continue
            tokenizer, rows = data[name]
            config = EngineConfig(
                model=model.directory,
                torch_dtype=args.torch_dtype,
                trust_remote_code=args.trust_remote_code,
                num_speculative_tokens=args.num_speculative_tokens,
                in_this_process=True,
            )
            results[name][args.infer_backend] = by_engine(
                args.infer_backend,
                config,
                rows.val_conversations,
                tokenizer,
                max_new_tokens=args.max_new_tokens,
                max_prompts=args.max_prompts,
            )
    output_dir = Path(args.output_dir)
    output_dir.mkdir(parents=True, exist_ok=True)
    report = {name: {"directory": names[name], **measured} for name, measured in results.items()}
    write_durably(output_dir / "evaluation.json", json.dumps(report, indent=2).encode() + b"\n")
    write_durably(output_dir / "evaluation.svg", draw(results))
    print(table(results))
    logger.info("%s and evaluation.svg", output_dir / "evaluation.json")


def load_rows(
    hf_dir: Path,
    dataset: Sequence[str],
    *,
    trust_remote_code: bool = False,
    max_length: int = 2048,
    max_bad_rows: int = 0,
    system: str | None = None,
) -> tuple[PreTrainedTokenizerBase, Data]:
    """The rows as held-out samples of one model: each reads them with its own tokenizer and template.

    Raises:
        UserError: as `load_train_val`.
    """
    tokenizer = load_tokenizer(hf_dir, trust_remote_code)
    data = load_train_val(
        tokenizer,
        (),
        dataset,
        max_length=max_length,
        truncation_strategy="right",
        max_bad_rows=max_bad_rows,
        system=system,
    )
    return tokenizer, data


def table(results: dict[str, Measured]) -> str:
    """A line for each channel, with what changed against the baseline in points."""
    before = results.get("baseline", {})
    rows = [("measured by", "channel", "rows", *(f"depth {k}" for k in range(1, 1 + _most_depths(results))))]
    for how, channels in results["model"].items():
        for channel, figures in channels.items():
            old = before.get(how, {}).get(channel)
            olds = rates(how, old) if old else []
            cells = [
                f"{rate:.1%}" + (f" ({100 * (rate - olds[k]):+.1f})" if k < len(olds) else "")
                for k, rate in enumerate(rates(how, figures))
            ]
            number = figures["samples" if "samples" in figures else "prompts"]
            rows.append((how, channel, str(number), *cells, *[""] * (len(rows[0]) - 3 - len(cells))))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def _most_depths(results: dict[str, Measured]) -> int:
    return max(len(rates(how, each)) for how, channels in results["model"].items() for each in channels.values())
