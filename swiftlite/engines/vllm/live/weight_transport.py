"""Transport buckets of weights to the workers of a running vLLM: as files, or from GPU to GPU.

Each transport has a backend in the workers, in `weight_transfer.py`, which `plugin.py` registers under its name in
BACKENDS. The GPU transports are vLLM's own; vLLM is imported when one of them connects.
"""

import socket
from collections.abc import Sequence
from typing import Any, Protocol

import torch

from swiftlite.args.fields import WeightTransport
from swiftlite.engines.loading.weight_update import Bucket, Part, bucket_file
from swiftlite.engines.vllm.live.ipc_handle import as_plain_values
from swiftlite.errors import UserError

BACKENDS: dict[WeightTransport, str] = {"file": "swiftlite", "nccl": "swiftlite_nccl", "ipc": "swiftlite_ipc"}

_CPU = torch.device("cpu")
_WHOLE_BUCKET = 1 << 62
"""Bytes of a buffer of vLLM's, which is made as large as what goes in, so a bucket is one broadcast. A worker that
refuses a tensor has received the whole bucket by then; between two broadcasts its error would leave this process
waiting."""


class TransferClient(Protocol):
    """The calls of vLLM's weight-transfer API, in this process or to a server.

    The first four are vLLM's own protocol of a client, `VLLMWeightSyncClient`, so its senders take one too.

    Attributes:
        part: which model the next transfer is for.
    """

    part: Part

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None: ...

    def start_weight_update(self) -> None: ...

    def update_weights(self, update_info: Any) -> None: ...

    def finish_weight_update(self, weight_version: str | None = None) -> None: ...

    def reset_prefix_cache(self) -> bool: ...


class Transport(Protocol):
    """A way to the workers of one engine.

    Attributes:
        device: where the tensors of a bucket are wanted.
    """

    device: torch.device

    def connect(self) -> None:
        """Meet the workers; does nothing the second time."""
        ...

    def send(self, bucket: Bucket) -> None:
        """Bring a bucket to all workers, which have it when this returns."""
        ...

    def close(self) -> None:
        """Part from the workers."""
        ...


def make_transport(
    name: WeightTransport, client: TransferClient, num_workers: int, server: str = "127.0.0.1"
) -> Transport:
    """The way of that name to the workers of an engine.

    Args:
        num_workers: processes of the engine that hold a part of the model.
        server: host of the engine, as this process reaches it.

    Raises:
        UserError: this way does not reach all of the workers, or no server is known by that name.
    """
    if name == "file":
        return Files(client)
    if name == "nccl":
        return Nccl(client, num_workers, own_address(server))
    if num_workers > 1:
        raise UserError(
            f"weights through the memory of one GPU (ipc), and an engine of {num_workers} workers on as many GPUs",
            "send them with nccl, or start the engine on the trainer's GPU alone",
        )
    return Ipc(client)


class Files:
    """Safetensors files in the temporary directory, which both sides see."""

    device = _CPU

    def __init__(self, client: TransferClient):
        self._client = client

    def connect(self) -> None:
        """Files need no connection."""

    def send(self, bucket: Bucket) -> None:
        with bucket_file(bucket) as path:
            self._client.update_weights({"path": str(path)})

    def close(self) -> None:
        """Nothing is open."""


class Nccl:
    """One broadcast for each bucket, from this process's GPU to those of all workers, by vLLM's own sender.

    It waits for a worker that dies in the middle of a broadcast, as NCCL does.

    Args:
        address: of this machine, where the workers meet this process.
    """

    def __init__(self, client: TransferClient, num_workers: int, address: str):
        self._client, self._num_workers, self._address = client, num_workers, address
        self._sender: Any = None
        self.device = own_gpu() or _CPU

    def connect(self) -> None:
        if self._sender is not None:
            return
        from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo, NCCLTrainerWeightTransferEngine
        from vllm.utils.network_utils import get_open_port

        info = NCCLTrainerInitInfo(
            rank=0,
            master_address=self._address,
            master_port=get_open_port(),
            world_size=1 + self._num_workers,
            packed_buffer_size_bytes=_WHOLE_BUCKET,
        )
        client: Any = _WithinTransfer(self._client)
        self._sender = NCCLTrainerWeightTransferEngine.trainer_init(info, client=client, source=_source_of({}))

    def send(self, bucket: Bucket) -> None:
        self._sender.source = _source_of(bucket)
        self._sender.send_weights()

    def close(self) -> None:
        if self._sender is not None:
            self._sender.shutdown()


class Ipc:
    """A buffer on this process's GPU, from which the only worker copies; it computes on the same one."""

    def __init__(self, client: TransferClient):
        self._client = client
        self._is_connected = False
        self.device = own_gpu() or _CPU

    def connect(self) -> None:
        if not self._is_connected:
            self._client.init_weight_transfer_engine({"packed": True})
            self._is_connected = True

    def send(self, bucket: Bucket) -> None:
        from vllm.distributed.weight_transfer.packed_tensor import packed_ipc_producer

        gpu = str(torch.cuda.get_device_properties(self.device).uuid)
        num_bytes = sum(tensor.nbytes for tensor in bucket.values())
        for chunk in packed_ipc_producer(iter(bucket.items()), gpu, lambda item: item[1], num_bytes):
            self._client.update_weights(
                {
                    "names": chunk.names,
                    "dtype_names": chunk.dtype_names,
                    "shapes": chunk.shapes,
                    "tensor_sizes": chunk.tensor_sizes,
                    "gpu": gpu,
                    "buffer": as_plain_values(chunk.ipc_handle[gpu]),
                }
            )
        torch.cuda.ipc_collect()  # the buffer, which the worker has let go

    def close(self) -> None:
        """Nothing is open."""


class _WithinTransfer:
    """A `TransferClient` for one bucket of a running transfer, for senders that treat a bucket as a complete
    transfer."""

    def __init__(self, client: TransferClient):
        self.init_weight_transfer_engine = client.init_weight_transfer_engine
        self.update_weights = client.update_weights

    def start_weight_update(self) -> None:
        """The channel has."""

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """The channel will."""


def _source_of(bucket: Bucket) -> Any:
    """One of vLLM's sources of weights."""
    from swiftlite.engines.vllm.live.weight_source import BucketSource

    return BucketSource(bucket)


def own_gpu() -> torch.device | None:
    """The GPU of this process, if it has one."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else None


def check_gpus(name: WeightTransport, devices: Sequence[int]) -> None:
    """Make sure that weights can go that way from the GPU of this process.

    Args:
        devices: GPUs of the engine on this machine, if any.

    Raises:
        UserError: this process has no GPU, or nccl would go to the GPU that it comes from.
    """
    if name not in BACKENDS:
        raise UserError(f"there is no weight_transport {name}", f"one of: {', '.join(BACKENDS)}")
    if name == "file":
        return
    gpu = own_gpu()
    if gpu is None:
        raise UserError(f"weight_transport {name} goes between GPUs, and this process has none", "use file")
    if name == "nccl" and gpu.index in devices:
        raise UserError(
            f"weight_transport nccl goes between two GPUs, and this process has GPU {gpu.index} as the engine has",
            "give the engine other devices, or use ipc",
        )


def own_address(server: str) -> str:
    """The address of this machine in the network in which it reaches another one."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(server, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)  # of a datagram socket: nothing is sent
            return probe.getsockname()[0]
    except OSError as error:
        raise UserError(f"this machine does not reach {server}: {error}", "check the server's address") from error
