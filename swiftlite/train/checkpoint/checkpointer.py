"""Write and read the checkpoints of a run, in megatron-core's distributed format; each write is atomic.

A checkpoint is written under a hidden temporary name, flushed to disk and renamed. A directory named `checkpoint-N` is
therefore always complete. No random state is stored, because data order and the seed of dropout are functions of the
step.
"""

import os
import pickle
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelLoadStrategyWrapper,
    FullyParallelSaveStrategyWrapper,
)
from megatron.core.dist_checkpointing.strategies.torch import TorchDistLoadShardedStrategy
from megatron.core.dist_checkpointing.utils import add_prefix_for_sharding
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.transformer.module import MegatronModule
from torch.distributed.checkpoint.api import CheckpointException

from swiftlite.base.atomic import fsync_tree, sync
from swiftlite.base.errors import UserError, is_of_storage, reason_of
from swiftlite.base.log import logger
from swiftlite.runtime.compat import ASYNC_WRITER, write_common
from swiftlite.runtime.mesh import Mesh
from swiftlite.store.best import chosen_checkpoint
from swiftlite.store.copies import Copies
from swiftlite.store.manifest import write_manifest
from swiftlite.store.retention import EPHEMERAL_FILE, EPHEMERAL_TEXT, delete_checkpoint, delete_oldest
from swiftlite.train.checkpoint.adapter_state import with_adapters
from swiftlite.train.checkpoint.files import SaveStrategy
from swiftlite.train.checkpoint.metadata import check_metadata
from swiftlite.train.checkpoint.optimizer_state import set_state, slots_of, state_to_load, state_to_save
from swiftlite.train.checkpoint.state import STATE_FILE, USE_ANOTHER, CheckpointState
from swiftlite.train.checkpoint.verification import damage_of

# Exceptions when a checkpoint is truncated or lacks requested tensors.
_DAMAGES = (
    OSError,
    EOFError,
    ValueError,
    pickle.UnpicklingError,
    dist_checkpointing.core.CheckpointingException,
    CheckpointException,
)

REFERENCE = "reference."
"""Prefix of the tensors of a reference model in a checkpoint."""
_OF_TORCH_READER = "PytorchStreamReader"  # part of the message of the RuntimeError for an incomplete archive


def resolve_checkpoint(path: Path) -> Path:
    """Return the checkpoint that a path refers to: the path itself, or that of a run's directory (`chosen_checkpoint`).

    Raises:
        UserError: the path is neither a checkpoint nor a directory with checkpoints.
    """
    if (path / STATE_FILE).is_file():
        return path
    if checkpoint := chosen_checkpoint(path):
        return checkpoint
    raise UserError(f"{path} has no checkpoint", "use a run's output_dir or one of its checkpoint-N directories")


