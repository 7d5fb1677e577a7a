"""What a figure was measured with, and on what: versions, the machine."""

import os
import platform
import shutil
import subprocess
from collections.abc import Iterable
from importlib.metadata import version
from typing import Any

import swiftlite


def versions_of(packages: Iterable[str]) -> dict[str, str]:
    """Of swiftlite, Python, and these packages, which are installed."""
    found = {"swiftlite": swiftlite.__version__, "python": platform.python_version()}
    for name in packages:
        found[name] = version(name)
    return found


def describe_machine() -> dict[str, Any]:
    """The machine that this process runs on, and what else it has to do."""
    gpus = []
    if shutil.which("nvidia-smi"):  # torch would take memory of the GPU to answer
        query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
        gpus = subprocess.run(query, capture_output=True, text=True).stdout.splitlines()
    return {
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "gpus": gpus,
        "load_average": os.getloadavg()[0],
    }
