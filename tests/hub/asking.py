"""Run functions of swiftlite in separate processes, because huggingface_hub reads environment
variables only at import.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.hub.server import Hub, environment

CALLS = """
import json, sys
from pkgutil import resolve_name
from swiftlite.base.errors import UserError

for function, *arguments in json.loads(sys.stdin.read()):
    try:
        answer = str(resolve_name(function)(*arguments))
    except UserError as error:
        answer = f"UserError: {error}"
    print("ANSWER", json.dumps(answer))
"""


def answers(hub: Hub | None, home: Path, *calls: tuple[Any, ...], **changes: str) -> list[str]:
    """Return the result of each call (module:function, arguments...) as text, or "UserError: ..."."""
    done = subprocess.run(
        [sys.executable, "-c", CALLS],
        input=json.dumps(calls),
        env=environment(hub, home, **changes),
        cwd=home.parent,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line.removeprefix("ANSWER ")) for line in done.stdout.splitlines() if line.startswith("ANSWER")]


def local_model(name: str) -> tuple[str, str]:
    return ("swiftlite.hub.model:local_model", name)


def description_of(name: str) -> tuple[str, str]:
    return ("swiftlite.hub.model:description_of", name)


def without_modelscope(name: str) -> Path:
    from swiftlite.hub.model import local_model as resolve

    sys.modules["modelscope"] = None  # pyright: ignore[reportArgumentType]
    return resolve(name)


def dataset(name: str) -> tuple[str, str]:
    return (f"{__name__}:commit_of", name)


def commit_of(name: str) -> str:
    from swiftlite.data.rows.hub_rows import commit_of_dataset
    from swiftlite.hub.name import HubName

    return commit_of_dataset(HubName("dataset", name))


def start(hub: Hub | None, directory: Path, *argv: str, **changes: str) -> subprocess.CompletedProcess[str]:
    """Run swiftlite with these arguments in a directory. Its cache is `home` in this directory."""
    return subprocess.run(
        [sys.executable, "-m", "swiftlite", *argv],
        env=environment(hub, directory / "home", **changes),
        cwd=directory,
        capture_output=True,
        text=True,
        timeout=300,
    )
