"""The one place where the name of a model becomes a directory. What is a directory already stays what it is.

Rules look at config.json before anything large moves, so there are two depths: `description_of` has the small files,
`local_model` the weights too.
"""

from pathlib import Path

from swiftlite.errors import UserError
from swiftlite.hub.name import model_name
from swiftlite.hub.snapshot import snapshot

_DESCRIPTION = ("*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken", "*.py", "LICENSE*")
_WEIGHTS = (*_DESCRIPTION, "*.safetensors")


def description_of(name: str) -> Path:
    """A directory with config.json, tokenizer and generation files of a model, perhaps without weights.

    Args:
        name: a directory, `org/name`, `org/name@revision`, or a file that ends in .gguf.

    Returns:
        The path itself where it is no name of the hub and no GGUF file, whether it exists or not.

    Raises:
        UserError: it cannot be had, with what to type next.
    """
    hub_name = model_name(name)
    if hub_name is not None:
        return snapshot(hub_name, _DESCRIPTION)
    if is_gguf(name):
        from swiftlite.hub.gguf import gguf_description

        return gguf_description(Path(name))
    return Path(name)


def local_model(name: str) -> Path:
    """The same directory with the weights.

    Raises:
        UserError: it cannot be had, or has no safetensors.
    """
    hub_name = model_name(name)
    if hub_name is not None:
        directory = snapshot(hub_name, _WEIGHTS, shows_progress=True)
        if not any(directory.glob("*.safetensors")):
            raise UserError(
                f"{hub_name} has no *.safetensors at its top; weights in other formats are not read",
                f"look for a converted copy, such as {hub_name.repository}@refs/pr/1; of a GGUF file there: "
                f"hf download {hub_name.repository} FILE.gguf --local-dir DIR, then --model DIR/FILE.gguf",
            )
        return directory
    if is_gguf(name):
        from swiftlite.hub.gguf import gguf_model

        return gguf_model(Path(name))
    return Path(name)


def is_gguf(name: str) -> bool:
    """Whether this is a GGUF file that is here."""
    return name.endswith(".gguf") and Path(name).is_file()
