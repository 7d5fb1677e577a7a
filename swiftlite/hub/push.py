"""Upload a directory to a repository on the hub, in one commit."""

import glob
from pathlib import Path

from swiftlite.base.errors import UserError
from swiftlite.base.log import logger
from swiftlite.hub.name import HubName
from swiftlite.hub.refusal import refusals

WEIGHTS = (".safetensors", ".index.json")
"""Extensions of weight files and their index."""


def has_token() -> bool:
    """Return whether there is a token for the hub, from HF_TOKEN or `hf auth login`."""
    from huggingface_hub import get_token

    return get_token() is not None


def is_offline() -> bool:
    """Return whether an environment variable forbids requests to the hub."""
    from huggingface_hub import constants

    return constants.HF_HUB_OFFLINE


def push(directory: Path, name: HubName, *, is_private: bool) -> None:
    """Upload the directory in one commit.

    The commit also deletes *.safetensors and *.index.json files of an earlier model, such as superfluous shards. Files
    in subfolders are not deleted.

    Args:
        is_private: whether a new repository is private. The visibility of an existing repository is not changed.

    Raises:
        UserError: the upload failed; the directory is unchanged.
    """
    from huggingface_hub import HfApi

    api = HfApi()
    try:
        with refusals(name, "write to"):
            api.create_repo(name.repository, private=is_private, exist_ok=True)
            # A pattern such as *.safetensors would also match in subfolders.
            old = [path for path in api.list_repo_files(name.repository) if "/" not in path and path.endswith(WEIGHTS)]
            commit = api.upload_folder(
                repo_id=name.repository,
                folder_path=directory,
                commit_message="Model exported by swiftlite",
                delete_patterns=[glob.escape(path) for path in old],
            )
    except UserError as error:
        command = f"hf upload {name.repository} {directory}"
        if is_private:
            command = f"hf upload --private {name.repository} {directory}"
        raise UserError(
            f"--push_to_hub {name.repository} failed ({directory} is complete): {error.problem}",
            f"{error.hint}\n    then: {command}",
        ) from None
    logger.info("pushed %s to %s", directory, commit.commit_url)
