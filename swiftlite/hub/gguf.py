"""Convert GGUF files to Hugging Face directories. Each file is converted once.

Files of swiftlite and files with MTP heads are converted by `gguf/read.py`, and all others by transformers, which does
not read heads.

The directories are stored next to the hub's cache. A directory's name contains the SHA-256 of the file and the version
of transformers. Directories are created atomically.
"""

import hashlib
import importlib.util
import json
import shutil
from collections.abc import Callable
from functools import cache
from importlib.metadata import version
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, cast

from filelock import FileLock

from swiftlite.base.atomic import fsync_tree, sync
from swiftlite.base.errors import UserError, reason_of
from swiftlite.base.json_file import read_json
from swiftlite.base.log import logger

READER = "swiftlite.gguf.read:GgufFile"
"""Class that reads files with heads. It is imported when a file is read, because it requires torch."""
KEYS_OF = "swiftlite.gguf.read:keys_of"
"""Function that returns the keys of a file's metadata."""
READ_OTHERWISE = "swiftlite.gguf.read:read_otherwise"
"""Function that returns what transformers does not read from a file."""
FORMAT = 3
"""Number of the conversion, part of the name of a directory."""
_KEYS = ("swiftlite.config", ".nextn_predict_layers", ".target_layers")
"""Ends of keys of metadata of the files that `READER` reads: those of swiftlite, those with MTP heads, and those of
drafters, which it refuses."""
PACKAGES = ("gguf", "accelerate")
"""Packages that transformers requires to read GGUF files."""


def gguf_description(file: Path) -> Path:
    """Return the directory of `gguf_model` if it exists.

    Otherwise return a directory with only config files and tokenizer.

    Raises:
        UserError: transformers cannot read the file.
    """
    whole = _directory(file)
    if whole.is_dir():
        return whole
    directory = whole.parent / "descriptions" / whole.name
    if directory.is_dir():
        return directory
    return _make(file, directory, _write_description)


def gguf_model(file: Path) -> Path:
    """Return a Hugging Face directory of the model. Weights of files that swiftlite did not write are float32.

    Raises:
        UserError: transformers cannot read the file, or the directory cannot be written.
    """
    directory = _directory(file)
    if directory.is_dir():
        return directory
    logger.info("converting %s to safetensors in %s (only once)", file, directory)
    return _make(file, directory, _write_model)


def _directory(file: Path) -> Path:
    from huggingface_hub import constants

    status = file.stat()
    digest = _digest(file.resolve(), status.st_size, status.st_mtime_ns)
    name = f"{digest[:32]}-{FORMAT}-transformers-{version('transformers')}"
    return Path(constants.HF_HOME) / "swiftlite" / "gguf" / name


@cache
def _digest(file: Path, size: int, modified: int) -> str:
    """Return the SHA-256 of a file.

    The result is cached by size and modification time, so a changed file is read again.
    """
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def _make(file: Path, directory: Path, write: Callable[[Path, Path], None]) -> Path:
    """Call `write` with a temporary directory, then rename the directory. Other processes wait, and use the result."""
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise UserError(f"{file} requires {' and '.join(missing)}", f"pip install {' '.join(missing)}")
    writing = directory.with_name(f".{directory.name}.writing")
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(writing.with_suffix(".lock")):
            if not directory.is_dir():
                _write_whole(file, directory, writing, write)
    except OSError as error:  # an error of writing, because reading raises UserErrors
        raise UserError(
            f"{file} cannot be de-quantized to {directory.parent}: {reason_of(error)}",
            "free disk space, or export HF_HOME=DIR on another disk",
        ) from None
    return directory


def _write_whole(file: Path, directory: Path, writing: Path, write: Callable[[Path, Path], None]) -> None:
    """Fill `writing`, and rename it to `directory` when it is complete."""
    shutil.rmtree(writing, ignore_errors=True)  # files of a killed process
    try:
        writing.mkdir()
        write(file, writing)
        fsync_tree(writing)
        writing.rename(directory)
        sync(directory.parent)
    finally:
        shutil.rmtree(writing, ignore_errors=True)


def _has_heads(file: Path) -> bool:
    """Return whether a file is read by `READER`.

    Raises:
        UserError: the file cannot be read.
    """
    return any(key.endswith(_KEYS) for key in resolve_name(KEYS_OF)(file))


