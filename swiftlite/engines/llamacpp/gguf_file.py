"""Convert models to GGUF files for llama.cpp, each once, in the cache."""

import hashlib
import json
from pathlib import Path

from filelock import FileLock
from huggingface_hub import constants

from swiftlite.base.errors import UserError, reason_of
from swiftlite.base.log import logger
from swiftlite.families.resolved import HfModel
from swiftlite.gguf.types import GgufType
from swiftlite.gguf.write import write_gguf
from swiftlite.hub.model import is_gguf

FORMAT = 2
"""Number of the layout of written files, part of the name of a cached file."""
TYPES: dict[str, GgufType] = {"float32": "f32", "bfloat16": "bf16"}


def gguf_of(model: HfModel, torch_dtype: str) -> Path:
    """Return a GGUF file of a model: the file that the user gave, or a file in the cache.

    Args:
        torch_dtype: dtype of the matrices, unless the user gave a GGUF file.

    Raises:
        UserError: llama.cpp does not support the model, or the file cannot be written.
    """
    if is_gguf(model.name):
        return Path(model.name)
    gguf_type = TYPES[torch_dtype]
    file = Path(constants.HF_HOME) / "swiftlite" / "gguf-written" / f"{_identity(model)}-{gguf_type}.gguf"
    writing = file.with_name(f".{file.name}.writing")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(writing.with_suffix(".lock")):
            if not file.is_file():
                logger.info("converting %s to %s (only once)", model.directory, file)
                try:
                    write_gguf(model, writing, gguf_type)
                    writing.rename(file)
                finally:
                    writing.unlink(missing_ok=True)
    except OSError as error:
        raise UserError(
            f"{model.directory} cannot be converted to {file}: {reason_of(error)}",
            "free disk space, or export HF_HOME=DIR on another disk",
        ) from None
    return file


def _identity(model: HfModel) -> str:
    """Return a digest of the names, sizes and modification times of a model's files."""
    files = []
    for path in sorted(model.directory.iterdir()):
        if path.suffix in (".json", ".safetensors", ".jinja"):
            status = path.stat()
            files.append((path.name, status.st_size, status.st_mtime_ns))
    content = json.dumps([FORMAT, str(model.directory.resolve()), files])
    return hashlib.sha256(content.encode()).hexdigest()[:32]
