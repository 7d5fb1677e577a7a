"""Write the files of a checkpoint and compute their digests.

megatron-core writes with two forked processes, and a server process receives their results. If a signal is sent to the
process group, the server ends and the save fails. If the trainer is killed, all three processes keep running. Here
threads write: threads of the trainer or, in an asynchronous save, of one forked process that ends when the trainer
ends.
"""

import os
import pickle
import queue
import signal
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy

from swiftlite.runtime.parent import exit_with_parent
from swiftlite.store.manifest import sha256


class SaveStrategy(TorchDistSaveShardedStrategy):
    """A save strategy that writes megatron-core's format with threads.

    Attributes:
        written: report of the writer of the newest save.
    """

    def __init__(self):
        super().__init__("torch_dist", 1)
        self.written = WriterReport()

    def async_save(self, sharded_state_dict: Any, *args: Any, **options: Any) -> AsyncRequest:
        """Start a save, without the copies that megatron-core makes of tensors that share their storage with others.

        For example, it would copy the weights, moments and main weights of all gate and up projections at once, because
        each pair is one parameter.
        """
        for sharded in nested_values(sharded_state_dict):
            if isinstance(sharded, ShardedTensor) and sharded.data is not None:
                sharded.data = with_own_storage(sharded.data)
        return super().async_save(sharded_state_dict, *args, **options)

    def _get_save_and_finalize_callbacks(self, writer: FileSystemWriterAsync, *planned: Any) -> AsyncRequest:
        self.written = WriterReport()
        if writer.write_buckets:
            writer.results_queue = self.written  # pyright: ignore[reportAttributeAccessIssue]
        request = super()._get_save_and_finalize_callbacks(writer, *planned)
        if request.async_fn is None:  # this rank writes no file of the checkpoint
            return request
        transforms = [writer.transforms] if hasattr(writer, "transforms") else []  # torch 2.6 has no transforms
        return request._replace(async_fn=partial(write_buckets, os.getpid(), transforms))


def with_own_storage(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor on the same memory whose storage contains nothing else, if the tensor is contiguous and on the
    CPU; otherwise the tensor itself.

    torch.save writes the whole storage of a tensor.
    """
    if not (tensor.is_cpu and tensor.is_contiguous()):
        return tensor
    start = tensor.storage_offset() * tensor.element_size()
    storage = tensor.untyped_storage()[start : start + tensor.nbytes]
    return torch.empty(0, dtype=tensor.dtype).set_(storage, 0, tensor.shape, tensor.stride())


class WriterReport:
    """A message from a writer of files to its parent process, in an anonymous file in memory.

    The writer can be a forked process. The message does not depend on the capacity of a pipe, on disk space or on a
    server process.
    """

    def __init__(self):
        self.digests: dict[str, str] = {}
        self._file = os.fdopen(os.memfd_create("checkpoint"), "w+b")  # freed with its last process

    def put(self, content: tuple[Any, dict[str, str]]) -> None:
        pickle.dump(content, self._file)
        self._file.flush()

    def get_nowait(self) -> Any:
        """Return the results that megatron-core expects from a writer, or the writer's error, and set `digests`.

        Raises:
            queue.Empty: the writer ended without a report.
        """
        self._file.seek(0)
        try:
            results, self.digests = pickle.load(self._file)
        except EOFError:
            raise queue.Empty from None
        return results


def write_buckets(trainer: int, transforms: list[Any], rank: int, buckets: Sequence[Any], report: WriterReport) -> None:
    """Write the files of this rank with one thread per file, and report results and digests.

    Args:
        trainer: process id of the trainer. The current process is the trainer or a fork of it.
        transforms: torch's transforms of written data; swiftlite registers none.
        buckets: (path, file name, data) as planned by megatron-core.
    """
    if os.getpid() != trainer:
        exit_with_parent(trainer)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)  # the trainer handles them
    with ThreadPoolExecutor(len(buckets)) as threads:
        outcomes = list(threads.map(partial(_write_bucket, transforms), range(len(buckets)), buckets))
    results: dict[int, Any] = {}
    digests: dict[str, str] = {}
    for number, (result, digest) in enumerate(outcomes):
        if isinstance(result, Exception):
            report.put((_cause(result), {}))
            return
        results[number] = result
        digests[buckets[number][1]] = digest
    report.put((results, digests))


def _write_bucket(transforms: list[Any], number: int, bucket: Any) -> tuple[Any, str]:
    """Write one file. Return (its results, its digest), or (the exception that was raised, "")."""
    outcomes: Any = queue.Queue()  # megatron-core's function expects the queue that it uses between processes
    pending: Any = queue.Queue()
    pending.put(number)
    FileSystemWriterAsync.write_preloaded_data(transforms, number, bucket, outcomes, pending, True)
    _, result = outcomes.get()
    if isinstance(result, Exception):
        return result, ""
    return result, sha256(Path(bucket[0]))


def _cause(error: BaseException) -> Exception:
    """Return the operating system's error that caused an error of torch; without one, an exception with torch's
    message.

    For example, torch reports a full disk as "unexpected pos 704 vs 598".
    """
    found: BaseException | None = error
    while found is not None and not isinstance(found, OSError):
        found = found.__context__
    return found or Exception(f"{type(error).__name__}: {error}")
