"""Rules of `report`."""

from collections.abc import Iterator
from pathlib import Path

from swiftlite.args.commands import ReportArgs
from swiftlite.args.config import Problem
from swiftlite.plan.facts import Facts, near_path
from swiftlite.rules import common


def there_are_runs(args: ReportArgs, facts: Facts) -> Iterator[Problem]:
    if not args.runs:
        yield "--runs is required", "give the --output_dir of one or more runs: swiftlite report run other-run"
    for name in args.runs:
        path = Path(name)
        if path.is_file():
            yield f"--runs {path} is a file", f"give the directory of the run: {path.parent}"
        elif not path.exists():
            yield f"--runs {path} does not exist", near_path(path) or "give the --output_dir of a training run"
        elif not (path / "args.json").is_file():
            yield f"--runs {path} is not a run: it has no args.json", "give the --output_dir of a training run"
    if len({Path(name).resolve() for name in args.runs}) < len(args.runs):
        yield "--runs contains a run twice", "give each run once"


def output_can_be(args: ReportArgs, facts: Facts) -> Iterator[Problem]:
    if args.output is None:
        return
    path = Path(args.output)
    if path.is_dir():
        yield f"--output {path} is a directory", f"give a file: --output {path / 'runs.html'}"
    elif path.exists() and not path.is_file():
        yield f"--output {path} is not a regular file", "use another file"  # such as /dev/stdout
    elif path.is_file() and not _is_page(path):
        yield f"--output {path} exists and is not an HTML page", "use another file"
    elif not path.parent.is_dir():
        yield f"--output {path}: the directory {path.parent} does not exist", "create it, or use another file"


def serving_has_its_options(args: ReportArgs, facts: Facts) -> Iterator[Problem]:
    if args.serve and args.output is not None:
        yield "--output has no effect with --serve, which writes no file", "remove --output, or --serve"
    if args.port is not None and not args.serve:
        yield "--port has no effect without --serve", "add --serve, or remove --port"


def _is_page(path: Path) -> bool:
    """Return whether a file is an HTML page, such as an output of `report`."""
    with path.open("rb") as file:
        return file.read(4096).lstrip().lower().startswith((b"<!doctype html", b"<html"))


RULES = (there_are_runs, output_can_be, serving_has_its_options, common.numbers_are_in_range)
NOTES = ()
