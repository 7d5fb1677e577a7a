"""Run `swiftlite report`: write the page of a run again, or a page of several runs."""

from pathlib import Path

from swiftlite.args.commands import ReportArgs
from swiftlite.base.atomic import atomic_write
from swiftlite.base.errors import UserError, reason_of
from swiftlite.base.log import logger
from swiftlite.report.comparison import comparison_page
from swiftlite.report.page import Page, render
from swiftlite.report.run_files import read_run
from swiftlite.report.run_page import PAGE_FILE, run_page


def run(args: ReportArgs) -> None:
    """Write the page.

    Raises:
        UserError: the page cannot be written, or a file of a run is invalid.
    """
    directories = [Path(directory) for directory in args.runs]
    path = Path(args.output or default_output(directories))
    try:
        content = render(_page(directories))
    except (AttributeError, KeyError, TypeError, ValueError) as error:  # a file was modified
        raise UserError(
            f"--runs {' '.join(args.runs)}: invalid files: {type(error).__name__}: {error}",
            "give unmodified --output_dir directories of training runs",
        ) from error
    try:
        atomic_write(path, content)
    except OSError as error:
        raise UserError(f"--output {path} cannot be written: {reason_of(error)}", "use another file") from None
    logger.info("wrote %s", path)


def _page(directories: list[Path]) -> Page:
    if len(directories) == 1:
        return run_page(read_run(directories[0]))
    return comparison_page(directories)


def default_output(directories: list[Path]) -> Path:
    """Return the page's default path: in the run's directory for one run, in the current directory for several runs."""
    if len(directories) == 1:
        return directories[0] / PAGE_FILE
    return Path("runs.html")
