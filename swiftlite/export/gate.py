"""Reject exports whose heads have a low acceptance (`export --min_acceptance --max_regression`)."""

from pathlib import Path

from swiftlite.acceptance.teacher_forced import ALL, teacher_forced
from swiftlite.args.commands import ExportArgs
from swiftlite.errors import UserError
from swiftlite.evaluate.evaluation_rows import load_rows
from swiftlite.evaluate.rates import rates
from swiftlite.families.resolved import HfModel, resolve
from swiftlite.log import logger
from swiftlite.plan.facts import model_of_run, reads_run
from swiftlite.runtime.mesh import Mesh


def check_acceptance(args: ExportArgs, hf_dir: Path, torch_dtype: str, mesh: Mesh) -> None:
    """If --min_acceptance or --max_regression is given, measure an export, and if necessary its baseline, on the same
    rows.

    Raises:
        UserError: a limit is not met, and --force is not given.
    """
    if args.min_acceptance is None and args.max_regression is None:
        return
    found = _mean(args, resolve(hf_dir), torch_dtype, mesh)
    problems = []
    if args.min_acceptance is not None and found < args.min_acceptance:
        problems.append(
            f"the heads agree with the trunk on {found:.1%} of the tokens, below --min_acceptance {args.min_acceptance}"
        )
    if args.max_regression is not None:
        baseline = args.baseline or args.model
        if not args.baseline and reads_run(args):
            baseline = model_of_run(Path(args.model))
        if baseline is None:  # deleted during the export; the rules have checked it
            raise UserError(
                "--max_regression requires the model that the run started from, which no longer exists",
                "nothing was written; add --baseline DIR",
            )
        before = _mean(args, resolve(baseline), torch_dtype, mesh)
        logger.info("acceptance on --val_dataset: %.1f %%, of %s %.1f %%", 100 * found, baseline, 100 * before)
        if before - found > args.max_regression:
            problems.append(
                f"the heads agree with the trunk on {found:.1%} of the tokens, those of {baseline} on {before:.1%}: "
                f"the decrease exceeds --max_regression {args.max_regression}"
            )
    else:
        logger.info("acceptance on --val_dataset: %.1f %%", 100 * found)
    if problems and args.force:
        for problem in problems:
            logger.warning("%s; written because of --force", problem)
    elif problems:
        raise UserError("; ".join(problems), "nothing was written; train the heads further, or add --force")


def _mean(args: ExportArgs, model: HfModel, torch_dtype: str, mesh: Mesh) -> float:
    """Return the share of predictions that equal the trunk's, averaged over depths; 0 for a model without heads."""
    _, data = load_rows(model, args.val_dataset, offered=vars(args), images=args)
    shares = rates("teacher_forced", teacher_forced(model, data.val, torch_dtype=torch_dtype, mesh=mesh)[ALL])
    return sum(shares) / max(len(shares), 1)
