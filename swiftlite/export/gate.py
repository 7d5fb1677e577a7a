"""Measure an export on held-out rows, and reject it if its heads or its trunk do not meet a limit.

Limits are --min_acceptance and --max_regression for heads, and --max_trunk_loss and --max_trunk_loss_increase for the
trunk. A quantized export is always measured if there are rows: a changed trunk gives other answers, which the
acceptance of its heads does not show, and wrong heads give the same answers, which the loss of the trunk does not show.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from swiftlite.acceptance.report import ACCEPTANCE_FILE, write_quantized
from swiftlite.acceptance.teacher_forced import ALL, Measured, measure_rows
from swiftlite.args.commands import ExportArgs
from swiftlite.base.errors import UserError
from swiftlite.base.log import logger
from swiftlite.data.sample import Sample
from swiftlite.engines.index import ENGINES
from swiftlite.engines.quantization import quantization_of
from swiftlite.export.engine_counts import count_in_engine
from swiftlite.families.resolved import HfModel, resolve
from swiftlite.plan.facts import model_of_run, reads_run
from swiftlite.rules.export import COMPARED_LIMITS, LIMITS
from swiftlite.runtime.mesh import Mesh
from swiftlite.serve.evaluate.evaluation_rows import load_rows
from swiftlite.serve.evaluate.rates import rates
from swiftlite.serve.evaluate.trunks import have_same_tokens


@dataclass(frozen=True)
class _Figures:
    """Measurements of one model on --val_dataset.

    Attributes:
        name: name of the model in messages.
        samples: the rows as the model's tokenizer encodes them.
    """

    model: HfModel
    name: str
    measured: Measured
    samples: Sequence[Sample]

    @property
    def acceptance(self) -> float:
        """Share of predictions that equal the trunk's, averaged over depths; 0 for a model without heads."""
        return sum(self.by_depth) / max(len(self.by_depth), 1)

    @property
    def by_depth(self) -> list[float]:
        return rates("teacher_forced", self.measured.to_json())

    @property
    def trunk_loss(self) -> float:
        return self.measured.trunk_to_json()["loss"]

    def to_json(self, baseline: "_Figures | None" = None) -> dict[str, Any]:
        """Return the figures in the format of acceptance.json."""
        walk = self.measured.to_json()["replayed"]
        return {
            "trunk": self.measured.trunk_to_json(baseline and baseline.measured),
            "teacher_forced": {"acceptance_per_depth": self.by_depth},
            "replayed": {"prompts": self.measured.num_samples, **walk},
        }


def check_quality(
    args: ExportArgs, hf_dir: Path, torch_dtype: str, mesh: Mesh, unquantized: HfModel | None = None
) -> None:
    """Measure an export, and if necessary its baseline, on the same rows. For a quantized export, write the results to
    acceptance.json in its directory; with --infer_backend, also the counts of an engine.

    Args:
        unquantized: the model before its quantization; None if the export is not quantized.

    Raises:
        UserError: a limit is not met, and --force is not given, or the engine failed.
    """
    given = [name for name in LIMITS if vars(args)[name] is not None]
    if unquantized and not args.val_dataset:
        logger.info("the effect of the quantization was not measured; to measure it, add --val_dataset FILE")
    if not args.val_dataset or not (given or unquantized):
        return
    found = _measure(args, resolve(hf_dir), "the export", torch_dtype, mesh)
    before = None
    if unquantized or any(name in COMPARED_LIMITS for name in given):
        model, name = _baseline(args, unquantized)
        before = _measure(args, model, name, torch_dtype, mesh)
        if not have_same_tokens(found.samples, before.samples):
            problem = f"--baseline {name} tokenizes the rows of --val_dataset differently"
            raise UserError(problem, "nothing was written; use another --baseline")
    _log(found, before)
    _check_limits(args, found, before)
    if unquantized and before:
        description = {"method": args.quant_method, **quantization_of(resolve(hf_dir))}
        write_quantized(hf_dir / ACCEPTANCE_FILE, description, found.to_json(before), before.to_json())
        if args.infer_backend in ENGINES:
            count_in_engine(args, hf_dir, before.model.directory, torch_dtype)


