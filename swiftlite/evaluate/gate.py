"""`export --min_acceptance --max_regression`: whether heads are good enough to be shipped."""

from collections.abc import Sequence
from pathlib import Path

from swiftlite.acceptance.teacher_forced import ALL, teacher_forced
from swiftlite.errors import UserError
from swiftlite.evaluate.figures import rates
from swiftlite.evaluate.rows import load_rows
from swiftlite.log import logger
from swiftlite.runtime.mesh import Mesh


def check_acceptance(
    hf_dir: Path,
    baseline: Path | None,
    dataset: Sequence[str],
    *,
    min_acceptance: float | None,
    max_regression: float | None,
    force: bool,
    torch_dtype: str,
    mesh: Mesh,
) -> None:
    """Measure a model that is written, and the one before it, on the same rows.

    Args:
        min_acceptance: smallest mean over depths of the share of predictions that are the trunk's own.
        max_regression: most that it may be below the baseline's.
        force: warn, and raise nothing.

    Raises:
        UserError: it falls short.
    """
    found = _mean(hf_dir, dataset, torch_dtype, mesh)
    problems = []
    if min_acceptance is not None and found < min_acceptance:
        problems.append(
            f"the heads agree with the trunk on {found:.1%} of the tokens, under --min_acceptance {min_acceptance}"
        )
    if max_regression is not None:
        assert baseline is not None
        before = _mean(baseline, dataset, torch_dtype, mesh)
        logger.info("acceptance on --val_dataset: %.1f %%, of %s %.1f %%", 100 * found, baseline, 100 * before)
        if before - found > max_regression:
            problems.append(
                f"the heads agree with the trunk on {found:.1%} of the tokens, those of {baseline} on {before:.1%}: "
                f"more than --max_regression {max_regression} below"
            )
    else:
        logger.info("acceptance on --val_dataset: %.1f %%", 100 * found)
    if problems and force:
        for problem in problems:
            logger.warning("%s; written nevertheless, as --force says", problem)
    elif problems:
        raise UserError("; ".join(problems), "nothing was written; train the heads on, or add --force")


def _mean(hf_dir: Path, dataset: Sequence[str], torch_dtype: str, mesh: Mesh) -> float:
    """The mean over depths of the share of predictions that are the trunk's own; 0 for a model without heads."""
    _, data = load_rows(hf_dir, dataset)
    shares = rates("teacher_forced", teacher_forced(hf_dir, data.val, torch_dtype=torch_dtype, mesh=mesh)[ALL])
    return sum(shares) / max(len(shares), 1)
