"""Which commit a name stands for: asked once, then the same for this process, those that it starts, and a resumed run.

They are kept in an environment variable, because that is what a launcher hands to its ranks.
"""

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from swiftlite.durable import write_durably
from swiftlite.errors import UserError
from swiftlite.hub.name import HubName
from swiftlite.json_file import read_json
from swiftlite.log import logger

VARIABLE = "SWIFTLITE_COMMITS"
"""JSON: by `HubName.key`, a commit."""

COMMITS_FILE = "commits.json"
"""Beside args.json of a run: the same, of the names in args.json."""


def known() -> dict[str, str]:
    """The commits that have been asked for, by `HubName.key`."""
    return json.loads(os.environ.get(VARIABLE) or "{}")


def keep(commits: Mapping[str, str]) -> None:
    """From here on these names stand for these commits."""
    os.environ[VARIABLE] = json.dumps(known() | dict(commits))


def revision_of(name: HubName) -> str:
    """What to ask the hub for: the commit where it is known."""
    return known().get(name.key) or name.revision or "main"


def note(name: HubName, commit: str) -> None:
    """Remember what the hub said, and say it once."""
    if known().get(name.key) != commit:
        keep({name.key: commit})
        logger.info("%s is at commit %s", name, commit)


def write_commits(run_dir: Path, names: Iterable[HubName]) -> None:
    """Write the commits of the names in a run's args.json beside it; nothing where all are directories and files."""
    commits = {name.key: known()[name.key] for name in names if name.key in known()}
    if commits:
        write_durably(run_dir / COMMITS_FILE, json.dumps(commits, indent=2).encode() + b"\n")


def read_commits(run_dir: Path) -> dict[str, str]:
    """The commits that a run began with; {} where it has none.

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
        raise UserError(f"{path}, which says what this run began with, is damaged", "put it back") from None
    return commits


def check_commits(run_dir: Path) -> None:
    """A run that goes on does so with the commits that it began with.

    Raises:
        UserError: a name stands for another one now.
    """
    for key, commit in read_commits(run_dir).items():
        now = known().get(key, commit)
        if now != commit:
            raise UserError(
                f"--resume: {key} was commit {commit} when this run began, and is {now} here",
                "unset SWIFTLITE_COMMITS, or start another --output_dir",
            )
