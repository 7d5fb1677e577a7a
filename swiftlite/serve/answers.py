"""Write the file of `infer --result_path`. Each answer is appended when it is complete.

Running the same command again generates only missing answers. `regenerate` also stores its answers in such a file.
During a run, lines are in the order in which answers are completed; at its end, they are sorted in the order of the
prompts. A second file, NAME.args.json, records the settings of the answers.
"""

import fcntl
import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Self, TypeVar

from pydantic import TypeAdapter, ValidationError

from swiftlite.args.commands import GenerationCommand
from swiftlite.base.atomic import atomic_write
from swiftlite.base.errors import UserError
from swiftlite.base.json_file import parse_json, read_json
from swiftlite.base.log import logger
from swiftlite.base.redact import redact
from swiftlite.data.rows.conversation import Conversation
from swiftlite.engines.engine import Sampling
from swiftlite.engines.prompts import ImagePrompt
from swiftlite.families.resolved import HfModel
from swiftlite.hub.digest import digest_of_model

Record = TypeVar("Record")

# Options that do not change an answer. Paths do not count, because the content of models and datasets is compared.
NOT_OF_ANSWERS = {
    "model",
    "adapters",
    "val_dataset",
    "result_path",
    "compare",
    "acceptance_json",
    "max_batch_size",
    "trust_remote_code",
    # of regenerate
    "dataset",
    "topics",
    "openings",
    "output_dir",
    "gold_fraction",
    "drop_truncated",
    "max_bad_rows",
}


class AnswersFile:
    """The file with the answers of one run, or of several runs with the same prompts and options.

    Args:
        sources: `file:line` of every prompt; an answer is stored with the source of its prompt. May contain duplicates.
        made_with: settings of the answers, as returned by `describe`.
        option: name of the option that specifies the file or its directory, for error messages.

    Attributes:
        missing: indices of the prompts without an answer when the file was opened.
        num_answers: number of answers in the file.

    Raises:
        UserError: the file cannot be written, another process writes it, or it contains answers to other prompts or
            options.
    """

    def __init__(self, path: Path, sources: Sequence[str], made_with: dict[str, Any], option: str = "--result_path"):
        self.path = path
        self._option = option
        self._sources = list(sources)
        self._args_path = path.with_name(f"{path.name}.args.json")
        if path.exists() and not path.is_file():
            raise UserError(f"{option} {path} is not a regular file", f"use another {option}")
        try:
            self._file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise self._unwritable(error) from None
        try:
            self._lock()
            self._check_made_with(made_with)
            lines = self._whole_lines()
            self.missing = sorted(set(range(len(sources))) - set(self._places(lines)))
        except UserError:
            self.close()
            raise
        self.num_answers = len(lines)
        self._size = sum(map(len, lines))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Release the lock on the file."""
        os.close(self._file)

    def add(self, place: int, record: dict[str, Any]) -> None:
        """Append an answer as one complete line.

        Args:
            place: index of the prompt.

        Raises:
            UserError: the line cannot be written; the file is unchanged.
        """
        line = as_line(record)
        try:
            if os.write(self._file, line) < len(line):
                raise OSError("the line was written only in part")
        except OSError as error:
            os.ftruncate(self._file, self._size)
            raise self._unwritable(error) from None
        self._size += len(line)
        self.num_answers += 1

    def records(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yield the answers in the file, each with the index of its prompt."""
        lines = self._whole_lines()
        for place, line in zip(self._places(lines), lines, strict=True):
            yield place, parse_json(line.decode())

    def typed_records(self, kind: type[Record]) -> Iterator[tuple[int, Record]]:
        """Yield `records` as instances of a dataclass.

        Raises:
            UserError: a line has an invalid or missing field.
        """
        form = TypeAdapter(kind)
        for place, record in self.records():
            try:
                yield place, form.validate_python(record)
            except ValidationError as error:
                field = error.errors()[0]["loc"][0]
                problem = f"{self.path}: {record['source']} has an invalid or missing {field}"
                raise UserError(problem, "delete the line and run the same command again") from None

    def finish(self) -> None:
        """Sort the lines in the order of the prompts; the file is replaced atomically."""
        lines = self._whole_lines()
        places = self._places(lines)
        if places == sorted(places):
            return
        in_order = [line for _, line in sorted(zip(places, lines, strict=True))]
        try:
            atomic_write(self.path.resolve(), b"".join(in_order))  # keeps a link
        except OSError as error:  # a warning, because the file has all answers
            logger.warning("%s is not sorted in the order of the prompts: %s", self.path, error.strerror)

    def __str__(self) -> str:
        # A signal can arrive between writing a line and counting it.
        return f"{len(self._whole_lines())} of {len(self._sources)} answers are in {self.path}"

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            hint = f"wait for it, or use another {self._option}"
            raise UserError(f"{self._option} {self.path}: another process is writing it", hint) from None
        except OSError:  # the file system has no locks
            pass

    def _check_made_with(self, made_with: dict[str, Any]) -> None:
        if os.fstat(self._file).st_size == 0:
            try:
                atomic_write(self._args_path, json.dumps(made_with, indent=2).encode() + b"\n")
            except OSError as error:
                self.path.unlink(missing_ok=True)
                raise self._unwritable(error) from None
            return
        hint = f"use another {self._option}, or delete it to start again"
        try:
            before = read_json(self._args_path)
            changed = describe_changes(before, made_with)
        except (OSError, ValueError, TypeError, AttributeError, KeyError):
            raise UserError(
                f"{self._option} {self.path} is not empty, but its settings in {self._args_path} cannot be read",
                hint,
            ) from None
        if changed:
            lines = "\n  ".join(changed)
            raise UserError(
                f"{self._option} {self.path} has answers with other settings:\n  {lines}",
                f"use the same options to resume, or {hint}",
            )

    def _whole_lines(self) -> list[bytes]:
        """Return all complete lines. If a killed process left an incomplete last line, it is removed from the file."""
        content = self.path.read_bytes()
        whole = content[: content.rfind(b"\n") + 1]
        if len(whole) < len(content):
            logger.info("%s: removing an incomplete line at the end", self.path)
            os.ftruncate(self._file, len(whole))
        return whole.splitlines(keepends=True)

    def _places(self, lines: Sequence[bytes]) -> list[int]:
        """Return the index of each line's prompt."""
        waiting: dict[str, list[int]] = {}
        for place in reversed(range(len(self._sources))):
            waiting.setdefault(self._sources[place], []).append(place)
        places = []
        for number, line in enumerate(lines, start=1):
            try:
                places.append(waiting[parse_json(line.decode())["source"]].pop())
            except (ValueError, TypeError, KeyError, IndexError):
                raise UserError(
                    f"{self.path}:{number} is not an answer to one of the prompts, or a duplicate",
                    f"delete the line, or use another {self._option}",
                ) from None
        return places

    def _unwritable(self, error: OSError) -> UserError:
        return UserError(
            f"{self._option} {self.path} cannot be written: {error.strerror or error}",
            "fix this and run the same command again to resume, or use another path",
        )