@dataclass
class Checkpointer:
    """Writes the checkpoints of a run; its methods are collective.

    Attributes:
        output_dir: directory of the run.
        mesh: the ranks that hold the model.
        chunks: the bare model, without wrappers, one per virtual pipeline stage.
        optimizer: the optimizer whose state is written; None writes weights only.
        state: what is stored with the tensors; `save` adds the step.
        keep: number of newest checkpoints to keep, besides an ephemeral one; None keeps all.
        is_async: whether a subprocess writes while training continues; the checkpoint gets its name when it is
            complete.
        hint: advice in the error message if a checkpoint cannot be written.
        copies: copies complete checkpoints to a store; None without `--checkpoint_store`.
        reference: chunks of a reference model that changes in training, whose weights are written too.
    """

    output_dir: Path
    mesh: Mesh
    chunks: Sequence[MegatronModule]
    optimizer: MegatronOptimizer | None
    state: CheckpointState
    keep: int | None = None
    is_async: bool = False
    hint: str = "free disk space or repair the disk; the same command with --resume continues from the last checkpoint"
    copies: Copies | None = None
    reference: Sequence[MegatronModule] = ()
    _queue: AsyncCallsQueue = field(default_factory=AsyncCallsQueue)
    _strategy: SaveStrategy = field(default_factory=SaveStrategy)

    def __post_init__(self):
        # Ranks with equal tensors write about equally many bytes. Which rank writes which tensor is decided once.
        self._divided = FullyParallelSaveStrategyWrapper(self._strategy, self.mesh.dp_cp, do_cache_distribution=True)

    def save(self, step: int, data_state: Mapping[str, Any] | None = None, *, is_ephemeral: bool = False) -> None:
        """Write `checkpoint-STEP`, then delete the oldest checkpoints. With `is_async`, return before the files are
        written.

        Args:
            data_state: fields of `CheckpointState` that describe the position in the data, on the first rank.
            is_ephemeral: whether the checkpoint is deleted when a newer one is complete.

        Raises:
            UserError: the checkpoint (with `is_async`, the previous checkpoint) cannot be written; its files are
                deleted.
        """
        # One save at a time: `_delete_unfinished` would delete the files of the one before.
        self.finish()
        temporary = self._temporary(step)
        with self._whole_or_absent():
            if dist.get_rank() == 0:
                self._delete_unfinished()
                temporary.mkdir(parents=True)
            # All ranks write into this directory.
            dist.barrier()
            request = dist_checkpointing.save(
                self._tensors(),
                str(temporary),
                self._divided,  # pyright: ignore[reportArgumentType]
                async_sharded_save=self.is_async,
                **ASYNC_WRITER,
            )
            # Before an asynchronous save is published: until then, the position in the data moves on.
            state = replace(self.state, step=step, **(data_state or {}))
            if request is None:
                self._publish(state, is_ephemeral)
            else:
                request.add_finalize_fn(partial(self._publish, state, is_ephemeral))
                self._queue.schedule_async_request(request)

    def clean_up(self) -> None:
        """Delete incomplete checkpoints of a killed run, and old checkpoints that it did not delete before it was
        killed.
        """
        if dist.get_rank() == 0:
            self._delete_unfinished()
            self._delete_oldest()

    def poll(self) -> None:
        """Rename an asynchronous checkpoint if all ranks have written it; collective.

        Raises:
            UserError: the checkpoint cannot be written; its files are deleted.
        """
        if self.is_async:
            with self._whole_or_absent():
                self._queue.maybe_finalize_async_calls()

    def finish(self) -> None:
        """Wait until the asynchronous checkpoint is written and renamed.

        Raises:
            UserError: the checkpoint cannot be written; its files are deleted.
        """
        if self.is_async:
            with self._whole_or_absent():
                self._queue.maybe_finalize_async_calls(blocking=True)

    @contextmanager
    def _whole_or_absent(self) -> Iterator[None]:
        """If an exception ends this context, delete the files that were written in it, so that a full disk becomes free
        again.
        """
        try:
            yield
        except CheckpointException as error:  # raised on all ranks; only the first rank knows the cause
            reason = [""]
            if error.failures:
                reason = [reason_of(next(iter(error.failures.values()))[0])]
            dist.broadcast_object_list(reason)
            self._delete_unfinished()
            raise self._not_written(reason[0]) from None
        except Exception as error:
            self._delete_unfinished()
            if is_of_storage(error) or isinstance(error, OSError):
                raise self._not_written(reason_of(error)) from None
            raise

    def _not_written(self, reason: str) -> UserError:
        return UserError(f"{self.output_dir}: a checkpoint cannot be written: {reason}", self.hint)

    def _delete_unfinished(self) -> None:
        """On the first rank, delete the files of interrupted saves."""
        if dist.get_rank() == 0:
            for unfinished in self.output_dir.glob(".checkpoint-*"):
                shutil.rmtree(unfinished, ignore_errors=True)

    def _temporary(self, step: int) -> Path:
        return self.output_dir / f".checkpoint-{step}.writing"

    def _tensors(self) -> dict[str, Any]:
        """Return the weights and, if there is an optimizer, the part of its state on this rank."""
        tensors = sharded_model(self.chunks, self.mesh)
        if self.optimizer is not None:
            slot_state = state_to_save(slots_of(self.optimizer), dict(tensors))
            if slot_state:
                tensors["optimizer"] = slot_state
        return tensors | sharded_model(self.reference, self.mesh, REFERENCE)

    def _publish(self, state: CheckpointState, is_ephemeral: bool) -> None:
        """Add the state and the manifest to the files that all ranks have written, and rename the checkpoint."""
        final = self.output_dir / f"checkpoint-{state.step}"
        written: list[Any] = [None] * dist.get_world_size()
        # Each rank knows only the digests of the files that it has written.
        dist.all_gather_object(written, self._strategy.written.digests)
        if dist.get_rank() == 0:
            temporary = self._temporary(state.step)
            (temporary / STATE_FILE).write_text(state.to_json())
            if is_ephemeral:
                (temporary / EPHEMERAL_FILE).write_text(EPHEMERAL_TEXT)
            write_common(temporary)
            write_manifest(temporary, dict(chain.from_iterable(rank.items() for rank in written)))
            # Before the rename: after a power failure, a name on the disk must not refer to files that are not.
            fsync_tree(temporary)
            # A rename replaces no directory with files.
            if final.exists():
                delete_checkpoint(final)
            temporary.rename(final)
            # The new name is content of the directory, which must reach the disk as well.
            sync(self.output_dir)
            logger.info("saved %s", final.name)
        dist.barrier()
        # On every rank, after the barrier: each copies a share of the files, under their final name.
        if self.copies:
            self.copies.add(final)
        if dist.get_rank() == 0:
            self._delete_oldest()

    def _delete_oldest(self) -> None:
        in_use: set[Path] = set()
        if self.copies:
            in_use = self.copies.in_use
        delete_oldest(self.output_dir, self.keep, in_use)


