"""The environment in which SGLang runs on a CPU, for the processes that tests start."""

import os
from pathlib import Path

_TESTS = Path(__file__).parent


def sglang_environment() -> dict[str, str]:
    """With the stand-ins on the path, before a real torchvision; and without compiling what runs once."""
    paths = [str(_TESTS / "sglang_stand_ins"), str(_TESTS.parent), os.environ.get("PYTHONPATH", "")]
    quiet = {"PYTHONWARNINGS": "ignore", "TORCHDYNAMO_DISABLE": "1"}
    return os.environ | quiet | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