def _baseline(args: ExportArgs, unquantized: HfModel | None) -> tuple[HfModel, str]:
    """Return the model to compare with, and its name in messages.

    Raises:
        UserError: the model that the run started from does not exist.
    """
    if args.baseline:
        return resolve(args.baseline), args.baseline
    if unquantized:
        return unquantized, "the unquantized model"
    model: str | None = args.model
    if reads_run(args):
        model = model_of_run(Path(args.model))
    if model is None:  # deleted during the export; the rules have checked it
        flags = " and ".join(f"--{name}" for name in COMPARED_LIMITS if vars(args)[name] is not None)
        raise UserError(
            f"{flags} requires the model that the run started from, which no longer exists",
            "nothing was written; add --baseline DIR",
        )
    return resolve(model), model


def _measure(args: ExportArgs, model: HfModel, name: str, torch_dtype: str, mesh: Mesh) -> _Figures:
    _, data = load_rows(model, args.val_dataset, offered=options_of_rows(args), images=args)
    measured = measure_rows(model, data.val, torch_dtype=torch_dtype, mesh=mesh)[ALL]
    return _Figures(model, name, measured, data.val)


def _check_limits(args: ExportArgs, found: _Figures, before: _Figures | None) -> None:
    """Check the limits; with --force, only warn.

    Raises:
        UserError: a limit is not met.
    """
    problems = _problems(args, found, before)
    if problems and not args.force:
        raise UserError("; ".join(problems), "nothing was written; change the export or the limit, or add --force")
    for problem in problems:
        logger.warning("%s; written because of --force", problem)


def options_of_rows(args: ExportArgs) -> set[str]:
    """Return the names of the options that apply to --val_dataset. --max_length applies only to calibration rows."""
    return set(vars(args)) - {"max_length"}


def _log(found: _Figures, before: _Figures | None) -> None:
    for figures in filter(None, (found, before)):
        logger.info(
            "--val_dataset: %s: acceptance %.1f %%, trunk loss %.4f",
            figures.name,
            100 * figures.acceptance,
            figures.trunk_loss,
        )
    if before:
        agreement = found.measured.trunk_to_json(before.measured)["top1_agreement"]
        logger.info(
            "--val_dataset: both trunks have the same most likely token at %.1f %% of the tokens", 100 * agreement
        )


def _problems(args: ExportArgs, found: _Figures, before: _Figures | None) -> list[str]:
    """Return one line for each limit that is not met. A loss that is not a number meets no limit."""
    problems = []
    if math.isnan(found.trunk_loss):
        problems.append("the loss of the trunk is not a number (NaN)")
    if args.min_acceptance is not None and found.acceptance < args.min_acceptance:
        problems.append(
            f"the heads agree with the trunk on {found.acceptance:.1%} of the tokens, below --min_acceptance "
            f"{args.min_acceptance}"
        )
    if args.max_trunk_loss is not None and not found.trunk_loss <= args.max_trunk_loss:
        problems.append(
            f"the loss of the trunk is {found.trunk_loss:.4f}, above --max_trunk_loss {args.max_trunk_loss}"
        )
    if before is None:
        return problems
    if args.max_regression is not None and before.acceptance - found.acceptance > args.max_regression:
        problems.append(
            f"the heads agree with the trunk on {found.acceptance:.1%} of the tokens, those of {before.name} on "
            f"{before.acceptance:.1%}: the decrease exceeds --max_regression {args.max_regression}"
        )
    limit = args.max_trunk_loss_increase
    if limit is not None and not found.trunk_loss - before.trunk_loss <= limit:
        problems.append(
            f"the loss of the trunk is {found.trunk_loss:.4f}, that of {before.name} {before.trunk_loss:.4f}: "
            f"the increase exceeds --max_trunk_loss_increase {limit}"
        )
    return problems
