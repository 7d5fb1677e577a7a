"""Files of one commit of a repository, in the hub's own cache."""

from functools import cache
from pathlib import Path
from typing import Any

from swiftlite.hub import commits
from swiftlite.hub.name import HubName
from swiftlite.hub.refusal import refusals

# Of folders, such as original/ or onnx/, transformers reads nothing; Mistral's consolidated.* are the weights again.
_LEFT_OUT = ["*/*", "consolidated*"]


@cache
def snapshot(name: HubName, files: tuple[str, ...], shows_progress: bool = False) -> Path:
    """The directory with these files. It is called as its commit; one whose files are all here is not asked for again.

    Args:
        files: patterns of names at the top of the repository.

    Raises:
        UserError: they cannot be had.
    """
    from huggingface_hub import snapshot_download

    with refusals(name):
        directory = snapshot_download(
            name.repository,
            repo_type=name.kind,
            revision=commits.revision_of(name),
            allow_patterns=list(files),
            ignore_patterns=_LEFT_OUT,
            tqdm_class=None if shows_progress else _silent_bar(),
        )
    commits.note(name, Path(directory).name)
    return Path(directory)


def _silent_bar() -> Any:
    """The class of a progress bar for small files, which are here before a bar could be read."""
    from tqdm.auto import tqdm

    class SilentBar(tqdm):
        def __init__(self, *args: Any, **options: Any):
            super().__init__(*args, **options | {"disable": True})

    return SilentBar
