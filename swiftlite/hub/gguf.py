"""GGUF files, de-quantised once by transformers into Hugging Face directories, which are kept beside the hub's cache.

A directory is found by the content of the file and the release of transformers that wrote it; it is whole or absent.
"""

import hashlib
import importlib.util
import shutil
from collections.abc import Callable
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any, cast

from filelock import FileLock

from swiftlite.durable import flush_to_disk, sync
from swiftlite.errors import UserError, reason_of
from swiftlite.log import logger

PACKAGES = ("gguf", "accelerate")
"""That transformers reads GGUF files with."""


def gguf_description(file: Path) -> Path:
    """The directory that `gguf_model` has made, or one with config.json and tokenizer alone.

    Raises:
        UserError: transformers cannot read the file.
    """
    whole = _directory(file)
    if whole.is_dir():
        return whole
    directory = whole.parent / "descriptions" / whole.name
    return directory if directory.is_dir() else _make(file, directory, _write_description)


def gguf_model(file: Path) -> Path:
    """A Hugging Face directory of the model, its weights in float32 as transformers makes them.

    Raises:
        UserError: transformers cannot read the file, or the directory cannot be written.
    """
    directory = _directory(file)
    if directory.is_dir():
        return directory
    logger.info("%s is de-quantised, once, to 4 bytes a parameter in %s", file, directory)
    return _make(file, directory, _write_model)


def _directory(file: Path) -> Path:
    from huggingface_hub import constants

    status = file.stat()
    digest = _digest(file.resolve(), status.st_size, status.st_mtime_ns)
    name = f"{digest[:32]}-transformers-{version('transformers')}"
    return Path(constants.HF_HOME) / "swiftlite" / "gguf" / name


@cache
def _digest(file: Path, size: int, modified: int) -> str:
    """SHA-256 of a file; its size and time are there so that a file that changes is read again."""
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def _make(file: Path, directory: Path, write: Callable[[Path, Path], None]) -> Path:
    """Let `write` fill a directory beside its place, then give it its name; other processes wait and take the same."""
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise UserError(f"{file} cannot be read without {' and '.join(missing)}", f"pip install {' '.join(missing)}")
    writing = directory.with_name(f".{directory.name}.writing")
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(writing.with_suffix(".lock")):
            if not directory.is_dir():
                _write_whole(file, directory, writing, write)
    except OSError as error:  # of writing; what reading raises is a UserError already
        raise UserError(
            f"{file} cannot be de-quantised into {directory.parent}: {reason_of(error)}",
            "make room, or export HF_HOME=DIR on another disk",
        ) from None
    return directory


def _write_whole(file: Path, directory: Path, writing: Path, write: Callable[[Path, Path], None]) -> None:
    """Fill `writing`, and rename it to `directory` once it is whole."""
    shutil.rmtree(writing, ignore_errors=True)  # of a process that was killed
    try:
        writing.mkdir()
        write(file, writing)
        flush_to_disk(writing)
        writing.rename(directory)
        sync(directory.parent)
    finally:
        shutil.rmtree(writing, ignore_errors=True)


def _write_description(file: Path, directory: Path) -> None:
    from transformers import AutoConfig, AutoTokenizer, GenerationConfig

    named = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    try:
        config = AutoConfig.from_pretrained(**named)
        tokenizer = AutoTokenizer.from_pretrained(**named)
    except Exception as error:  # a parser of untrusted bytes raises anything
        raise _unreadable(file, error) from None
    config.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    GenerationConfig.from_model_config(config).save_pretrained(directory)


def _write_model(file: Path, directory: Path) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    shutil.copytree(gguf_description(file), directory, dirs_exist_ok=True)
    try:
        read = AutoModelForCausalLM.from_pretrained(
            str(file.parent), gguf_file=file.name, dtype=torch.float32, local_files_only=True, output_loading_info=True
        )
    except Exception as error:
        raise _unreadable(file, error) from None
    loaded, report = cast(tuple[Any, dict[str, Any]], read)
    if missing := sorted(report["missing_keys"]):  # transformers has drawn them at random
        raise UserError(f"{file} lacks {len(missing)} tensors, such as {missing[0]}", "copy it from its source again")
    # transformers does not save a model that it has read from GGUF; it does save another one with the same parameters.
    with torch.device("meta"):
        plain = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(directory), dtype=torch.float32)
    plain.load_state_dict(loaded.state_dict(), assign=True)
    plain.tie_weights()
    plain.save_pretrained(directory)


def _unreadable(file: Path, error: Exception) -> UserError:
    return UserError(
        f"--model {file} cannot be read by transformers {version('transformers')}: {reason_of(error)}",
        "if it was cut short or damaged, copy it from its source again; or take the model's safetensors: --model "
        "ORG/NAME or a directory",
    )
