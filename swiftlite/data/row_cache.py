"""Store encoded rows in files (`--dataset_cache`), which all ranks of a machine map into their memory.

    DIRECTORY/KEY/00000.safetensors, 00001.safetensors, ...    the parts of one data file
    DIRECTORY/KEY/complete.json                                written last; the number of parts

The key is the sha256 of everything that the result depends on: the rows, the options, the tokenizer with its template,
and the code. A part is written atomically, so a killed run continues after its last part, and runs that encode the same
rows at the same time write the same files. Files are not trusted: they contain numbers and JSON, and every part is
checked against its sha256.
"""

import hashlib
import inspect
import json
import os
import socket
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields, is_dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save
from transformers import PreTrainedTokenizerBase

import swiftlite.data
from swiftlite.base.atomic import atomic_write, check_writable, delete_incomplete
from swiftlite.base.errors import UserError
from swiftlite.base.json_file import parse_json, read_json
from swiftlite.base.log import logger
from swiftlite.data.encoded_rows import COLUMNS, Part, PartFacts, encode_file
from swiftlite.data.encoder import Encoder, EncoderPool
from swiftlite.data.image_inputs import ImageEncoder
from swiftlite.data.rows.hub_rows import HubRows, commit_of_dataset
from swiftlite.data.rows.sources import DataFile
from swiftlite.data.template import ChatTemplate

FLAG = "--dataset_cache"
COMPLETE = "complete.json"
FACTS = "facts"
"""Name of the array with the `PartFacts` as JSON."""
_DTYPES = {np.int32: "I32", np.int64: "I64", np.float32: "F32", np.uint8: "U8"}
PACKAGES = ("swiftlite", "transformers", "tokenizers", "jinja2")
"""Packages whose versions can change the tokens of a row."""

Result = TypeVar("Result")


def call(function: Callable[[], Result]) -> Result:
    """Call the function, for a process without other ranks."""
    return function()


@dataclass(frozen=True)
class RowCache:
    """A directory with encoded rows.

    Attributes:
        directory: the directory, which is created if it does not exist.
        once: a function that calls its argument on one process of the machine, and returns the result on all of them.
        name: the directory in errors, with the flag that sets it.
    """

    directory: Path
    once: Callable[[Callable[[], Any]], Any] = call
    name: str = FLAG

    def open(self, file: DataFile | HubRows, pool: EncoderPool, *, system: str | None, seed: int) -> list[Part] | None:
        """Return the rows of a file, mapped into memory. One process of the machine encodes what is missing.

        Returns:
            None if the rows cannot be stored, because they have images or other extras.

        Raises:
            UserError: the file is invalid, or the directory cannot be written or read.
        """
        found = self.once(lambda: self._fill(file, pool, system, seed))
        if found is None:
            return None
        key, num_parts = found
        parts = []
        for number in range(num_parts):
            part = _read_part(self.directory / key, number, verify=False)  # `_fill` has verified it
            if part is None:
                problem = f"{self.name} {self.directory}: the rows of {file.name} cannot be read on all ranks"
                raise UserError(problem, "use a directory that all processes of a machine can read")
            parts.append(part)
        return parts

    def _fill(
        self, file: DataFile | HubRows, pool: EncoderPool, system: str | None, seed: int
    ) -> tuple[str, int] | None:
        """Write the parts that are missing. Return the key and the number of parts; None if rows cannot be stored."""
        try:
            key = _key(file, pool.encoder, system, seed)
        except TypeError as error:  # an encoder of another package
            logger.warning("%s: %s, so every rank tokenizes %s", self.name, error, file.name)
            return None
        directory = self.directory / key
        num_parts, num_rows = 0, 0
        while part := _read_part(directory, num_parts, verify=True):
            num_parts += 1
            num_rows += part.facts.num_rows
        if num_parts and _num_complete(directory) == num_parts:
            logger.info("%s: %d rows, already tokenized in %s", file.name, num_rows, directory)
            return key, num_parts
        if num_parts:
            logger.info("%s: %d rows are already tokenized in %s", file.name, num_rows, directory)
        if self.directory.exists() and not self.directory.is_dir():
            raise UserError(f"{self.name} {self.directory} is a file", "use a directory, or a name that does not exist")
        check_writable(self.name, directory)
        delete_incomplete(directory)
        try:
            for part in encode_file(file, pool, system=system, seed=seed, first=num_rows, to_store=True):
                if not part.can_be_stored:
                    return None
                _write(directory, f"{num_parts:05}.safetensors", _pack(key, num_parts, part))
                num_parts += 1
            _write(directory, COMPLETE, json.dumps({"num_parts": num_parts}).encode())
        except OSError as error:
            if error.filename is None or not Path(error.filename).is_relative_to(directory):
                raise
            hint = f"free disk space, or use {FLAG} with a directory on another disk"
            raise UserError(f"{self.name} {directory} cannot be written: {error.strerror}", hint) from None
        return key, num_parts


def _write(directory: Path, name: str, content: bytes) -> None:
    atomic_write(directory / name, content, f"-{socket.gethostname()}-{os.getpid()}")


def _num_complete(directory: Path) -> int | None:
    try:
        return read_json(directory / COMPLETE)["num_parts"]
    except (OSError, ValueError, TypeError, KeyError):
        return None


# Parts in files


def _pack(key: str, number: int, part: Part) -> bytes:
    """Return the content of the file of a part."""
    facts = json.dumps(asdict(part.facts)).encode()
    arrays = {**part.columns, FACTS: np.frombuffer(facts, np.uint8)}
    return save(arrays, {"sha256": _sha256_of(key, number, arrays)})


