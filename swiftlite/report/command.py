"""Run `swiftlite report`: write the page of a run or of several runs, or serve their pages."""

from pathlib import Path

from swiftlite.args.commands import ReportArgs
from swiftlite.base.atomic import atomic_write
from swiftlite.base.errors import UserError, reason_of
from swiftlite.base.log import logger
from swiftlite.report.live import INVALID_FILES, PORT, page_of, serve
from swiftlite.report.page import render
from swiftlite.report.run_page import PAGE_FILE


def run(args: ReportArgs) -> None:
    """Write the page, or serve it.

    Raises:
        UserError: the page cannot be written, a file of a run is invalid, or the port is not available.
    """
    directories = [Path(directory) for directory in args.runs]
    if args.serve:
        serve(directories, args.port or PORT)
        return
    path = Path(args.output or default_output(directories))
    try:
        content = render(page_of(directories))
    except INVALID_FILES as error:
        raise UserError(
            f"--runs {' '.join(args.runs)}: invalid files: {type(error).__name__}: {error}",
            "give unmodified --output_dir directories of training runs",
        ) from error
    try:
        atomic_write(path, content)
    except OSError as error:
        raise UserError(f"--output {path} cannot be written: {reason_of(error)}", "use another file") from None
    logger.info("wrote %s", path)


def default_output(directories: list[Path]) -> Path:
    """Return the page's default path: in the run's directory for one run, in the current directory for several runs."""
    if len(directories) == 1:
        return directories[0] / PAGE_FILE
    return Path("runs.html")
