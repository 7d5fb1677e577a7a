"""Download files of one commit of a repository into the cache of huggingface_hub."""

from functools import cache
from pathlib import Path
from typing import Any

from swiftlite.hub import commits
from swiftlite.hub.modelscope import modelscope_snapshot
from swiftlite.hub.name import HubName
from swiftlite.hub.refusal import refusals

# transformers reads no subfolders, such as original/ or onnx/; Mistral's consolidated.* duplicate the weights.
_LEFT_OUT = ["*/*", "consolidated*"]


@cache
def snapshot(name: HubName, files: tuple[str, ...], shows_progress: bool = False) -> Path:
    """Return the directory with the given files of a repository; its name is the commit. Missing files are downloaded.

    If the commit is known and cached, no request is sent.

    Args:
        files: patterns of names at the top of the repository.

    Raises:
        UserError: the files are not available.
    """
    if name.is_of_modelscope:
        return modelscope_snapshot(name, files, tuple(_LEFT_OUT))
    from huggingface_hub import snapshot_download

    bar = None
    if not shows_progress:
        bar = _silent_bar()
    with refusals(name):
        directory = snapshot_download(
            name.repository,
            repo_type=name.kind,
            revision=commits.revision_of(name),
            allow_patterns=list(files),
            ignore_patterns=_LEFT_OUT,
            tqdm_class=bar,
        )
    commits.note(name, Path(directory).name)
    return Path(directory)


def _silent_bar() -> Any:
    """Return the class of an invisible progress bar. It is used for small files, which are downloaded quickly."""
    from tqdm.auto import tqdm

    class SilentBar(tqdm):
        def __init__(self, *args: Any, **options: Any):
            super().__init__(*args, **options | {"disable": True})

    return SilentBar
