"""Convert models to GGUF files for llama.cpp, each once, in the cache."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock
from huggingface_hub import constants

from swiftlite.base.errors import UserError, reason_of
from swiftlite.base.log import logger
from swiftlite.bridge.hf_config import DRAFT_FOLDER
from swiftlite.families.resolved import HfModel
from swiftlite.gguf.types import GgufType
from swiftlite.gguf.write import draft_file_of, has_draft_file, write_draft_gguf, write_gguf
from swiftlite.hub.model import is_gguf

FORMAT = 2
"""Number of the layout of written files, part of the name of a cached file."""
TYPES: dict[str, GgufType] = {"float32": "f32", "bfloat16": "bf16"}


def gguf_options(model: HfModel, torch_dtype: str, *, drafts: bool) -> dict[str, str]:
    """Return the options of llama-server that name the GGUF files of a model: the file that the user gave, or files in
    the cache.

    Args:
        torch_dtype: dtype of the matrices, unless the user gave a GGUF file.
        drafts: whether the heads or the drafter draft; otherwise a drafter's own file is left out.

    Raises:
        UserError: llama.cpp does not support the model, or a file cannot be written.
    """
    if is_gguf(model.name):  # its config.json declares no drafter with a file of its own
        if (draft := draft_file_of(Path(model.name))).is_file():
            logger.warning("%s is not used; to draft with it, give the exported Hugging Face model as --model", draft)
        return {"model": model.name}
    gguf_type = TYPES[torch_dtype]
    file = Path(constants.HF_HOME) / "swiftlite" / "gguf-written" / f"{_identity(model)}-{gguf_type}.gguf"
    _write_once(model, file, gguf_type, write_gguf)
    options = {"model": str(file)}
    if drafts and has_draft_file(model):
        draft = draft_file_of(file)
        _write_once(model, draft, gguf_type, write_draft_gguf)
        options["model_draft"] = str(draft)
    return options


def _write_once(
    model: HfModel, file: Path, gguf_type: GgufType, write: Callable[[HfModel, Path, GgufType], None]
) -> None:
    """Write a file in the cache, unless it exists."""
    writing = file.with_name(f".{file.name}.writing")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        # Several servers of `bench` or of a batch job can start with the same model at once.
        with FileLock(writing.with_suffix(".lock")):
            if not file.is_file():
                logger.info("converting %s to %s (only once)", model.directory, file)
                try:
                    write(model, writing, gguf_type)
                    # A file has its name only when it is complete, so another process never serves a part.
                    writing.rename(file)
                finally:
                    writing.unlink(missing_ok=True)
    except OSError as error:
        raise UserError(
            f"{model.directory} cannot be converted to {file}: {reason_of(error)}",
            "free disk space, or export HF_HOME=DIR on another disk",
        ) from None


def _identity(model: HfModel) -> str:
    """Return a digest of the names, sizes and modification times of a model's files, also of those of its drafter."""
    files = []
    for path in sorted([*model.directory.iterdir(), *(model.directory / DRAFT_FOLDER).glob("*")]):
        if path.suffix in (".json", ".safetensors", ".jinja"):
            # Not the content, because hashing a large model takes about as long as loading it.
            status, name = path.stat(), str(path.relative_to(model.directory))
            files.append((name, status.st_size, status.st_mtime_ns))
    content = json.dumps([FORMAT, str(model.directory.resolve()), files])
    return hashlib.sha256(content.encode()).hexdigest()[:32]
