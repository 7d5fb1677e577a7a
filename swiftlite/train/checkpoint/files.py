"""The files of a checkpoint: how they are written, their digests, and whether they are still the same when read.

megatron-core writes with two forks of the trainer, and a server process takes their results. That server dies of a
signal to the process group, the save with it, and all of them outlive a trainer that is killed. Here threads write: of
the trainer itself or, in an asynchronous save, of one fork, which ends with it.
"""

import hashlib
import os
import pickle
import queue
import signal
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy

from swiftlite.runtime.parent import exit_with_parent

MANIFEST_FILE = "SHA256SUMS"  # as sha256sum writes it: `sha256sum -c SHA256SUMS` verifies a checkpoint too
_HASHING_THREADS = 4


class SaveStrategy(TorchDistSaveShardedStrategy):
    """megatron-core's format, written by threads.

    Attributes:
        written: what the writer of the newest save reported.
    """

    def __init__(self):
        super().__init__("torch_dist", 1)
        self.written = WriterReport()

    def _get_save_and_finalize_callbacks(self, writer: FileSystemWriterAsync, *planned: Any) -> AsyncRequest:
        self.written = WriterReport()
        if writer.write_buckets:
            writer.results_queue = self.written  # pyright: ignore[reportAttributeAccessIssue]
        request = super()._get_save_and_finalize_callbacks(writer, *planned)
        if request.async_fn is None:  # nothing of this checkpoint is written by this rank
            return request
        transforms = [writer.transforms] if hasattr(writer, "transforms") else []  # torch 2.6 has none
        return request._replace(async_fn=partial(write_buckets, os.getpid(), transforms))


class WriterReport:
    """A message from a writer, possibly a forked process, to its parent, in an anonymous file in memory.

    It does not depend on the size of a pipe, on disk space, or on a server.
    """

    def __init__(self):
        self.digests: dict[str, str] = {}
        self._file = os.fdopen(os.memfd_create("checkpoint"), "w+b")  # it ends with the last process that holds it

    def put(self, content: tuple[Any, dict[str, str]]) -> None:
        pickle.dump(content, self._file)
        self._file.flush()

    def get_nowait(self) -> Any:
        """Return the results for megatron-core, or the error instead, and set `digests`.

        Raises:
            queue.Empty: the writer ended without a word.
        """
        self._file.seek(0)
        try:
            results, self.digests = pickle.load(self._file)
        except EOFError:
            raise queue.Empty from None
        return results


def write_buckets(trainer: int, transforms: list[Any], rank: int, buckets: Sequence[Any], report: WriterReport) -> None:
    """Write the files of this rank, one thread per file, and report results and digests.

    Args:
        trainer: process id of the trainer; this process may be a fork of it.
        transforms: torch's transforms of written data; none are registered here.
        buckets: (path, file name, data) as planned by megatron-core.
    """
    if os.getpid() != trainer:
        exit_with_parent(trainer)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)  # they are for the trainer, which waits for what is written here
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
    """Write one file; its results or the exception, and its digest."""
    outcomes: Any = queue.Queue()  # what megatron-core has between processes
    pending: Any = queue.Queue()
    pending.put(number)
    FileSystemWriterAsync.write_preloaded_data(transforms, number, bucket, outcomes, pending, True)
    _, result = outcomes.get()
    if isinstance(result, Exception):
        return result, ""
    return result, sha256(Path(bucket[0]))


def _cause(error: BaseException) -> Exception:
    """Return the operating system's error behind torch's, if there is one: "unexpected pos 704 vs 598" is a full
    disk."""
    found: BaseException | None = error
    while found is not None and not isinstance(found, OSError):
        found = found.__context__
    return found or Exception(f"{type(error).__name__}: {error}")


def sha256(path: Path) -> str:
    """Compute the digest of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_manifest(checkpoint: Path, written: Mapping[str, str]) -> None:
    """List every file of the checkpoint with its digest.

    Args:
        written: digests that are known already, by file name.
    """
    digests = dict(written)
    for path in checkpoint.iterdir():
        if path.name not in digests:
            digests[path.name] = sha256(path)
    lines = [f"{digest}  {name}\n" for name, digest in sorted(digests.items())]
    (checkpoint / MANIFEST_FILE).write_text("".join(lines), encoding="utf-8")


def read_manifest(checkpoint: Path) -> dict[str, str] | None:
    """Read the digests by file name; None for a checkpoint that was written without.

    Raises:
        ValueError: it is damaged.
    """
    try:
        lines = (checkpoint / MANIFEST_FILE).read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return None
    digests = {}
    for line in lines:
        digest, _, name = line.partition("  ")
        if not name or Path(name).name != name:
            raise ValueError(f"{MANIFEST_FILE}: {line[:80]!r} is not a digest and a file name")
        digests[name] = digest
    return digests


def changed_files(checkpoint: Path, digests: Mapping[str, str], names: Iterable[str]) -> list[str]:
    """Return the files that are missing or have another digest."""

    def has_changed(name: str) -> bool:
        path = checkpoint / name
        return not path.is_file() or sha256(path) != digests[name]

    names = list(names)
    with ThreadPoolExecutor(_HASHING_THREADS) as threads:
        return [name for name, changed in zip(names, threads.map(has_changed, names), strict=True) if changed]
