"""Write the results of stages: to a file, line by line, so that a stopped stage keeps its results, and to a report
page.
"""

import json
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

FILE = "gpu_results.jsonl"


@dataclass(frozen=True)
class Settings:
    """Settings of every stage.

    Attributes:
        device: cuda or cpu.
        tiny: whether to use the smallest sizes, to check that the stages run.
        model: Hugging Face directory of the model to train; None for random weights.
        output_dir: directory of results and logs.
        work_dir: directory of models and runs, which are not needed afterwards.
        sizes: model sizes of the stage `training`.
        cases: names of the cases to run, in the stages that have cases; None for all.
    """

    device: str
    tiny: bool
    model: Path | None
    output_dir: Path
    work_dir: Path
    sizes: tuple[str, ...] = ()
    cases: list[str] | None = None

    def selected(self, names: Iterable[str]) -> list[str]:
        """Return the names that `--cases` selects, in order."""
        return [name for name in names if self.cases is None or name in self.cases]


@dataclass(frozen=True)
class Result:
    """One line of the report.

    Attributes:
        passed: whether the requirement is met; None without a requirement.
        demanded: description of the requirement.
    """

    stage: str
    name: str
    value: float | str
    passed: bool | None = None
    demanded: str = ""


class Results:
    """A file of results, to which each result is appended."""

    def __init__(self, directory: Path, stage: str):
        self.path, self.stage = directory / FILE, stage

    def add(self, name: str, value: float | str, passed: bool | None = None, demanded: str = "") -> None:
        result = Result(self.stage, name, value, passed, demanded)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(result) | {"time": round(time.time())}) + "\n")
        print(_line(result), flush=True)

    def at_most(self, name: str, value: float, bound: float) -> None:
        """Add a value that passes if it is at most `bound`. NaN does not pass."""
        self.add(name, value, value <= bound, f"at most {bound:g}")


def read(directory: Path) -> list[Result]:
    lines = (directory / FILE).read_text(encoding="utf-8").splitlines()
    values = [json.loads(line) for line in lines]
    for value in values:
        del value["time"]
    return [Result(**value) for value in values]


def page(results: Iterable[Result]) -> str:
    """Return a Markdown table of all results. Failures are first."""
    rows = sorted(results, key=lambda result: result.passed is not False)  # stable: stages stay in order
    failed = sum(result.passed is False for result in rows)
    lines = [
        f"# GPU report: {failed} of {len(rows)} failed",
        "",
        "| stage | measurement | result | required | |",
        "|---|---|---|---|---|",
    ]
    for result in rows:
        cells = (result.stage, result.name, _value(result), result.demanded, _verdict(result))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _verdict(result: Result) -> str:
    if result.passed is None:
        return ""
    if result.passed:
        return "passed"
    return "FAILED"


def _value(result: Result) -> str:
    if isinstance(result.value, str):
        return result.value
    return f"{result.value:.4g}"


def _line(result: Result) -> str:
    line = f"{result.stage:9} {result.name}: {_value(result)}"
    if result.demanded:
        line += f" ({result.demanded})"
    return f"{line} {_verdict(result)}".rstrip()
