"""On PYTHONPATH, lets vLLM's newer model runner work on a CPU: its Triton kernels run in Triton's own interpreter.

That runner is what every GPU has, and the only one that gives each MTP head its own draft step. vLLM for CPUs enables
it where Triton has a "cpu" backend (vllm/triton_utils/importing.py); no published Triton has one, so an empty one is
put there. A kernel that is interpreted asks nothing of it.
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
