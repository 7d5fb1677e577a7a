"""Download the models and datasets of a command's options from the hub, once for all processes of a machine."""

from pathlib import Path
from typing import Any

from swiftlite.args.commands import DoctorArgs, SftArgs
from swiftlite.base.errors import UserError
from swiftlite.base.log import logger
from swiftlite.data.rows.hub_rows import fetch_rows
from swiftlite.hub import commits
from swiftlite.hub.model import local_model
from swiftlite.hub.name import dataset_names, models_in
from swiftlite.store.objects import check_store
from swiftlite.store.run_store import claim_store, fetch_newest


def hold_commits(args: Any) -> None:
    """For a resumed run, use the recorded commits, even if names on the hub now refer to newer commits.

    Raises:
        UserError: the record is damaged.
    """
    if not isinstance(args, SftArgs) or not args.resume:
        return
    recorded = commits.read_commits(Path(args.output_dir))
    commits.keep(recorded)
    for key, commit in recorded.items():
        logger.info("--resume: using %s at commit %s", key, commit)


def fetch_checkpoint(args: Any) -> bool:
    """Fetch the newest checkpoint of --checkpoint_store, so that the rules and the run find it in --output_dir.

    Returns:
        Whether the store can be claimed. It cannot if it did not answer.

    Raises:
        UserError: the store or --output_dir cannot be used.
    """
    if not isinstance(args, SftArgs) or args.checkpoint_store is None:
        return False
    check_store(args.checkpoint_store, args.output_dir)
    if args.dry_run or not (args.resume and args.output_dir):
        return True
    return fetch_newest(Path(args.output_dir), args.checkpoint_store)


def claim_checkpoint_store(args: Any) -> None:
    """Reserve --checkpoint_store for this run after the rules have accepted the options.

    Raises:
        UserError: the store cannot be written, or contains another run.
    """
    if isinstance(args, SftArgs) and args.checkpoint_store is not None:
        claim_store(Path(args.output_dir), args.checkpoint_store, resume=args.resume)


def fetch(args: Any) -> None:
    """Download missing weights and rows after the rules have accepted the options.

    Raises:
        UserError: a download failed.
    """
    if isinstance(args, DoctorArgs):  # a plan requires no weights
        return
    for option, name in models_in(args).items():
        try:
            local_model(name)
        except UserError as error:
            raise UserError(f"--{option} {name}: {error.problem}", error.hint, error.exit_code) from None
    for name in dataset_names(args):
        fetch_rows(name)
