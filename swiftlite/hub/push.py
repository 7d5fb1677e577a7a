"""A directory to a repository of the hub, in one commit."""

from pathlib import Path

from swiftlite.errors import UserError
from swiftlite.hub.name import HubName
from swiftlite.hub.refusal import refusals
from swiftlite.log import logger


def has_token() -> bool:
    """Whether this account can write to some repository: HF_TOKEN, or `hf auth login`."""
    from huggingface_hub import get_token

    return get_token() is not None


def is_offline() -> bool:
    """Whether a variable forbids to ask the hub."""
    from huggingface_hub import constants

    return constants.HF_HUB_OFFLINE


def push(directory: Path, name: HubName, *, is_private: bool) -> None:
    """Make the repository if there is none, and replace its files by those of the directory, all or none of them.

    Args:
        is_private: of a repository that is made; one that is there stays as it is.

    Raises:
        UserError: the hub does not take it; the directory is as it was.
    """
    from huggingface_hub import HfApi

    api = HfApi()
    try:
        with refusals(name, "write to"):
            api.create_repo(name.repository, private=is_private, exist_ok=True)
            commit = api.upload_folder(
                repo_id=name.repository,
                folder_path=directory,
                commit_message="Model exported by swiftlite",
                delete_patterns=["*.safetensors", "*.index.json"],
            )
    except UserError as error:
        private = " --private" if is_private else ""
        raise UserError(
            f"{directory} is whole, but not pushed to {name.repository}: {error.problem}",
            f"{error.hint}\n    then: hf upload{private} {name.repository} {directory}",
        ) from None
    logger.info("pushed %s to %s", directory, commit.commit_url)
