"""Resolve each name on the hub to a commit once. This process, its subprocesses and resumed runs use this commit.

The commits are stored in an environment variable, because a launcher passes its environment to its ranks.
"""

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from swiftlite.base.atomic import atomic_write
from swiftlite.base.errors import UserError
from swiftlite.base.json_file import read_json
from swiftlite.base.log import logger
from swiftlite.hub.name import HubName

VARIABLE = "SWIFTLITE_COMMITS"
"""Environment variable with a JSON object of commits by `HubName.key`, such as {"models/org/name@main": "4f5e..."}."""

COMMITS_FILE = "commits.json"
"""File next to args.json of a run: a JSON object of the commits of the names in args.json, by `HubName.key`."""


def known() -> dict[str, str]:
    """Return the commits that have been resolved, by `HubName.key`."""
    return json.loads(os.environ.get(VARIABLE) or "{}")


def keep(commits: Mapping[str, str]) -> None:
    """Use `commits`, a mapping from `HubName.key` to commit, in this process and its subprocesses."""
    os.environ[VARIABLE] = json.dumps(known() | dict(commits))


def revision_of(name: HubName) -> str:
    """Return the revision to request from the hub: the commit if it is known, otherwise the revision in the name."""
    return known().get(name.key) or name.revision or "main"


def note(name: HubName, commit: str) -> None:
    """Store the commit that the hub returned, and log it if it is new."""
    if known().get(name.key) != commit:
        keep({name.key: commit})
        logger.info("%s is at commit %s", name, commit)


def write_commits(run_dir: Path, names: Iterable[HubName]) -> None:
    """Write the commits of `names` next to a run's args.json. If no name has a commit, no file is written."""
    commits = {name.key: known()[name.key] for name in names if name.key in known()}
    if commits:
        atomic_write(run_dir / COMMITS_FILE, json.dumps(commits, indent=2).encode() + b"\n")


def read_commits(run_dir: Path) -> dict[str, str]:
    """Return the commits that a run started with; empty if the file does not exist.

    Raises:
        UserError: the file is damaged.
    """
    path = run_dir / COMMITS_FILE
    try:
        commits = read_json(path)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError):
        commits = None
    if not isinstance(commits, dict) or not all(isinstance(commit, str) for commit in commits.values()):
        raise UserError(f"{path} is not a JSON object of commits", "restore it, or start a new run") from None
    return commits


def check_commits(run_dir: Path) -> None:
    """Check that a resumed run uses the same commits as when it was started.

    Raises:
        UserError: a name now resolves to another commit.
    """
    for key, commit in read_commits(run_dir).items():
        now = known().get(key, commit)
        if now != commit:
            raise UserError(
                f"--resume: {key} was at commit {commit} when this run started, but is now at {now}",
                "unset SWIFTLITE_COMMITS, or use another --output_dir",
            )
