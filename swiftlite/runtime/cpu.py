"""Shims that let megatron-core run without CUDA. Each shim is a function; its docstring lists the callers in
megatron-core.

Importing this module has no effect. `install()` is called once per process, and never if CUDA is available. Paths are
relative to megatron/core of the 0.16.1 wheel unless stated otherwise. If a shim is removed, tests/runtime/test_cpu.py
fails.
"""

from typing import Any

import torch
from megatron.core.tensor_parallel import random
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from torch.overrides import TorchFunctionMode

CPU = torch.device("cpu")


def device_literal(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Replace `device="cuda"` by the CPU in keyword arguments.

    Used for calls in pipeline_parallel/schedules.py:596, optimizer/clip_grads.py:103, optimizer/optimizer.py:473 and
    others.
    """
    if "cuda" in str(kwargs.get("device", "")):
        return {**kwargs, "device": CPU}
    return kwargs


def tensor_cuda(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor itself for `Tensor.cuda()`.

    Called by models/common/language_module/language_module.py:244 with pipeline stages, and by
    optimizer/distrib_optimizer.py:1089.
    """
    return tensor


def tensor_type(name: str) -> str:
    """Return a CUDA name such as "torch.cuda.FloatTensor" for `Tensor.type()`.

    optimizer/optimizer.py:671 and optimizer/distrib_optimizer.py:361 compare the types of parameters with CUDA names,
    where the optimizer has float32 copies of bfloat16 parameters.
    """
    return name.replace("torch.", "torch.cuda.")


class _CudaLiterals(TorchFunctionMode):
    """Makes torch functions accept CUDA devices and names in the main thread, and use the CPU."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            return tensor_type(func(*args))
        if func is torch.Tensor.cuda:
            return tensor_cuda(args[0])
        if not kwargs:
            return func(*args)
        return func(*args, **device_literal(kwargs))


def patch_current_device() -> None:
    """Make `torch.cuda.current_device` return the CPU.

    Called by optimizer/optimizer.py:1141, and by checkpoints and pipeline schedules of megatron-core."""
    torch.cuda.current_device = lambda: CPU  # type: ignore[assignment]


def patch_synchronize() -> None:
    """Make `torch.cuda.synchronize` do nothing.

    dist_checkpointing/strategies/filesystem_async.py:230 waits for copies from the GPU before it writes."""
    torch.cuda.synchronize = lambda device=None: None


class Stream:
    """A CUDA stream whose work is done when it was started."""

    def __init__(self, device: Any = None):
        pass

    def wait_stream(self, stream: "Stream") -> None:
        """Do nothing, because the other stream has no pending work."""


def patch_streams() -> None:
    """Replace CUDA streams by `Stream`. `torch.cuda.stream` does nothing without CUDA.

    transformer/moe/shared_experts.py:123, 162 and 277 computes shared experts in a separate stream
    (`moe_shared_expert_overlap`). distributed/distributed_data_parallel.py:230 creates a stream if the distributed
    optimizer has several instances, for which param_and_grad_buffer.py:422 and 529 waits. Line 632 of 0.19 requests the
    current stream before it sums gradients.
    """
    torch.cuda.Stream = Stream  # type: ignore[assignment, misc]
    torch.cuda.current_stream = lambda device=None: Stream()  # type: ignore[assignment, misc]
    torch.cuda.default_stream = lambda device=None: Stream()  # type: ignore[assignment, misc]


def patch_rng_state() -> None:
    """Replace the state of the CUDA random number generator by that of the CPU's generator.

    tensor_parallel/random.py:55-60, 235 and 422 saves the generator's state when seeds are set, with sequence
    parallelism, and around recomputation.
    """
    random._get_cuda_rng_state = lambda device="cuda", clone=False, graph_safe=False: torch.get_rng_state()
    random._set_cuda_rng_state = lambda new_state, device=-1, graph_safe=False: torch.set_rng_state(new_state)
    torch.cuda.get_rng_state = lambda device="cuda": torch.get_rng_state()
    torch.cuda.manual_seed = lambda seed: torch.manual_seed(seed)  # type: ignore[assignment, misc]


def patch_alltoall_dispatcher() -> None:
    """Skip the copy of token counts to the CPU.

    transformer/moe/token_dispatcher.py:445 opens a CUDA stream, on which :871 copies the counts. Here the counts are
    already on the CPU, and are converted to lists for torch.distributed (moe_utils.py:1093).
    """

    def counts_to_numbers(self: Any, point: str, tokens_per_expert: Any = None) -> Any:
        for name in ("input_splits", "output_splits"):
            splits = getattr(self, name)
            if isinstance(splits, torch.Tensor):
                setattr(self, name, splits.tolist())
        return tokens_per_expert

    MoEAlltoAllTokenDispatcher.cuda_dtoh_stream = object()  # type: ignore[assignment]  # only compared with None
    MoEAlltoAllTokenDispatcher._maybe_dtoh_and_synchronize = counts_to_numbers


def run_eagerly() -> None:
    """Disable compilation.

    jit.py:21 compiles fusible functions (including the router's counts), and does so again for each length of rows. On
    a CPU compilation requires a C++ compiler, and takes longer than it saves.
    """
    torch.compiler.set_stance("force_eager")


_mode: _CudaLiterals | None = None


def install() -> None:
    """Apply all shims to this process. No effect if CUDA is available, or if this was called before."""
    global _mode
    if _mode is not None or torch.cuda.is_available():
        return
    patch_current_device()
    patch_synchronize()
    patch_streams()
    patch_rng_state()
    patch_alltoall_dispatcher()
    run_eagerly()
    _mode = _CudaLiterals()
    _mode.__enter__()  # never left, because megatron-core uses CUDA names in every step
