"""`swiftlite doctor --engine`: what an engine would do with a checkpoint, and whether serving it would be right.

Behind it: `vllm_audit.py` and `sglang_audit.py`, which run an engine's own loaders in a process of their own. Where
SGLang is not installed there is still what is known of its draft classes (`engines/conventions.py`).
"""

import dataclasses
import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from typing import Any

from swiftlite.engines.conventions import convention
from swiftlite.engines.engine import EngineConfig
from swiftlite.engines.served_model import ServedModel, read_model
from swiftlite.engines.sglang.options import depth_problem
from swiftlite.errors import UserError


@dataclass(frozen=True)
class EngineReport:
    """What an engine makes of a checkpoint.

    Attributes:
        engine: name and version.
        target: class that serves the trunk; None when it was not reached.
        draft: class that drafts; None when none does.
        depth: MTP heads that config.json promises.
        num_heads: how many of them draft.
        verdict: what was found out when there is no problem.
        problems: why serving would be wrong, one line each.
        notes: what is worth knowing and is not wrong.
    """

    engine: str
    target: str | None
    draft: str | None
    depth: int
    num_heads: int
    verdict: str
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def audit(engine: str, config: EngineConfig) -> EngineReport:
    """What `engine` ("vllm" or "sglang") would make of a checkpoint; takes its imports and a second.

    Raises:
        UserError: no model of a known family is there, or the engine itself does not start to work here.
    """
    model = read_model(config.model)
    if engine == "sglang" and importlib.util.find_spec("sglang") is None:
        return _known_of_sglang(model)
    options = {key: value for key, value in dataclasses.asdict(config).items() if key != "model"}
    command = [sys.executable, "-m", f"swiftlite.engines.{engine}.audit", str(config.model), json.dumps(options)]
    quiet = {"VLLM_LOGGING_LEVEL": "ERROR", "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(command, env=quiet | os.environ, capture_output=True, text=True)
    if done.returncode != 0:
        name = {"vllm": "vLLM", "sglang": "SGLang"}[engine]
        raise UserError(f"{name} cannot be asked here:\n{done.stderr.strip()[-2000:]}", "the last line says why")
    content: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return EngineReport(**content)


def _known_of_sglang(model: ServedModel) -> EngineReport:
    known = convention("sglang", model.family.name)
    problem = depth_problem(model)
    return EngineReport(
        engine="sglang 0.5.23, as known to swiftlite; it is not installed here, so its loader was not run",
        target=(model.hf_config.get("architectures") or [None])[0],
        draft=known.draft if model.heads.layers else None,
        depth=model.heads.layers,
        num_heads=known.num_heads(model.heads.layers),
        verdict="nothing known speaks against it",
        problems=[problem] if problem else [],
    )
