"""What a stage found, appended line by line, so that a stage that is cut off leaves what it had; and the page of it."""

import json
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

FILE = "gpu_results.jsonl"


@dataclass(frozen=True)
class Settings:
    """What every stage is told.

    Attributes:
        device: cuda or cpu.
        tiny: the smallest sizes, which show that the code runs and nothing of speed.
        model: a Hugging Face directory to train; None: one of random weights is made.
        output_dir: of results and logs.
        work_dir: of models and runs, which nobody reads afterwards.
        sizes: of the models of stage `training`.
    """

    device: str
    tiny: bool
    model: Path | None
    output_dir: Path
    work_dir: Path
    sizes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Result:
    """One line of the report.

    Attributes:
        passed: None where nothing was demanded of it.
        demanded: in words.
    """

    stage: str
    name: str
    value: float | str
    passed: bool | None = None
    demanded: str = ""


class Results:
    """The file of one run."""

    def __init__(self, directory: Path, stage: str):
        self.path, self.stage = directory / FILE, stage

    def add(self, name: str, value: float | str, passed: bool | None = None, demanded: str = "") -> None:
        result = Result(self.stage, name, value, passed, demanded)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(result) | {"time": round(time.time())}) + "\n")
        print(_line(result), flush=True)

    def at_most(self, name: str, value: float, bound: float) -> None:
        """A difference that passes below its bound; NaN does not."""
        self.add(name, value, value <= bound, f"at most {bound:g}")


def read(directory: Path) -> list[Result]:
    lines = (directory / FILE).read_text(encoding="utf-8").splitlines()
    values = [json.loads(line) for line in lines]
    for value in values:
        del value["time"]
    return [Result(**value) for value in values]


def page(results: Iterable[Result]) -> str:
    """Markdown of one screen: a table of what was measured, what failed first."""
    rows = sorted(results, key=lambda result: result.passed is not False)  # stable: stages stay in order
    failed = sum(result.passed is False for result in rows)
    lines = [
        f"# GPU report: {failed} of {len(rows)} failed",
        "",
        "| stage | what | found | demanded | |",
        "|---|---|---|---|---|",
    ]
    for result in rows:
        cells = (result.stage, result.name, _value(result), result.demanded, _verdict(result))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _verdict(result: Result) -> str:
    return "" if result.passed is None else "passed" if result.passed else "FAILED"


def _value(result: Result) -> str:
    return result.value if isinstance(result.value, str) else f"{result.value:.4g}"


def _line(result: Result) -> str:
    demanded = f" ({result.demanded})" if result.demanded else ""
    return f"{result.stage:9} {result.name}: {_value(result)}{demanded} {_verdict(result)}".rstrip()
