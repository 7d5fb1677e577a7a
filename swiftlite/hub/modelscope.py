"""Download repositories of ModelScope with its package `modelscope`, which is optional.

A revision is a branch or tag, by default `master`. ModelScope's cache has one directory for a revision, so a branch is
not a commit: the first process of a command brings the directory up to date, and its subprocesses, which inherit the
name among the known commits, read it as it is.
"""

import importlib.util
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from swiftlite.base.errors import UserError, is_of_storage, reason_of
from swiftlite.hub import commits
from swiftlite.hub.name import HubName

INSTALL = "pip install modelscope"
DEFAULT_REVISION = "master"
_INHERITED = frozenset(commits.known())
"""Names that the parent process has downloaded."""
_LOG_IN = "set MODELSCOPE_API_TOKEN, or run modelscope login"


@cache
def modelscope_snapshot(name: HubName, files: tuple[str, ...], left_out: tuple[str, ...] = ()) -> Path:
    """Return the directory with the given files of a repository. Missing and changed files are downloaded.

    Args:
        files: patterns of names.
        left_out: patterns of names that are not downloaded.

    Raises:
        UserError: the package is not installed, or the files are not available.
    """
    if importlib.util.find_spec("modelscope") is None:
        raise UserError(f"{name} is a {name.kind} of ModelScope, which requires the package modelscope", INSTALL)
    from huggingface_hub import constants
    from modelscope.hub.snapshot_download import snapshot_download  # pyright: ignore[reportMissingImports]

    revision = name.revision or DEFAULT_REVISION
    with _refusals(name, is_offline=constants.HF_HUB_OFFLINE):
        directory = snapshot_download(
            name.repository,
            repo_type=name.kind,
            revision=revision,
            allow_patterns=list(files),
            ignore_patterns=list(left_out),
            local_files_only=constants.HF_HUB_OFFLINE or name.key in _INHERITED,
        )
    commits.note(name, revision)
    return Path(directory)


@contextmanager
def _refusals(name: HubName, *, is_offline: bool) -> Iterator[None]:
    """Convert exceptions of the package.

    Raises:
        UserError: the package raised an exception.
    """
    try:
        yield
    except Exception as error:  # the package has a hierarchy of its own for some of them
        if is_of_storage(error):
            hint = "free disk space, or set MODELSCOPE_CACHE=DIR on another disk, then run the same command again"
            raise UserError(f"{name} cannot be stored: {reason_of(error)}", hint) from None
        if is_offline:
            hint = f"unset HF_HUB_OFFLINE, or run on a machine with network: modelscope download {name.repository}"
            raise UserError(f"{name} is not completely cached, and HF_HUB_OFFLINE disables downloads", hint) from None
        raise _explained(name, error) from None


def _explained(name: HubName, error: Exception) -> UserError:
    kinds = {type(each).__name__ for each in (error, error.__cause__, *_of_files(error)) if each is not None}
    if kinds & {"AuthenticationError", "PermissionDeniedError"}:
        return UserError(f"ModelScope does not allow to read {name}", f"{_LOG_IN}, for an account with read access")
    if "NotExistError" in kinds:
        revision = name.revision or DEFAULT_REVISION
        return UserError(
            f"{name} does not exist on ModelScope as a public {name.kind}, or has no revision {revision}",
            f"check the name; if it is private, {_LOG_IN}",
        )
    return UserError(
        f"{name} cannot be downloaded from ModelScope: {reason_of(error)}",
        "check the network (HTTPS_PROXY, MODELSCOPE_ENDPOINT) and run the same command again to resume; or give a "
        "local path",
    )


def _of_files(error: Exception) -> Sequence[BaseException]:
    """Return the errors of single files."""
    return list(vars(error).get("failed_files", {}).values())
