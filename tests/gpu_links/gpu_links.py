"""Replace NCCL and CUDA IPC on machines without a GPU: the functions that vLLM calls to send weights from GPU to GPU.

They use gloo and files. vLLM's senders and receivers run with these replacements in every process that has this
directory on PYTHONPATH, because this module is a plugin of vLLM. Streams, and defects that occur only on GPUs, are not
tested.
"""

import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore  # pyright: ignore[reportPrivateImportUsage]

_CPU = torch.device("cpu")
_buffers = tempfile.TemporaryDirectory(prefix="gpu-links-")


class GlooCommunicator:
    """Replaces vLLM's PyNcclCommunicator."""

    def __init__(self, group: Any, device: Any):
        self.rank, self.world_size = group.rank, group.world_size
        store = PrefixStore("weights", group.store)
        self._gloo: Any = dist.ProcessGroupGloo(store, group.rank, group.world_size, timedelta(seconds=60))

    def broadcast(self, tensor: torch.Tensor, src: int, stream: Any = None) -> None:
        options = dist.BroadcastOptions()
        options.rootRank = src
        self._gloo.broadcast([tensor], options).wait()

    def destroy(self) -> None:
        del self._gloo


class _TorchOfOneGpu:
    """The module torch, for code that uses a GPU and its streams."""

    cuda = SimpleNamespace(
        current_stream=lambda: SimpleNamespace(synchronize=lambda: None),
        stream=lambda stream: nullcontext(),
        get_device_properties=lambda device: SimpleNamespace(uuid="GPU-0"),
    )
    accelerator = SimpleNamespace(current_device_index=lambda: 0)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def empty(self, *sizes: Any, device: Any = "cpu", **options: Any) -> torch.Tensor:
        """Create a tensor. A tensor "on the GPU" is stored in a file, which another process can open."""
        if device != "cuda":
            return torch.empty(*sizes, device=device, **options)
        _, path = tempfile.mkstemp(dir=_buffers.name)
        buffer: Any = torch.from_file(path, shared=True, size=sizes[0], dtype=options["dtype"])
        buffer.path = path
        return buffer


def reduce_tensor(buffer: Any) -> tuple[Callable, tuple]:
    """Return what another process needs to open a buffer, like torch's function for a tensor on a GPU."""
    return rebuild_cuda_tensor, (
        *(torch.Tensor, buffer.size(), buffer.stride(), 0, torch.storage.TypedStorage, buffer.dtype, 0),
        *(buffer.path.encode(), buffer.numel(), 0, False, b"counter", 0, b"event", False),
    )


def rebuild_cuda_tensor(*arguments: Any) -> torch.Tensor:
    return torch.from_file(arguments[7].decode(), shared=True, size=arguments[8], dtype=arguments[5])


def install(replace: Callable[[Any, str, Any], None] = setattr) -> None:
    """Install the replacements. vLLM calls this function in each of its processes; it may be called repeatedly.

    Args:
        replace: sets an attribute. `setattr` sets it permanently.
    """
    from torch.multiprocessing import reductions
    from vllm.distributed.device_communicators import pynccl
    from vllm.distributed.weight_transfer import nccl_common, packed_tensor

    from swiftlite.engines.vllm.live import weight_transport

    replace(weight_transport, "own_gpu", lambda: _CPU)
    one_gpu = _TorchOfOneGpu()
    replace(pynccl, "PyNcclCommunicator", GlooCommunicator)
    replace(nccl_common, "torch", one_gpu)
    replace(packed_tensor, "torch", one_gpu)
    replace(packed_tensor, "_get_streams", lambda device, number: [one_gpu.cuda.current_stream()] * number)
    replace(packed_tensor, "reduce_tensor", reduce_tensor)
    replace(reductions, "rebuild_cuda_tensor", rebuild_cuda_tensor)
    replace(torch.cuda, "get_device_properties", one_gpu.cuda.get_device_properties)
    replace(torch.cuda, "ipc_collect", lambda: None)
