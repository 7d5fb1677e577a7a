"""Run an engine's loaders on a checkpoint without starting the engine or reading tensors (`swiftlite doctor --engine`).

    python -m swiftlite.engines.loading.dry_load MODULE:FUNCTION MODEL_DIR < JSON

This command calls FUNCTION with an `EngineConfig` for MODEL_DIR. The other fields of the config are read as JSON from
stdin. The function's `LoadReport` is printed as JSON on the last line of stdout. A subprocess is used, because engines
create process groups.
"""

import dataclasses
import json
import subprocess
import sys
from pkgutil import resolve_name

from swiftlite.base.errors import UserError
from swiftlite.engines.engine import EngineConfig
from swiftlite.engines.info import EngineInfo
from swiftlite.engines.loading.load_report import LoadReport
from swiftlite.engines.served_model import check_files, resolve_served


def dry_load(info: EngineInfo, config: EngineConfig) -> LoadReport:
    """Return the load report of an engine for a checkpoint; takes about 1 s, plus importing the engine.

    Raises:
        UserError: the model's family is unknown, or the engine does not work on this machine.
    """
    check_files(config.model)
    # Facts about the engine's classes still find most problems on a machine without it.
    if info.known_report and not info.is_installed:
        return resolve_name(info.known_report)(config.model)
    options = {name: value for name, value in vars(config).items() if name != "model"}
    words = [sys.executable, "-W", "ignore", "-m", "swiftlite.engines.loading.dry_load"]
    command = [*words, info.dry_load, str(config.model.directory)]
    # Options are passed on stdin, because all users of a machine can see command lines, and options can contain API
    # keys.
    done = subprocess.run(command, input=json.dumps(options), capture_output=True, text=True)
    if done.returncode != 0:
        problem = f"--engine {info.name}: {info.label} failed on this machine:\n{done.stderr.strip()[-2000:]}"
        raise UserError(problem, "the last line above is the cause")
    return LoadReport(**json.loads(done.stdout.splitlines()[-1]))


def main(target: str, directory: str) -> None:
    """Print the load report of one engine. Fields of the `EngineConfig` are read as JSON from stdin."""
    report = resolve_name(target)(EngineConfig(resolve_served(directory), **json.load(sys.stdin)))
    print(json.dumps(dataclasses.asdict(report)))


if __name__ == "__main__":
    main(*sys.argv[1:])
