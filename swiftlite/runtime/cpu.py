"""What megatron-core 0.16.1 needs to run without CUDA. Each patch is a named function with its call sites.

Nothing happens at import; `install()` is called once per process, and never on a machine with CUDA. File names are
relative to megatron/core of the 0.16.1 wheel. Each patch is held by a test in tests/runtime/test_cpu.py that fails
without it.
"""

from collections.abc import Callable

import torch
from megatron.core.tensor_parallel import random as mcore_random
from torch.overrides import TorchFunctionMode

CPU = torch.device("cpu")


class _CudaLiteralsOnCpu(TorchFunctionMode):
    """Answers the literals that megatron-core hands to torch as if a GPU were there.

    - `device="cuda"`: schedules.py:596, optimizer/clip_grads.py:103, optimizer/optimizer.py:473 and others.
    - `Tensor.type()` compared with "torch.cuda.FloatTensor": optimizer/clip_grads.py:167, optimizer/optimizer.py:671.
    - `Tensor.cuda()`: models/common/language_module/language_module.py:244, models/common/embeddings/rope_utils.py:64.
    - `pin_memory=True`: models/common/embeddings/rope_utils.py:62.
    """

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            return func(*args).replace("torch.", "torch.cuda.")
        if func is torch.Tensor.cuda:
            return args[0]
        if kwargs:
            if "cuda" in str(kwargs.get("device", "")):
                kwargs = {**kwargs, "device": CPU}
            if kwargs.get("pin_memory"):
                kwargs = {**kwargs, "pin_memory": False}
        return func(*args, **kwargs)


def _get_rng_state(*args, **kwargs) -> torch.Tensor:
    return torch.random.get_rng_state()


def _set_rng_state(new_state: torch.Tensor, *args, **kwargs) -> None:
    torch.random.set_rng_state(new_state)


def _patch_cuda_queries() -> None:
    """`current_device` (rotary_pos_embedding.py:78, mappings.py:91, multi_token_prediction.py:337),
    `synchronize` (p2p_communication.py:242, dist_checkpointing/strategies/filesystem_async.py:230)."""
    torch.cuda.current_device = lambda: CPU  # type: ignore[assignment]
    torch.cuda.synchronize = lambda device=None: None


def _patch_random_state() -> None:
    """The tracker of model-parallel seeds keeps CUDA states (tensor_parallel/random.py:235-277); on a CPU the
    default generator takes their place, so dropout and initialisation follow the same seeds."""
    torch.cuda.get_rng_state = _get_rng_state
    torch.cuda.random.get_rng_state = _get_rng_state
    torch.cuda.manual_seed = torch.manual_seed  # type: ignore[assignment]
    mcore_random._get_cuda_rng_state = _get_rng_state
    mcore_random._set_cuda_rng_state = _set_rng_state


PATCHES: tuple[Callable[[], None], ...] = (_patch_cuda_queries, _patch_random_state)
_mode: _CudaLiteralsOnCpu | None = None


def install() -> None:
    """Let megatron-core run on this CPU-only process; does nothing on a second call, or where CUDA is available."""
    global _mode
    if _mode is not None or torch.cuda.is_available():
        return
    for patch in PATCHES:
        patch()
    _mode = _CudaLiteralsOnCpu()
    _mode.__enter__()  # for the life of the process: megatron-core asks for CUDA at every step
