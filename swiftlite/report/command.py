"""`swiftlite report`: the page of a run again, or several runs on one page."""

from pathlib import Path

from swiftlite.args.commands import ReportArgs
from swiftlite.atomic import atomic_write
from swiftlite.errors import UserError, reason_of
from swiftlite.log import logger
from swiftlite.report.comparison import comparison_page
from swiftlite.report.page import render
from swiftlite.report.run_files import read_run
from swiftlite.report.run_page import PAGE_FILE, run_page


def run(args: ReportArgs) -> None:
    """Write the page.

    Raises:
        UserError: the page cannot be written, or a run's files are not as a run writes them.
    """
    directories = [Path(directory) for directory in args.runs]
    path = Path(args.output or default_output(directories))
    try:
        page = run_page(read_run(directories[0])) if len(directories) == 1 else comparison_page(directories)
        content = render(page)
    except (AttributeError, KeyError, TypeError, ValueError) as error:  # the files were modified
        raise UserError(
            f"--runs {' '.join(args.runs)}: their files are not as a run writes them: {type(error).__name__}: {error}",
            "give directories as megatron sft has left them",
        ) from error
    try:
        atomic_write(path, content)
    except OSError as error:
        raise UserError(f"--output {path} cannot be written: {reason_of(error)}", "name another file") from None
    logger.info("%s: open it in a browser", path)


def default_output(directories: list[Path]) -> Path:
    """Return the page's default path: in the run for one run, in the current directory for several."""
    return directories[0] / PAGE_FILE if len(directories) == 1 else Path("runs.html")
