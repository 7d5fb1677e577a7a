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
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.transformer.module import MegatronModule
from torch.distributed.checkpoint.api import CheckpointException

from swiftlite.errors import UserError
from swiftlite.log import logger
from swiftlite.plan.facts import run_checkpoints
from swiftlite.runtime.compat import ASYNC_WRITER, write_common
from swiftlite.runtime.mesh import Mesh
from swiftlite.train.optimizer_state import set_state, slots_of, state_to_load, state_to_save

STATE_FILE = "trainer_state.json"


# What reading a checkpoint raises when bytes of it are missing, or when it has not the tensors that are asked for.
_DAMAGES = (OSError, EOFError, ValueError, dist_checkpointing.core.CheckpointingException, CheckpointException)


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
    """The content of trainer_state.json: the step, and what the run stored beside it.

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
        output_dir: the run's.
        mesh: the ranks that hold the model.
        chunks: the bare model, without wrappers, one per virtual pipeline stage.
        optimizer: None writes weights alone.
        state: small JSON values stored beside the tensors.
        keep: number of checkpoints that stay, the newest; None keeps all.
        is_async: write in a process of its own while training goes on; the checkpoint gets its name once it is whole.
    """

    output_dir: Path
    mesh: Mesh
    chunks: Sequence[MegatronModule]
    optimizer: MegatronOptimizer | None
    state: Mapping[str, Any]
    keep: int | None = None
    is_async: bool = False
    _queue: AsyncCallsQueue = field(default_factory=AsyncCallsQueue, repr=False)

    def save(self, step: int, data_state: Mapping[str, Any] | None = None) -> None:
        """Write `checkpoint-STEP`, then delete the oldest; returns early with `is_async`.

        Args:
            data_state: written beside `state`, by the first rank.
        """
        self.finish()
        temporary = self._temporary(step)
        if dist.get_rank() == 0:
            for stale in self.output_dir.glob(".checkpoint-*.writing"):
                shutil.rmtree(stale)
            temporary.mkdir(parents=True)
        dist.barrier()
        request = dist_checkpointing.save(
            self._tensors(), str(temporary), async_sharded_save=self.is_async, **ASYNC_WRITER
        )
        state = {"step": step, **self.state, **(data_state or {})}
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

    def _temporary(self, step: int) -> Path:
        return self.output_dir / f".checkpoint-{step}.writing"

    def _tensors(self) -> dict[str, Any]:
        """Weights, and the optimizer's state where this rank holds any of it."""
        tensors = sharded_model(self.chunks, self.mesh)
        if self.optimizer is not None:
            slot_state = state_to_save(slots_of(self.optimizer), dict(tensors))
            if slot_state:
                tensors["optimizer"] = slot_state
        return tensors

    def _publish(self, state: Mapping[str, Any]) -> None:
        """Complete what all ranks have written, and give it its name."""
        dist.barrier()
        if dist.get_rank() == 0:
            step = state["step"]
            temporary = self._temporary(step)
            final = self.output_dir / f"checkpoint-{step}"
            (temporary / STATE_FILE).write_text(json.dumps(state, indent=2))
            write_common(temporary)
            flush_to_disk(temporary)
            if final.exists():
                shutil.rmtree(final)
            temporary.rename(final)
            flush_to_disk(self.output_dir, contents=False)
            self._delete_oldest()
            logger.info("saved %s", final)
        dist.barrier()

    def _delete_oldest(self) -> None:
        if self.keep:
            for old in run_checkpoints(self.output_dir)[: -self.keep]:
                shutil.rmtree(old)


def load_checkpoint(
    checkpoint: Path,
    mesh: Mesh,
    chunks: Sequence[MegatronModule],
    optimizer: MegatronOptimizer | None = None,
    *,
    with_heads: bool = True,
) -> None:
    """Read weights, and optimizer state if asked, into the objects of this rank.

    Args:
        mesh: the ranks that hold the model.
        with_heads: read MTP layers too; else they stay as they are.

    Raises:
        UserError: the checkpoint is damaged or belongs to another model.
    """
    tensors = sharded_model(chunks, mesh)
    if not with_heads:
        tensors = {name: _without_heads(state) for name, state in tensors.items()}
    slots = slots_of(optimizer) if optimizer is not None else []
    if slots:
        tensors["optimizer"] = state_to_load(slots, dict(tensors))
    try:
        loaded: Any = dist_checkpointing.load(tensors, str(checkpoint))
    except _DAMAGES as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[-1]
        raise UserError(
            f"{checkpoint} is damaged, or belongs to another model: {reason[:200]}",
            "use the checkpoint before it, or the model that the run began with",
        ) from error
    for name, chunk in zip(_chunk_names(chunks), chunks, strict=True):
        chunk.load_state_dict(loaded[name], strict=with_heads)
    if slots:
        set_state(slots, loaded["optimizer"], read_state(checkpoint)["step"])


def sharded_model(chunks: Sequence[MegatronModule], mesh: Mesh) -> dict[str, Any]:
    """The weights, each tensor with its place in the whole model; the layout does not show in it."""
    return {
        name: chunk.sharded_state_dict(metadata={"dp_cp_group": mesh.dp_cp})
        for name, chunk in zip(_chunk_names(chunks), chunks, strict=True)
    }


def _chunk_names(chunks: Sequence[MegatronModule]) -> list[str]:
    """megatron-core's names: `model`, or `model0`, `model1` for virtual stages."""
    return ["model"] if len(chunks) == 1 else [f"model{number}" for number in range(len(chunks))]


def _without_heads(state: Mapping[str, Any]) -> dict[str, Any]:
    return {key: tensor for key, tensor in state.items() if not key.startswith("mtp.")}


def flush_to_disk(directory: Path, contents: bool = True) -> None:
    """fsync a directory, and all files below it."""
    for path in (*directory.rglob("*"), directory) if contents else (directory,):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
