"""Delete old checkpoints in a run's directory."""

import shutil
from collections.abc import Collection
from pathlib import Path

from swiftlite.base.log import logger
from swiftlite.plan.facts import run_checkpoints


def delete_oldest(run: Path, keep: int | None, in_use: Collection[Path] = ()) -> None:
    """Delete all but the newest `keep` checkpoints, except those in use. With None, delete nothing."""
    if not keep:
        return
    for old in run_checkpoints(run)[:-keep]:
        if old not in in_use:
            delete_checkpoint(old)


def delete_checkpoint(checkpoint: Path) -> None:
    """Delete a checkpoint.

    The directory is renamed first, because a partly deleted checkpoint would look like a damaged one.
    """
    nameless = checkpoint.with_name(f".{checkpoint.name}.deleting")
    try:
        checkpoint.rename(nameless)
        if nameless.is_symlink():
            nameless.unlink()
        else:
            shutil.rmtree(nameless)
    except OSError as error:  # a warning, because the new checkpoint is saved
        logger.warning("%s cannot be deleted: %s", checkpoint, error.strerror or error)