def as_line(record: dict[str, Any]) -> bytes:
    """Return a record as a line of UTF-8, or of ASCII with escapes if it contains a lone surrogate."""
    try:
        return json.dumps(record, ensure_ascii=False).encode() + b"\n"
    except UnicodeEncodeError:
        return json.dumps(record).encode() + b"\n"


def describe(
    args: GenerationCommand,
    model: HfModel,
    asked: Sequence[Conversation],
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
) -> dict[str, Any]:
    """Return the settings that determine the answers, as JSON: options, and digests of the prompts and of the model."""
    options = {name: value for name, value in asdict(args).items() if name not in NOT_OF_ANSWERS}
    described = []
    for chat, prompt in zip(asked, prompts, strict=True):
        described.append([chat.source, list(prompt)])
        if isinstance(prompt, ImagePrompt):
            described[-1].append(prompt.identity.hex())
    return {
        "options": redact(options),
        "prompts": hashlib.sha256(json.dumps(described).encode()).hexdigest(),
        "stop_token_ids": list(sampling.stop_token_ids),
        "model": digest_of_model(model.directory),
    }


def describe_changes(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Return the differences between two results of `describe`, as texts that name options."""
    old, new = before["options"], now["options"]
    changed = []
    for name in sorted(old.keys() | new.keys()):
        if old.get(name) != new.get(name):
            changed.append(f"--{name} changed from {_shown(old.get(name))} to {_shown(new.get(name))}")
    if before["prompts"] != now["prompts"]:
        changed.append("the prompts changed: their files, topics or openings, file names, or the chat template")
    if (before["model"], before["stop_token_ids"]) != (now["model"], now["stop_token_ids"]):
        changed.append("the files of --model changed")
    return changed


def _shown(value: Any) -> str:
    if value is None:
        return "unset"
    return json.dumps(value)
