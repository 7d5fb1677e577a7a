"""Checkpoints of a run: megatron-core's distributed format, each whole or not there.

A checkpoint is written under a hidden temporary name, flushed to disk and renamed, so a directory called
`checkpoint-N` is complete by construction, whatever happened in between. No random state is stored: data order is a
function of the step, and nothing draws random numbers while training.
"""

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.transformer.module import MegatronModule
from torch.distributed.checkpoint.api import CheckpointException

from swiftlite.errors import UserError
from swiftlite.log import logger
from swiftlite.plan.facts import run_checkpoints
from swiftlite.runtime.compat import ASYNC_WRITER, write_common
from swiftlite.train.optimizer_state import set_state, slots_of, state_to_load, state_to_save

STATE_FILE = "trainer_state.json"


def resolve_checkpoint(path: Path) -> Path:
    """The checkpoint a user means: one itself, or the newest of a run.

    Raises:
        UserError: neither.
    """
    if (path / STATE_FILE).is_file():
        return path
    if checkpoints := run_checkpoints(path):
        return checkpoints[-1]
    raise UserError(f"{path} holds no checkpoint", "give a run's output_dir or one of its checkpoint-N directories")


def read_state(checkpoint: Path) -> dict[str, Any]:
    """What trainer_state.json says: step, model depth and precision.

    Raises:
        UserError: it is not there, or damaged.
    """
    try:
        return json.loads((checkpoint / STATE_FILE).read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"{checkpoint / STATE_FILE} is damaged: {error}", "use the checkpoint before it") from None


@dataclass
class Checkpointer:
    """Writes the checkpoints of a run, by all ranks together.

    Attributes:
        output_dir: of the run.
        chunks: the bare model, without wrappers, one per virtual pipeline stage.
        optimizer: None writes weights alone.
        state: small JSON values stored beside the tensors.
        keep: how many of the newest stay; None keeps all.
        is_async: write in a process of its own while training goes on; the checkpoint gets its name once it is whole.
    """

    output_dir: Path
    chunks: Sequence[MegatronModule]
    optimizer: MegatronOptimizer | None
    state: Mapping[str, Any]
    keep: int | None = None
    is_async: bool = False
    _queue: AsyncCallsQueue = field(default_factory=AsyncCallsQueue, repr=False)

    def save(self, step: int, data_state: Mapping[str, Any] | None = None) -> None:
        """Write `checkpoint-STEP`, then delete all but the newest; returns early with `is_async`.

        Args:
            data_state: written beside `state`, by the first rank.
        """
        state = {"step": step, **self.state, **(data_state or {})}
        self.finish()
        temporary = self.output_dir / f".checkpoint-{step}.writing"
        if dist.get_rank() == 0:
            for stale in self.output_dir.glob(".checkpoint-*.writing"):
                shutil.rmtree(stale)
            temporary.mkdir(parents=True)
        dist.barrier()
        tensors = _model_state(self.chunks)
        slots = slots_of(self.optimizer) if self.optimizer is not None else []
        if slots and (slot_state := state_to_save(slots, dict(tensors))):  # another rank may have it all
            tensors["optimizer"] = slot_state
        request = dist_checkpointing.save(tensors, str(temporary), async_sharded_save=self.is_async, **ASYNC_WRITER)
        if request is None:
            self._publish(state)
        else:
            request.add_finalize_fn(partial(self._publish, state))
            self._queue.schedule_async_request(request)

    def poll(self) -> None:
        """Give its name to a checkpoint that has been written meanwhile; all ranks must call this together."""
        if self.is_async:
            self._queue.maybe_finalize_async_calls(blocking=False)

    def finish(self) -> None:
        """Wait for what is still being written."""
        if self.is_async:
            self._queue.maybe_finalize_async_calls(blocking=True)

    def _publish(self, state: Mapping[str, Any]) -> None:
        step = state["step"]
        final, temporary = self.output_dir / f"checkpoint-{step}", self.output_dir / f".checkpoint-{step}.writing"
        dist.barrier()
        if dist.get_rank() == 0:
            (temporary / STATE_FILE).write_text(json.dumps(state, indent=2))
            write_common(temporary)
            flush_to_disk(temporary)
            if final.exists():
                shutil.rmtree(final)
            temporary.rename(final)
            flush_to_disk(self.output_dir, contents=False)
            for old in run_checkpoints(self.output_dir)[: -self.keep] if self.keep else []:
                shutil.rmtree(old)
            logger.info("saved %s", final)
        dist.barrier()


def load_checkpoint(
    checkpoint: Path,
    chunks: Sequence[MegatronModule],
    optimizer: MegatronOptimizer | None = None,
    *,
    with_heads: bool = True,
) -> None:
    """Read weights, and optimizer state if asked, into the objects of this rank.

    Args:
        with_heads: read MTP layers too; else they stay as they are.

    Raises:
        UserError: the checkpoint is damaged or belongs to another model.
    """
    tensors = _model_state(chunks)
    if not with_heads:
        tensors = {
            name: {key: tensor for key, tensor in state.items() if not key.startswith("mtp.")}
            for name, state in tensors.items()
        }
    slots = slots_of(optimizer) if optimizer is not None else []
    if slots:
        tensors["optimizer"] = state_to_load(slots, dict(tensors))
    damages = (OSError, EOFError, ValueError, dist_checkpointing.core.CheckpointingException, CheckpointException)
    try:
        loaded: Any = dist_checkpointing.load(tensors, str(checkpoint))
    except damages as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[-1]
        raise UserError(
            f"{checkpoint} is damaged, or belongs to another model: {reason[:200]}",
            "use the checkpoint before it, or the model that the run began with",
        ) from error
    for name, chunk in zip(_chunk_names(chunks), chunks, strict=True):
        chunk.load_state_dict(loaded[name], strict=with_heads)
    if slots:
        set_state(slots, loaded["optimizer"], read_state(checkpoint)["step"])


def _model_state(chunks: Sequence[MegatronModule]) -> dict[str, Any]:
    """The weights, each tensor with its place in the whole model; the layout does not show in it."""
    metadata = {"dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}
    return {
        name: chunk.sharded_state_dict(metadata=metadata)
        for name, chunk in zip(_chunk_names(chunks), chunks, strict=True)
    }


def _chunk_names(chunks: Sequence[MegatronModule]) -> list[str]:
    """megatron-core's names: `model`, or `model0`, `model1` for virtual stages."""
    return ["model"] if len(chunks) == 1 else [f"model{number}" for number in range(len(chunks))]


def flush_to_disk(directory: Path, contents: bool = True) -> None:
    """fsync a directory, and all files below it."""
    for path in (*directory.rglob("*"), directory) if contents else (directory,):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
