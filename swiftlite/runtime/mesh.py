"""A mesh: the ranks of one model, in the groups of its layout, and where this rank stands among them."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection

from swiftlite.args.fields import ParallelLayout
from swiftlite.runtime.device import Device


@dataclass(frozen=True)
class Mesh:
    """The process groups of one model, on all ranks of the job; several models can have one each.

    Each group is torch's: `mesh.tp.rank()`, `mesh.tp.size()`.

    Attributes:
        device: what this rank computes on.
        layout: how the model is cut up.
        groups: the process groups under megatron-core's names, as its classes take them (`pg_collection`).
    """

    device: Device
    layout: ParallelLayout
    groups: ProcessGroupCollection = field(repr=False)
    _globals: dict[str, Any] = field(repr=False)

    @property
    def tp(self) -> dist.ProcessGroup:
        """Tensor-parallel ranks."""
        return self.groups.tp

    @property
    def pp(self) -> dist.ProcessGroup:
        """Pipeline stages, in order."""
        return self.groups.pp

    @property
    def cp(self) -> dist.ProcessGroup:
        """Context-parallel ranks."""
        return self.groups.cp

    @property
    def tp_cp(self) -> dist.ProcessGroup:
        """Ranks that hold the same stage of one replica."""
        return self.groups.tp_cp

    @property
    def dp(self) -> dist.ProcessGroup:
        """Data-parallel ranks: each computes other rows."""
        return self.groups.dp

    @property
    def dp_cp(self) -> dist.ProcessGroup:
        """Data- and context-parallel ranks: those that hold the same parameters."""
        return self.groups.dp_cp

    @property
    def ep(self) -> dist.ProcessGroup:
        """Ranks that share the experts of a layer."""
        return self.groups.ep

    @property
    def is_last_stage(self) -> bool:
        """Whether this rank holds the end of the model."""
        return self.pp.rank() == self.pp.size() - 1

    @contextmanager
    def active(self) -> Iterator[None]:
        """What megatron-core itself still reads from the globals of `parallel_state` is this mesh, inside."""
        before = _parallel_state()
        _set_parallel_state(self._globals)
        try:
            yield
        finally:
            _set_parallel_state(before)


def current_mesh(device: Device, layout: ParallelLayout) -> Mesh:
    """The mesh that `parallel_state.initialize_model_parallel` has just made."""
    return Mesh(device, layout, ProcessGroupCollection.use_mpu_process_groups(), _parallel_state())


def _parallel_state() -> dict[str, Any]:
    """megatron-core's globals for groups and ranks: names in capitals that begin with an underscore."""
    return {name: value for name, value in vars(parallel_state).items() if name.startswith("_") and name.isupper()}


def _set_parallel_state(values: dict[str, Any]) -> None:
    for name, value in values.items():
        setattr(parallel_state, name, value)
