"""Environments for the processes that tests start: in which SGLang runs on a CPU, vLLM starts in half the time, and
weights go between "GPUs"."""

import os
from pathlib import Path

_TESTS = Path(__file__).parent
# Otherwise all servers of a test session share the first core.
_UNBOUND = {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}


def sglang_environment() -> dict[str, str]:
    """With the stand-ins on the path, before a real torchvision; and without compiling what runs once."""
    quiet = {"PYTHONWARNINGS": "ignore", "TORCHDYNAMO_DISABLE": "1"}
    return _with_path("sglang_stand_ins") | quiet


def torchvision_environment() -> dict[str, str]:
    """With the stand-in for torchvision, which vLLM's classes of image models import, and `vllm_forks.py`."""
    return _with_path("sglang_stand_ins", "vllm_forks") | _UNBOUND


def gpu_link_environment() -> dict[str, str]:
    """With `gpu_links.py` among vLLM's plugins, and `vllm_forks.py`."""
    return _with_path("gpu_links", "vllm_forks") | _UNBOUND


def forking_vllm_environment() -> dict[str, str]:
    """With `vllm_forks.py` among vLLM's plugins."""
    return _with_path("vllm_forks") | _UNBOUND


def _with_path(*directories: str) -> dict[str, str]:
    paths = [str(_TESTS / directory) for directory in directories]
    paths += [str(_TESTS.parent), os.environ.get("PYTHONPATH", "")]
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
