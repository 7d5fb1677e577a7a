"""Let vLLM's newer model runner work on a CPU by running its Triton kernels in Triton's interpreter.

This file must be on PYTHONPATH. GPUs use the newer runner, and only it passes the draft step to each MTP head. vLLM for
CPUs enables it if Triton has a "cpu" backend (vllm/triton_utils/importing.py). No published Triton has such a backend,
so this module adds an empty one; interpreted kernels do not use it.
"""

import os

os.environ["TRITON_INTERPRET"] = "1"
os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1"

import triton.backends
import triton.language
from triton.language.extra import libdevice
from triton.runtime import interpreter


class _Driver:
    @staticmethod
    def is_active() -> bool:
        return True


class _Backend:
    driver = _Driver
    compiler = None


triton.backends.backends["cpu"] = _Backend  # pyright: ignore[reportArgumentType]

_load, _store = interpreter._interpreter.load, interpreter._interpreter.store

# Masks of vLLM's drawing kernels are of numbers; compiled Triton takes them, the interpreter takes booleans alone.
interpreter._interpreter.load = lambda pointer, mask, *rest: _load(pointer, mask.astype(bool), *rest)
interpreter._interpreter.store = lambda pointer, value, mask: _store(pointer, value, mask.astype(bool))
libdevice.log1p = lambda x: triton.language.log(1.0 + x)  # of compiled kernels alone
