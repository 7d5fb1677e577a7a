"""Load many checkpoints with an engine's own loaders, in one process with the engine."""

import json
import subprocess
import sys
from collections.abc import Hashable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from swiftlite.engines.loading.load_report import LoadReport
from tests.stand_ins import sglang_environment, torchvision_environment

_ENVIRONMENTS = {"sglang": sglang_environment, "vllm": torchvision_environment}
_PROGRAM = """
import dataclasses, json, sys
from swiftlite.engines.engine import EngineConfig
from swiftlite.engines.served_model import resolve_served
{prepare}
from swiftlite.engines.{engine}.dry_load import dry_load
for directory, options in json.loads(sys.argv[1]):
    report = dry_load(EngineConfig(resolve_served(directory), **{{"num_speculative_tokens": None, **options}}))
    print(json.dumps(dataclasses.asdict(report)))
"""

Name = TypeVar("Name", bound=Hashable)


def dry_loads(
    engine: str,
    directories: Mapping[Name, Path],
    options: Mapping[Name, Mapping[str, Any]] | None = None,
    prepare: str = "",
    timeout: float = 600,
) -> dict[Name, LoadReport]:
    """Return the report of each model.

    Args:
        engine: "vllm" or "sglang".
        directories: models, by any names.
        options: fields of the `EngineConfig` of some models. By default, each head drafts one token.
        prepare: Python code that runs in the process before the engine's loaders are imported.
        timeout: seconds for all models.
    """
    questions = [(str(directory), (options or {}).get(name, {})) for name, directory in directories.items()]
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM.format(engine=engine, prepare=prepare), json.dumps(questions)],
        env=_ENVIRONMENTS[engine](),
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    reports = [LoadReport(**json.loads(line)) for line in done.stdout.splitlines() if line.startswith('{"engine"')]
    return dict(zip(directories, reports, strict=True))
