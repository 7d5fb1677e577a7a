"""Describe the environment of a measurement: versions and the machine."""

import importlib.util
import os
import platform
import runpy
import shutil
import subprocess
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import swiftlite


def versions_of(packages: Iterable[str]) -> dict[str, str]:
    """Return the versions of swiftlite, Python, and these installed packages."""
    found = {"swiftlite": swiftlite.__version__, "python": platform.python_version()}
    for name in packages:
        found[name] = version(name)
    return found


def torch_cuda() -> str | None:
    """`torch.version.cuda`, without importing torch: the CUDA that it is built for; None: it is built without."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    return runpy.run_path(str(Path(spec.origin).with_name("version.py"))).get("cuda")


def has_nvidia_driver() -> bool:
    """Whether a driver of NVIDIA's is loaded here, by its files."""
    return Path("/proc/driver/nvidia/version").exists() or Path("/dev/nvidiactl").exists()


def gpu_models() -> list[str]:
    """The names of the GPUs that torch may use, by the driver's files."""
    models = []
    for information in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information")):
        models += [line.partition(":")[2].strip() for line in information.read_text().splitlines() if "Model:" in line]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return models if visible is None else models[: len(list(filter(None, visible.split(","))))]


def sees_gpu() -> bool:
    """Whether torch would find a GPU, as far as files and the environment tell; torch itself is not asked."""
    is_hidden = os.environ.get("CUDA_VISIBLE_DEVICES", "all") in ("", "-1")
    return has_nvidia_driver() and not is_hidden and torch_cuda() is not None


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
