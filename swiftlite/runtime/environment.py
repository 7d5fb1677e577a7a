"""Describe the environment of a measurement: versions of software, and the machine. Define the environment of child
processes.
"""

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

SAFE_PATH = {"PYTHONSAFEPATH": "1"}
"""Variable with which `python -m` and `python -c` do not import modules from the current directory. It can be the
directory of an untrusted model. A variable also reaches the Python processes that engines start.
"""


def versions_of(packages: Iterable[str]) -> dict[str, str]:
    """Return the versions of swiftlite, Python, and all installed packages among `packages`."""
    found = {"swiftlite": swiftlite.__version__, "python": platform.python_version()}
    for name in packages:
        found[name] = version(name)
    return found


def torch_cuda() -> str | None:
    """Return `torch.version.cuda` without importing torch; None for a build without CUDA."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    return runpy.run_path(str(Path(spec.origin).with_name("version.py"))).get("cuda")


def has_nvidia_driver() -> bool:
    """Return whether an NVIDIA driver is loaded, from its files."""
    return Path("/proc/driver/nvidia/version").exists() or Path("/dev/nvidiactl").exists()


def gpu_models() -> list[str]:
    """Return the names of the GPUs that torch may use, from the driver's files."""
    models = []
    for information in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information")):
        models += [line.partition(":")[2].strip() for line in information.read_text().splitlines() if "Model:" in line]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return models
    num_visible = sum(bool(number) for number in visible.split(","))
    return models[:num_visible]


def sees_gpu() -> bool:
    """Return whether torch would find a GPU, from files and environment variables, without importing torch."""
    is_hidden = os.environ.get("CUDA_VISIBLE_DEVICES", "all") in ("", "-1")
    return has_nvidia_driver() and not is_hidden and torch_cuda() is not None


def has_bfloat16_instructions(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Return whether the processor multiplies in bfloat16 (AMX or AVX512-BF16 on x86-64). True if this is unknown.

    Args:
        cpuinfo: file in which Linux describes the processors.
    """
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        return True
    features = next((set(line.split()) for line in lines if line.startswith(("flags", "Features"))), None)
    return features is None or bool(features & {"amx_bf16", "avx512_bf16", "bf16"})


def describe_machine() -> dict[str, Any]:
    """Return the platform, CPUs, GPUs and load of this machine."""
    gpus = []
    if shutil.which("nvidia-smi"):  # with torch this would allocate GPU memory
        query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
        gpus = subprocess.run(query, capture_output=True, text=True).stdout.splitlines()
    return {
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "gpus": gpus,
        "load_average": os.getloadavg()[0],
    }