def _write_description(file: Path, directory: Path) -> None:
    if _has_heads(file):
        resolve_name(READER)(file).write_small_files(directory)
        return
    from transformers import AutoConfig, AutoTokenizer, GenerationConfig

    named = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    try:
        config = AutoConfig.from_pretrained(**named)
        tokenizer = AutoTokenizer.from_pretrained(**named)
    except Exception as error:  # a parser of untrusted bytes can raise any exception
        raise _unreadable(file, error) from None
    values, pre_tokenizer = resolve_name(READ_OTHERWISE)(file)
    _correct(config, values)
    config.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    if pre_tokenizer is not None:
        _change(directory / "tokenizer.json", pre_tokenizer=pre_tokenizer)
        if _pieces_differ(directory):
            # Classes of one model, such as Qwen2Tokenizer, replace the pre-tokenizer of tokenizer.json by their own.
            _change(directory / "tokenizer_config.json", tokenizer_class="PreTrainedTokenizerFast")
        if _pieces_differ(directory):
            logger.warning(
                "%s: transformers divides text as the published models of %s do, and not by the file's "
                "tokenizer.ggml.pre; use the model's safetensors",
                file,
                config.model_type,
            )
    GenerationConfig.from_model_config(config).save_pretrained(directory)


def _pieces_differ(directory: Path) -> bool:
    """Return whether transformers divides text otherwise than by tokenizer.json. For model_type qwen2, it ignores the
    class in tokenizer_config.json (MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS in transformers 5.19).
    """
    from tokenizers import Tokenizer
    from transformers import AutoTokenizer

    loaded: Any = AutoTokenizer.from_pretrained(directory)
    of_file: Any = Tokenizer.from_file(str(directory / "tokenizer.json"))
    text = "It's 1234 words,  don't\n\n中文 ABCdef?!"
    pieces, wanted = (each.pre_tokenizer.pre_tokenize_str(text) for each in (loaded.backend_tokenizer, of_file))
    return pieces != wanted


def _change(file: Path, **values: Any) -> None:
    """Change values of a JSON file."""
    content = read_json(file) | values
    file.write_text(json.dumps(content, ensure_ascii=False, indent=2), encoding="utf-8")


def _correct(config: Any, values: dict[str, Any]) -> None:
    """Set values of a config that transformers did not read from a file."""
    size = values.get("head_dim")
    if size and size != getattr(config, "head_dim", config.hidden_size // config.num_attention_heads):
        config.head_dim = size
    rope = values.get("rope_parameters")
    if rope is None:
        return
    # If windows have parameters of their own, llama.cpp scales only the positions of full attention.
    own = config.rope_parameters.get("full_attention", config.rope_parameters)
    if own.get("rope_type", "default") == "default":  # transformers reads those of gpt-oss
        own.update(rope)


def _write_model(file: Path, directory: Path) -> None:
    shutil.copytree(gguf_description(file), directory, dirs_exist_ok=True)
    if _has_heads(file):
        resolve_name(READER)(file).write_weights(directory)
        return
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(directory)  # otherwise transformers reads all metadata again
    try:
        read = AutoModelForCausalLM.from_pretrained(
            str(file.parent),
            config=config,
            gguf_file=file.name,
            dtype=torch.float32,
            local_files_only=True,
            output_loading_info=True,
        )
    except Exception as error:
        raise _unreadable(file, error) from None
    loaded, report = cast(tuple[Any, dict[str, Any]], read)
    if missing := sorted(report["missing_keys"]):  # transformers initialized them randomly
        raise UserError(f"{file} lacks {len(missing)} tensors, such as {missing[0]}", "download it again")
    # transformers cannot save a model that was read from GGUF, but it can save a new one with the same parameters.
    with torch.device("meta"):
        plain = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(directory), dtype=torch.float32)
    try:
        plain.load_state_dict(loaded.state_dict(), assign=True)
    except RuntimeError as error:  # transformers does not compare the shapes
        raise _unreadable(file, error) from None
    plain.tie_weights()
    plain.save_pretrained(directory)


def _unreadable(file: Path, error: Exception) -> UserError:
    return UserError(
        f"{file} cannot be read by transformers {version('transformers')}: {reason_of(error)}",
        "download it again if it is incomplete, or use the model's safetensors: --model ORG/NAME or a directory",
    )
