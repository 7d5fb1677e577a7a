"""Return environments for processes that tests start.

In these environments, SGLang runs on a CPU, vLLM starts in half the time, and weights are sent between emulated GPUs.
"""

import os
from pathlib import Path

_TESTS = Path(__file__).parent
# Otherwise all servers of a test session share the first core.
_UNBOUND = {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}


def sglang_environment() -> dict[str, str]:
    """Return an environment with the stand-ins before a real torchvision on the path, and without compilation."""
    quiet = {"PYTHONWARNINGS": "ignore", "TORCHDYNAMO_DISABLE": "1"}
    return _with_path("sglang_stand_ins") | quiet


def torchvision_environment() -> dict[str, str]:
    """Return an environment with `vllm_forks.py`, and with the stand-in for torchvision, which vLLM's image models
    import.
    """
    return _with_path("sglang_stand_ins", "vllm_forks") | _UNBOUND


def gpu_link_environment() -> dict[str, str]:
    """Return an environment with `gpu_links.py` and `vllm_forks.py` among vLLM's plugins."""
    return _with_path("gpu_links", "vllm_forks") | _UNBOUND


def forking_vllm_environment() -> dict[str, str]:
    """Return an environment with `vllm_forks.py` among vLLM's plugins."""
    return _with_path("vllm_forks") | _UNBOUND


def _with_path(*directories: str) -> dict[str, str]:
    paths = [str(_TESTS / directory) for directory in directories]
    paths += [str(_TESTS.parent), os.environ.get("PYTHONPATH", "")]
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