def load_checkpoint(
    checkpoint: Path,
    mesh: Mesh,
    chunks: Sequence[MegatronModule],
    optimizer: MegatronOptimizer | None = None,
    *,
    with_heads: bool = True,
    is_verified: bool = False,
    prefix: str = "",
) -> None:
    """Load a checkpoint's weights into this rank's chunks and, if `optimizer` is given, the optimizer state into the
    optimizer.

    Args:
        mesh: the ranks that hold the model.
        with_heads: whether MTP layers are read too; otherwise the MTP layers of `chunks` keep their weights.
        is_verified: whether the files have been verified already (`damage_of`).
        prefix: `REFERENCE` for the weights of the reference model.

    Raises:
        UserError: the checkpoint is damaged or belongs to another model.
    """
    if not is_verified and (problem := damage_of(checkpoint)):
        raise UserError(f"{checkpoint} is damaged: {problem}", USE_ANOTHER)

    def is_loaded(key: str) -> bool:
        return not _is_extra(key) and (with_heads or not key.startswith("mtp."))

    tensors = sharded_model(chunks, mesh, prefix)
    for name, state in tensors.items():
        tensors[name] = {key: state[key] for key in state if is_loaded(key)}
    slots = slots_of(optimizer) if optimizer is not None else []
    if state := state_to_load(slots, dict(tensors)):
        tensors["optimizer"] = state
    try:
        check_metadata(checkpoint)
        with _weights_only():
            # Each tensor is read by one of the ranks that need it, which sends it to the others.
            divided = FullyParallelLoadStrategyWrapper(TorchDistLoadShardedStrategy(), mesh.dp_cp)
            loaded: Any = dist_checkpointing.load(tensors, str(checkpoint), divided)  # pyright: ignore[reportArgumentType]
    except (*_DAMAGES, RuntimeError) as error:
        # Others, such as those of NCCL, say nothing about the files.
        if isinstance(error, RuntimeError) and _OF_TORCH_READER not in str(error):
            raise
        reason = (str(error).strip().splitlines() or [type(error).__name__])[-1]
        raise UserError(
            f"{checkpoint} is damaged, or belongs to another model: {reason[:200]}",
            f"{USE_ANOTHER}; the model must be the one that the run started from",
        ) from error
    for name, chunk in zip(_chunk_names(chunks, prefix), chunks, strict=True):
        found = chunk.load_state_dict(loaded[name], strict=False)
        missing = [key for key in found.missing_keys if not _is_extra(key)]
        assert not found.unexpected_keys
        assert not missing or not with_heads, missing
    if slots:
        set_state(slots, loaded.get("optimizer", {}), CheckpointState.read(checkpoint).num_updates)


@contextmanager
def _weights_only() -> Iterator[None]:
    """Let torch.load load only tensors in this context, so that it runs no code.

    When torch itself loads objects of a distributed checkpoint, it allows other classes
    (torch/distributed/checkpoint/default_planner.py, load_bytes).
    """
    name = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        os.environ.pop(name)
        if before is not None:
            os.environ[name] = before


def sharded_model(chunks: Sequence[MegatronModule], mesh: Mesh, prefix: str = "") -> dict[str, Any]:
    """Return the sharded weights, whose names in the checkpoint begin with the prefix.

    Each tensor has its place in the whole model, so that checkpoints do not depend on the layout.
    """
    states = {}
    for name, chunk in zip(_chunk_names(chunks, prefix), chunks, strict=True):
        state = chunk.sharded_state_dict(metadata={"dp_cp_group": mesh.dp_cp})
        # Transformer Engine's layers also have FP8 state, which is not saved here. Local layers have an empty value for
        # its key, which is written as in megatron-core and never read.
        state = {key: value for key, value in state.items() if not (_is_extra(key) and value.data is not None)}
        states[name] = with_adapters(state, chunk, mesh)
        add_prefix_for_sharding(states[name], prefix)
    return states


def _is_extra(key: str) -> bool:
    """Return whether this is an entry that only Transformer Engine's layers write."""
    return key.endswith("_extra_state")


def _chunk_names(chunks: Sequence[MegatronModule], prefix: str) -> list[str]:
    """Return the key of each chunk's tensors; checkpoints do not contain it."""
    return [f"{prefix}model{number}" for number in range(len(chunks))]
