"""`export --min_acceptance --max_regression`: whether heads are good enough to be shipped."""

from pathlib import Path

from swiftlite.acceptance.teacher_forced import ALL, teacher_forced
from swiftlite.args.commands import ExportArgs
from swiftlite.errors import UserError
from swiftlite.evaluate.rates import rates
from swiftlite.evaluate.rows import load_rows
from swiftlite.families.resolved import HfModel, resolve
from swiftlite.log import logger
from swiftlite.plan.facts import model_of_run
from swiftlite.runtime.mesh import Mesh


def check_acceptance(args: ExportArgs, hf_dir: Path, torch_dtype: str, mesh: Mesh) -> None:
    """Measure a model that is written, and the one before it, on the same rows; nothing if neither option is given.

    Raises:
        UserError: it falls short, and --force is not given.
    """
    if args.min_acceptance is None and args.max_regression is None:
        return
    found = _mean(args, resolve(hf_dir), torch_dtype, mesh)
    problems = []
    if args.min_acceptance is not None and found < args.min_acceptance:
        problems.append(
            f"the heads agree with the trunk on {found:.1%} of the tokens, under --min_acceptance {args.min_acceptance}"
        )
    if args.max_regression is not None:
        baseline = args.baseline or model_of_run(Path(args.model))
        if baseline is None:  # the option check found it; exporting took a while
            raise UserError(
                "--max_regression compares with the model that the run began with, and that is not there any more",
                "nothing was written; add --baseline DIR",
            )
        before = _mean(args, resolve(baseline), torch_dtype, mesh)
        logger.info("acceptance on --val_dataset: %.1f %%, of %s %.1f %%", 100 * found, baseline, 100 * before)
        if before - found > args.max_regression:
            problems.append(
                f"the heads agree with the trunk on {found:.1%} of the tokens, those of {baseline} on {before:.1%}: "
                f"more than --max_regression {args.max_regression} below"
            )
    else:
        logger.info("acceptance on --val_dataset: %.1f %%", 100 * found)
    if problems and args.force:
        for problem in problems:
            logger.warning("%s; written nevertheless, as --force says", problem)
    elif problems:
        raise UserError("; ".join(problems), "nothing was written; train the heads on, or add --force")


def _mean(args: ExportArgs, model: HfModel, torch_dtype: str, mesh: Mesh) -> float:
    """The mean over depths of the share of predictions that are the trunk's own; 0 for a model without heads."""
    _, data = load_rows(model, args.val_dataset, offered=vars(args))
    shares = rates("teacher_forced", teacher_forced(model, data.val, torch_dtype=torch_dtype, mesh=mesh)[ALL])
    return sum(shares) / max(len(shares), 1)
