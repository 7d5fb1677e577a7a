"""Call functions in a process with an engine, such as the engine's own loaders for many checkpoints."""

import json
import subprocess
import sys
from collections.abc import Hashable, Mapping
from dataclasses import asdict
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, TypeVar

from swiftlite.engines.engine import EngineConfig
from swiftlite.engines.loading.load_report import LoadReport
from swiftlite.engines.served_model import resolve_served
from tests.stand_ins import sglang_environment, torchvision_environment

_ENVIRONMENTS = {"sglang": sglang_environment, "vllm": torchvision_environment}
_PROGRAM = """
import json, sys
from pkgutil import resolve_name
for function, *arguments in json.load(sys.stdin):
    print("ANSWER", json.dumps(resolve_name(function)(*arguments)), flush=True)
"""

Name = TypeVar("Name", bound=Hashable)
Call = tuple[Any, ...]
"""module:function, and arguments that can be written as JSON."""


def dry_loads(
    engine: str, asked: Mapping[Name, Path | Call], options: Mapping[Any, Mapping[str, Any]] | None = None
) -> dict[Name, Any]:
    """Return the report of each model, or the result of each call. One process does all of this in order.

    Args:
        engine: "vllm" or "sglang".
        asked: directories of models, or calls, by any names.
        options: fields of the `EngineConfig` of some models. By default, each head drafts one token.
    """
    calls: list[Call] = []
    for name, what in asked.items():
        of_model = (f"{__name__}:load", engine, str(what), (options or {}).get(name, {}))
        calls.append(of_model if isinstance(what, Path) else what)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _PROGRAM],
        input=json.dumps(calls),
        env=_ENVIRONMENTS[engine](),
        capture_output=True,
        text=True,
        timeout=1200,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [line.removeprefix("ANSWER ") for line in done.stdout.splitlines() if line.startswith("ANSWER ")]
    answers = dict(zip(asked, map(json.loads, lines), strict=True))
    return {name: LoadReport(**answers[name]) if isinstance(asked[name], Path) else answers[name] for name in asked}


def load(engine: str, directory: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of an engine's report about a checkpoint."""
    dry_load = resolve_name(f"swiftlite.engines.{engine}.dry_load:dry_load")
    return asdict(dry_load(EngineConfig(resolve_served(directory), **{"num_speculative_tokens": None, **options})))
