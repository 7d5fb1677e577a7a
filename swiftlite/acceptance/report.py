"""Read and write acceptance.json and drafts.json. Only this module reads and writes these files.

acceptance.json of a run contains the acceptance rates before and after training, and the rates of engines that served
its model. acceptance.json of a quantized export contains the quality of its trunk and heads, and the same of the model
before the quantization.
drafts.json contains some held-out answers, with the head that drafted each token, for reports.
"""

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from swiftlite.acceptance.counts import DraftCounts
from swiftlite.base.atomic import atomic_write
from swiftlite.base.errors import UserError
from swiftlite.base.json_file import read_json
from swiftlite.base.log import logger

ACCEPTANCE_FILE = "acceptance.json"
ANSWERS_FILE = "drafts.json"
AT_TEMPERATURE = "_at_temperature_"
"""Text between an engine's name and a temperature above 0 in keys of acceptance.json, such as
`vllm_at_temperature_0.7`."""


@dataclass(frozen=True)
class MeasuredPrompts:
    """Draft counts, and the number of prompts on which the counts were measured."""

    num_prompts: int
    counts: DraftCounts

    def to_json(self) -> dict[str, object]:
        return {"prompts": self.num_prompts, **self.counts.to_json()}


def add_run_acceptance(
    path: Path,
    when: Literal["before", "after"],
    acceptance_per_depth: Sequence[float],
    generated: MeasuredPrompts,
    by_channel: Mapping[str, MeasuredPrompts] | None = None,
) -> None:
    """Write a run's measurement to its acceptance.json. For "before", the file is replaced.

    Args:
        acceptance_per_depth: teacher-forced acceptance over the held-out rows; empty if these have no labels.
        generated: counts of speculative decoding over greedy answers to the held-out prompts.
        by_channel: `generated` for the prompts of each named channel.
    """
    content: dict[str, Any] = {"depths": len(generated.counts.accepted_per_position)}
    if when == "after" and path.exists():
        content = json.loads(path.read_text())
    content[when] = {
        "teacher_forced": {"acceptance_per_depth": list(acceptance_per_depth)},
        "generated": generated.to_json(),
    }
    if by_channel:
        channels = sorted(by_channel)
        content[when]["generated_by_channel"] = {name: by_channel[name].to_json() for name in channels}
    _write(path, content)


def add_run_answers(path: Path, when: Literal["before", "after"], answers: Sequence[Mapping[str, Any]]) -> None:
    """Write answers to drafts.json next to acceptance.json. For "before", the file is replaced.

    Args:
        path: path of acceptance.json.
        answers: `prompt`, `channel` and `tokens` (`answers.describe`) of each answer, and `images` (`thumbnails`) of
            prompts with images.
    """
    content: dict[str, Any] = {}
    if when == "after":
        content = read_answers(path.parent)
    content[when] = list(answers)
    lines = json.dumps(content, ensure_ascii=False, separators=(",", ":"))
    atomic_write(path.with_name(ANSWERS_FILE), lines.encode(errors="replace") + b"\n")


def read_answers(run: Path) -> dict[str, Any]:
    """Return the stored answers of a run, under the keys "before" and "after" (training).

    The result is that of `read_displayed`.
    """
    return read_displayed(run / ANSWERS_FILE)


def read_displayed(path: Path, keys: Collection[str] = ()) -> dict[str, Any]:
    """Return the object in a JSON file that is only displayed: empty if the file is missing or damaged. For a damaged
    file, a warning is logged.

    Args:
        keys: keys without which the file is damaged.
    """
    try:
        content = read_json(path)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError):
        content = None
    if isinstance(content, dict) and content.keys() >= set(keys):
        return content
    logger.warning("%s is damaged; omitted from the report", path)
    return {}


def read_summary(path: Path) -> dict[str, float]:
    """Return the acceptance rates of a run by metric name."""
    content = read_acceptance(path)
    return {
        f"acceptance_{when}": content[when]["generated"]["acceptance_rate"]
        for when in ("before", "after")
        if when in content
    }


def named(backend: str, temperature: float) -> str:
    """Return the key of an engine's counts in acceptance.json: its name and, if the temperature is above 0, the
    temperature.
    """
    if not temperature:
        return backend
    return f"{backend}{AT_TEMPERATURE}{temperature:g}"


def describe(name: str) -> str:
    """Return a description of a key that `named` returned."""
    return name.replace(AT_TEMPERATURE, " at temperature ")


def add_engine_acceptance(
    path: Path, backend: str, num_prompts: int, counts: DraftCounts, temperature: float = 0.0
) -> None:
    """Add an engine's counts to a run's acceptance.json. Other keys of the file are not changed.

    Raises:
        UserError: the file is not an acceptance.json.
    """
    content = read_acceptance(path)
    content.setdefault("engines", {})[named(backend, temperature)] = MeasuredPrompts(num_prompts, counts).to_json()
    _write(path, content)


def add_compared_engines(path: Path, counts: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> None:
    """Add the counts of engines to an acceptance.json: those of "model" under `engines`, those of "baseline" under
    `baseline`.

    Args:
        counts: by model, counts (`MeasuredPrompts.to_json`) by engine (`named`).

    Raises:
        UserError: the file is not an acceptance.json.
    """
    content = read_acceptance(path)
    for name, by_engine in counts.items():
        place = content
        if name == "baseline":
            place = content.setdefault("baseline", {})
        place["engines"] = {**place.get("engines", {}), **by_engine}
    _write(path, content)


def write_quantized(
    path: Path, quantization: Mapping[str, Any], model: Mapping[str, Any], baseline: Mapping[str, Any]
) -> None:
    """Write the acceptance.json of a quantized export.

    Args:
        quantization: description of the quantization.
        model: `trunk`, `teacher_forced` and `replayed` of the export.
        baseline: the same of the model that it is compared with.
    """
    depths = len(model["teacher_forced"]["acceptance_per_depth"])
    _write(path, {"depths": depths, "quantization": quantization, **model, "baseline": baseline})


def read_acceptance(path: Path) -> dict[str, Any]:
    """Return the content of a run's acceptance.json.

    Raises:
        UserError: the file is not an acceptance.json.
    """
    try:
        content = read_json(path)
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read: {error}", _HINT) from None
    if not isinstance(content, dict) or "depths" not in content:
        raise UserError(f"{path} is not the acceptance.json of a training run or a quantized export", _HINT)
    return content


_HINT = "set --acceptance_json to acceptance.json in the --output_dir of a training run or a quantized export"


def _write(path: Path, content: dict[str, Any]) -> None:
    atomic_write(path, json.dumps(content, indent=2).encode() + b"\n")
