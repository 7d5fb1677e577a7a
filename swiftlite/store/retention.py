"""Choose which checkpoints are old, and delete them in a run's directory.

A checkpoint of --ephemeral_save_steps contains the file `EPHEMERAL_FILE`. It is old as soon as there is a newer
checkpoint of any kind.
"""

import shutil
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TypeVar

from swiftlite.base.log import logger
from swiftlite.plan.facts import run_checkpoints
from swiftlite.store.best import best_checkpoint

EPHEMERAL_FILE = "ephemeral"
EPHEMERAL_TEXT = "saved by --ephemeral_save_steps: deleted when a newer checkpoint is complete\n"
Checkpoint = TypeVar("Checkpoint")


def old_ones(
    checkpoints: Sequence[Checkpoint], ephemeral: Collection[Checkpoint], keep: int | None
) -> list[Checkpoint]:
    """Return the checkpoints to delete.

    Args:
        checkpoints: complete checkpoints, oldest first.
        ephemeral: those of --ephemeral_save_steps among them.
        keep: number of newest other checkpoints to keep; None keeps all.
    """
    others = [checkpoint for checkpoint in checkpoints if checkpoint not in ephemeral]
    kept = others[-keep:] if keep else others
    return [checkpoint for checkpoint in checkpoints[:-1] if checkpoint not in kept]


def is_ephemeral(checkpoint: Path) -> bool:
    """Return whether a checkpoint is one of --ephemeral_save_steps."""
    return (checkpoint / EPHEMERAL_FILE).exists()


def delete_oldest(run: Path, keep: int | None, in_use: Collection[Path] = ()) -> None:
    """Delete the checkpoints in `old_ones`, except those in use and the best one."""
    checkpoints = run_checkpoints(run)
    needed = {*in_use, best_checkpoint(run)}
    for old in old_ones(checkpoints, list(filter(is_ephemeral, checkpoints)), keep):
        if old not in needed:
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
