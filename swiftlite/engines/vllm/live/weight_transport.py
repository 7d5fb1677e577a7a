"""Transport buckets of weights to the workers of a running vLLM: as files, or from GPU to GPU.

Each transport has a backend in the workers (`weight_transfer.py`), which `plugin.py` registers under its name in
BACKENDS. The transports from GPU to GPU use vLLM's senders; vLLM is imported when such a transport connects.
"""

import socket
from collections.abc import Sequence
from typing import Any, Protocol

import torch

from swiftlite.args.serving_fields import WeightTransport
from swiftlite.base.errors import UserError
from swiftlite.engines.loading.weight_update import Bucket, Part, bucket_file
from swiftlite.engines.vllm.live.ipc_handle import as_plain_values

BACKENDS: dict[WeightTransport, str] = {"file": "swiftlite", "nccl": "swiftlite_nccl", "ipc": "swiftlite_ipc"}

_CPU = torch.device("cpu")
_WHOLE_BUCKET = 1 << 62
"""Maximum bytes of vLLM's send buffer. It is so large that each bucket is a single broadcast; vLLM allocates only the
size of the content. With several broadcasts per bucket, this process would hang if a worker rejected a tensor between
two broadcasts.
"""


class TransferClient(Protocol):
    """The calls of vLLM's weight-transfer API, to an engine in this process or to a server.

    The first four methods are those of vLLM's `VLLMWeightSyncClient`, so that vLLM's senders accept this class.

    Attributes:
        part: the model that receives the next transfer: target or draft.
    """

    part: Part

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None: ...

    def start_weight_update(self) -> None: ...

    def update_weights(self, update_info: Any) -> None: ...

    def finish_weight_update(self, weight_version: str | None = None) -> None: ...

    def reset_prefix_cache(self) -> bool: ...


class Transport(Protocol):
    """A transport to the workers of one engine.

    Attributes:
        device: device of the tensors in a bucket.
    """

    device: torch.device

    def connect(self) -> None:
        """Connect to the workers; repeated calls have no effect."""
        ...

    def send(self, bucket: Bucket) -> None:
        """Send a bucket to all workers. The workers have received it when this method returns."""
        ...

    def close(self) -> None:
        """Disconnect from the workers."""
        ...


def make_transport(
    name: WeightTransport, client: TransferClient, num_workers: int, server: str = "127.0.0.1"
) -> Transport:
    """Create the transport `name` to the workers of an engine.

    Args:
        num_workers: number of processes of the engine that hold a part of the model.
        server: host of the engine, as seen from this process.

    Raises:
        UserError: the transport does not support several workers, or the host is unknown.
    """
    if name == "file":
        return Files(client)
    if name == "nccl":
        return Nccl(client, num_workers, own_address(server))
    if num_workers > 1:
        raise UserError(
            f"weight_transport ipc does not support {num_workers} workers: it uses the memory of one GPU",
            "use weight_transport nccl, or start the engine with one worker on the trainer's GPU",
        )
    return Ipc(client)


class Files:
    """Transport by safetensors files in the temporary directory, which the trainer and the workers can both access."""

    device = _CPU

    def __init__(self, client: TransferClient):
        self._client = client

    def connect(self) -> None:
        """Do nothing, because files need no connection."""

    def send(self, bucket: Bucket) -> None:
        with bucket_file(bucket) as path:
            self._client.update_weights({"path": str(path)})

    def close(self) -> None:
        """Do nothing, because no connection is open."""


class Nccl:
    """Transport by NCCL: one broadcast per bucket from this process's GPU to all workers, with vLLM's sender.

    As always with NCCL, this process hangs if a worker dies during a broadcast.

    Args:
        address: address of this machine, to which the workers connect.
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
            # This process and all workers.
            world_size=1 + self._num_workers,
            packed_buffer_size_bytes=_WHOLE_BUCKET,
        )
        # vLLM's sender starts and finishes a transfer for each call, but a model is complete only after all buckets.
        client: Any = _WithinTransfer(self._client)
        self._sender = NCCLTrainerWeightTransferEngine.trainer_init(info, client=client, source=_source_of({}))

    def send(self, bucket: Bucket) -> None:
        self._sender.source = _source_of(bucket)
        self._sender.send_weights()

    def close(self) -> None:
        if self._sender is not None:
            self._sender.shutdown()


class Ipc:
    """Transport by CUDA IPC: a single worker on the same GPU copies from a buffer of this process."""

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
        # The buffer has exactly the size of the bucket, so that it is sent as one chunk.
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
        torch.cuda.ipc_collect()  # frees the buffer

    def close(self) -> None:
        """Do nothing, because no connection is open."""


class _WithinTransfer:
    """A `TransferClient` for senders that treat each bucket of a transfer as a complete transfer."""

    def __init__(self, client: TransferClient):
        self.init_weight_transfer_engine = client.init_weight_transfer_engine
        self.update_weights = client.update_weights

    def start_weight_update(self) -> None:
        """Do nothing, because the channel has started the transfer."""

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Do nothing, because the channel finishes the transfer."""


def _source_of(bucket: Bucket) -> Any:
    """Wrap a bucket as a `WeightSource` of vLLM."""
    from swiftlite.engines.vllm.live.weight_source import BucketSource

    return BucketSource(bucket)


def own_gpu() -> torch.device | None:
    """Return the GPU of this process; None without a GPU."""
    if not torch.cuda.is_available():
        return None
    return torch.device("cuda", torch.cuda.current_device())


def check_gpus(name: WeightTransport, devices: Sequence[int]) -> None:
    """Check that a transport works from the GPU of this process.

    Args:
        devices: indices of the engine's GPUs on this machine; empty if the engine is on another machine.

    Raises:
        UserError: the transport is unknown, this process has no GPU, or "nccl" would send to this process's own GPU.
    """
    if name not in BACKENDS:
        raise UserError(f"unknown weight_transport {name}", f"use {', '.join(BACKENDS)}")
    if name == "file":
        return
    gpu = own_gpu()
    if gpu is None:
        raise UserError(f"weight_transport {name} requires a GPU in this process", "use weight_transport file")
    # NCCL does not connect two processes on one GPU.
    if name == "nccl" and gpu.index in devices:
        raise UserError(
            f"weight_transport nccl requires two GPUs, but this process and the engine both use GPU {gpu.index}",
            "use other devices for the engine, or weight_transport ipc",
        )


def own_address(server: str) -> str:
    """Return the network address at which `server` can reach this machine.

    Raises:
        UserError: `server` is not reachable.
    """
    try:
        family, kind, _, _, address = socket.getaddrinfo(server, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)  # a datagram socket sends nothing here
            return probe.getsockname()[0]
    except OSError as error:
        raise UserError(f"{server} is not reachable: {error}", "check the server's address") from error
