"""Run the Python code of Transformer Engine's wheel on a CPU, with compiled parts replaced by torch code.

Tests with these stand-ins check which modules are built, how they are called, and parameters, gradients, groups and
checkpoints. They do not test the kernels. The wheel is in a separate directory, because megatron-core would use it if
it could be imported.
"""

import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

RELEASE = "2.20.2"
CAPABILITY = "SWIFTLITE_TE_CAPABILITY"
"""Environment variable with the compute capability of the emulated GPU: 9 (Hopper, the default) or 10 (Blackwell)."""
SITE = Path(os.environ.get("SWIFTLITE_TE_SITE", Path(sys.prefix) / "te"))


def missing() -> str:
    """Return why these stand-ins cannot be used here; "" if they can."""
    if (SITE / f"transformer_engine-{RELEASE}.dist-info").is_dir():
        return ""
    return f"transformer-engine {RELEASE} is not in {SITE} (requirements/te.txt)"


def launch(num_processes: int, function: Callable[..., Any], *args: Any, capability: str = "9") -> list[Any]:
    """Call `tests.parallel.launch.start` with Transformer Engine in each process.

    The processes are new and not forked, because the process for forks has imported megatron-core without Transformer
    Engine.
    """
    from tests.parallel.launch import open_store, rank_environments

    store = open_store()
    with tempfile.TemporaryDirectory() as directory:
        call = Path(directory) / "call"
        call.write_bytes(pickle.dumps((function, args)))
        running = []
        for rank, environment in enumerate(rank_environments(num_processes, store.port)):
            environment = {**environment, CAPABILITY: capability}
            command = [sys.executable, "-W", "ignore", "-m", "tests.te_stand_ins", str(call), f"{call}.{rank}"]
            running.append(subprocess.Popen(command, env=os.environ | environment, stderr=subprocess.PIPE, text=True))
        errors = [process.communicate(timeout=600)[1] for process in running]
        failed = [error for process, error in zip(running, errors, strict=True) if process.returncode]
        assert not failed, failed[0]
        return [pickle.loads(Path(f"{call}.{rank}").read_bytes()) for rank in range(num_processes)]


def install() -> None:
    """Make `import transformer_engine.pytorch` work in this process, permanently.

    Must run before megatron-core is imported.
    """
    sys.path.append(str(SITE))
    os.environ["NVTE_PROJECT_BUILDING"] = "1"  # what would load shared libraries is left out (common/__init__.py)
    import torch
    from transformer_engine import common  # pyright: ignore[reportMissingImports]

    from tests.te_stand_ins import transformer_engine_torch

    sys.modules["transformer_engine_torch"] = transformer_engine_torch
    common.load_framework_extension = lambda framework: None
    # Of whose kernels utils.py asks; torch's own functions would want a driver.
    major = int(os.environ.get(CAPABILITY, "9"))
    gpu = SimpleNamespace(major=major, minor=0, name="stand-in", multi_processor_count=1, total_memory=1 << 34)
    torch.cuda.get_device_properties = lambda device=None: gpu  # type: ignore[assignment]
    torch.cuda.get_device_capability = lambda device=None: (major, 0)  # type: ignore[assignment]
    torch.cuda.current_device = lambda: 0
    torch.cuda.is_current_stream_capturing = lambda: False
    import transformer_engine.pytorch  # pyright: ignore[reportMissingImports]
    from transformer_engine.pytorch import utils  # pyright: ignore[reportMissingImports]
    from transformer_engine.pytorch.module import base  # pyright: ignore[reportMissingImports]

    base.torch = _Torch()
    torch.version.cuda = "13.0"  # which decides what kernels there are
    distributed = transformer_engine.pytorch.distributed
    distributed._get_cuda_rng_state = lambda *args, **options: torch.empty(0)  # of generators that nothing draws from
    distributed._set_cuda_rng_state = lambda *args, **options: None
    for name, module in list(sys.modules.items()):
        if name.startswith(transformer_engine.__name__) and hasattr(module, "_empty_tensor"):
            module._empty_tensor = lambda: torch.empty(0)  # type: ignore[attr-defined]
    is_cuda: Any = torch.Tensor.is_cuda
    package = str(Path(utils.__file__).parents[1])
    # Transformer Engine refuses tensors that are not; nobody else is told so.
    torch.Tensor.is_cuda = property(  # type: ignore[assignment]
        lambda tensor: sys._getframe(1).f_code.co_filename.startswith(package) or is_cuda.__get__(tensor)
    )


class _Torch:
    """The module torch as module/base.py uses it: with CUDA, whose tensors are on the CPU.

    The shims of swiftlite (runtime/cpu.py) do not apply in backward passes.
    """

    def __init__(self) -> None:
        import torch

        self._torch = torch
        self.cuda = SimpleNamespace(**vars(torch.cuda) | {"is_available": lambda: True})

    def __getattr__(self, name: str) -> Any:
        return getattr(self._torch, name)

    def empty(self, *size: Any, device: Any = None, **options: Any) -> Any:
        return self._torch.empty(*size, **options)
