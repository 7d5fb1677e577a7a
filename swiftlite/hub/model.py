"""Resolve the name of a model to a directory. A directory is returned unchanged.

Rules read config.json before anything large is downloaded. Therefore `description_of` fetches only the small files, and
`local_model` also fetches the weights.
"""

from pathlib import Path

from swiftlite.base.errors import UserError
from swiftlite.hub.name import model_name
from swiftlite.hub.snapshot import snapshot

_DESCRIPTION = ("*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken", "*.py", "LICENSE*")
_WEIGHTS = (*_DESCRIPTION, "*.safetensors")


def description_of(name: str) -> Path:
    """Return a directory with config.json, tokenizer and generation files of a model, possibly without weights.

    Args:
        name: a directory, `org/name`, `org/name@revision`, or a file that ends in .gguf.

    Returns:
        For a name on the hub or a GGUF file, a directory in the cache. Otherwise the given path, which may not exist.

    Raises:
        UserError: the files are not available; the hint says what to type next.
    """
    hub_name = model_name(name)
    if hub_name is not None:
        return snapshot(hub_name, _DESCRIPTION)
    if is_gguf(name):
        from swiftlite.hub.gguf import gguf_description

        return gguf_description(Path(name))
    return Path(name)


def local_model(name: str) -> Path:
    """Return the directory of a model, including its weights; `name` is any name that `description_of` accepts.

    Raises:
        UserError: the model is not available, or has no safetensors.
    """
    hub_name = model_name(name)
    if hub_name is not None:
        directory = snapshot(hub_name, _WEIGHTS, shows_progress=True)
        if not any(directory.glob("*.safetensors")):
            raise UserError(
                f"{hub_name} has no *.safetensors at the top of the repository; other formats are not supported",
                f"use a converted revision, such as {hub_name.repository}@refs/pr/1; for a GGUF file: "
                f"hf download {hub_name.repository} FILE.gguf --local-dir DIR, then --model DIR/FILE.gguf",
            )
        return directory
    if is_gguf(name):
        from swiftlite.hub.gguf import gguf_model

        return gguf_model(Path(name))
    return Path(name)


def is_gguf(name: str) -> bool:
    """Return whether the name is an existing GGUF file."""
    return name.endswith(".gguf") and Path(name).is_file()