def _read_part(directory: Path, number: int, *, verify: bool) -> Part | None:
    """Map a part into memory; only arrays with one entry per token stay in the file.

    Args:
        verify: whether to compare the content with its sha256.

    Returns:
        None if the file is missing or damaged. Damage is logged.

    Raises:
        UserError: this user must not read the file.
    """
    path = directory / f"{number:05}.safetensors"
    try:
        content = np.memmap(path, np.uint8, "r")  # first: safetensors calls a file missing if it must not be read
        with safe_open(path, "np") as file:  # checks that names, sizes and places of the arrays are consistent
            sha256 = (file.metadata() or {}).get("sha256")
        arrays = _arrays_of(content)
        facts = PartFacts(**parse_json(arrays[FACTS].tobytes().decode()))
        part = Part({name: arrays[name] for name in COLUMNS}, facts)
        if not part.is_consistent() or (verify and sha256 != _sha256_of(directory.name, number, arrays)):
            raise ValueError("its content does not match its sha256")
        return part
    except FileNotFoundError:
        return None
    except PermissionError as error:  # the part of another user may be complete, so it is not replaced
        raise UserError(f"{path} cannot be read: {error.strerror}", f"use {FLAG} with another directory") from None
    except (OSError, SafetensorError, ValueError, TypeError, KeyError) as error:
        logger.warning("%s is damaged, so its rows are tokenized again: %s", path, error)
        return None


def _arrays_of(content: np.ndarray) -> dict[str, np.ndarray]:
    """Return the arrays of a safetensors file.

    Raises:
        ValueError: an array has another dtype than expected.
        KeyError: an array is missing.
    """
    length = int.from_bytes(content[:8].tobytes(), "little")
    header = parse_json(content[8 : 8 + length].tobytes().decode())
    arrays = {}
    for name, dtype in {**COLUMNS, FACTS: np.uint8}.items():
        first, end = header[name]["data_offsets"]
        if header[name]["dtype"] != _DTYPES[dtype]:
            raise ValueError(f"{name} has another dtype")
        arrays[name] = content[8 + length + first : 8 + length + end].view(dtype)
    return arrays


def _sha256_of(key: str, number: int, arrays: Mapping[str, np.ndarray]) -> str:
    sha = hashlib.sha256(f"{key} {number}".encode())  # so that files cannot be exchanged
    for name in sorted(arrays):
        sha.update(f" {name} {len(arrays[name])} ".encode())
        sha.update(np.ascontiguousarray(arrays[name]).data)
    return sha.hexdigest()


# Keys


def _key(file: DataFile | HubRows, encoder: Encoder, system: str | None, seed: int) -> str:
    """Return the name of the directory for the rows of a file.

    Raises:
        TypeError: the encoder has values that cannot be compared between runs.
    """
    if isinstance(file, HubRows):
        rows = str(file.dataset.at(commit_of_dataset(file.dataset)))
    else:
        with file.path.open("rb") as opened:
            rows = hashlib.file_digest(opened, "sha256").hexdigest()
    facts = {
        "rows": rows,
        "name": file.name,  # messages of bad rows can contain it
        "sample": file.sample and [file.sample, seed],
        "system": system,
        "encoder": _identity_of(encoder),
        "code": _code_of(encoder),
        "versions": [version(package) for package in PACKAGES],
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:32]


def _code_of(encoder: Encoder) -> str:
    """Return the sha256 of the code that encodes rows, so that no other version of it reads the result."""
    files = sorted(Path(swiftlite.data.__path__[0]).rglob("*.py"))
    if name := inspect.getsourcefile(type(encoder)):
        files.append(Path(name))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def _identity_of(value: Any) -> Any:
    """Return JSON that is equal for values with which rows are encoded equally.

    Raises:
        TypeError: the value has an unknown type.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, ImageEncoder):  # rows with images are not stored
        return "images"
    if isinstance(value, PreTrainedTokenizerBase):
        return _identity_of_tokenizer(value)
    if isinstance(value, ChatTemplate):
        return ["ChatTemplate", *map(_identity_of, value.settings)]
    if isinstance(value, partial):
        return [_identity_of(value.func), _identity_of(value.args), _identity_of(value.keywords)]
    if is_dataclass(value) and not isinstance(value, type):
        own = {each.name: _identity_of(getattr(value, each.name)) for each in fields(value)}
        return [_identity_of(type(value)), own]
    if isinstance(value, list | tuple):
        return list(map(_identity_of, value))
    if isinstance(value, dict):
        return [[_identity_of(name), _identity_of(each)] for name, each in value.items()]
    if inspect.isfunction(value) or isinstance(value, type):
        return f"{value.__module__}.{value.__qualname__}"
    raise TypeError(f"{type(value).__name__} cannot be compared between runs")


def _identity_of_tokenizer(tokenizer: PreTrainedTokenizerBase) -> Any:
    """Return the class of a tokenizer, the sha256 of its files, and the sha256 of its code if the model brings it."""
    cls = type(tokenizer)
    found = [f"{cls.__module__}.{cls.__qualname__}"]
    if not cls.__module__.startswith("transformers."):
        found.append(hashlib.sha256(Path(sys.modules[cls.__module__].__file__ or "").read_bytes()).hexdigest())
    with tempfile.TemporaryDirectory() as directory:
        tokenizer.save_pretrained(directory)
        for path in sorted(Path(directory).rglob("*")):
            if path.is_file():
                found.append(f"{path.name} {hashlib.sha256(path.read_bytes()).hexdigest()}")
    return found
