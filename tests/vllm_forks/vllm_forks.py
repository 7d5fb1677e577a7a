"""Halves the start of a vLLM server on a CPU, where each of its processes imports vLLM for itself.

With this, its engine and worker are forked, and it looks at the classes of models in the process that asks for them.
It is one of vLLM's plugins, in every process that has this directory on PYTHONPATH.
"""

import multiprocessing
from types import SimpleNamespace


def install() -> None:
    """Called by vLLM in each of its processes; may be called again."""
    from vllm.model_executor.models import registry
    from vllm.utils import system_utils

    fork = multiprocessing.get_context("fork")
    system_utils.multiprocessing = SimpleNamespace(get_context=lambda method: fork)  # type: ignore[assignment]
    registry._run_in_subprocess = lambda look: look()
