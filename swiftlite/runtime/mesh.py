"""Define `Mesh`: the ranks of one model, the process groups of its layout, and the position of this rank."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection

from swiftlite.args.fields import ParallelLayout
from swiftlite.base.errors import OptionError
from swiftlite.plan.layout import mtp_pipeline_rank, num_virtual_stages, process_problems
from swiftlite.runtime import megatron_fixes
from swiftlite.runtime.device import Device


@dataclass(frozen=True, eq=False)
class Mesh:
    """The process groups of one model, over all or some ranks of the job.

    A session has one active mesh over all ranks. Additional models, each with its own layout, need additional meshes:

        with session(layout) as mesh:
            model = build_model(..., mesh=mesh)
            other_mesh = Mesh.create(mesh.device, other_layout)
            other_model = build_model(..., mesh=other_mesh)
            model(...)
            with other_mesh.active():
                other_model(...)

    The groups are torch's process groups: `mesh.tp.rank()`, `mesh.tp.size()`. The end of the session destroys the
    groups of all meshes.

    A rank outside of a mesh holds no part of the model and has no groups (`mesh.is_here` is False). Such a rank does
    not compute, and receives results from the model's ranks (`model.ranks.broadcast_from_mesh`).

    Attributes:
        device: the device of this rank.
        layout: sizes of the parallel dimensions.
        ranks: ranks of the job that hold the model.
        groups: the process groups by megatron-core's names, for the argument `pg_collection` of its classes; empty on
            ranks outside of the mesh.
    """

    device: Device
    layout: ParallelLayout
    ranks: range
    groups: ProcessGroupCollection = field(repr=False)
    _globals: dict[str, Any] = field(repr=False)

    @classmethod
    def create(
        cls,
        device: Device,
        layout: ParallelLayout,
        *,
        ranks: range | None = None,
        tied_embeddings: bool = False,
        num_distributed_optimizer_instances: int = 1,
        timeout_minutes: int = 10,
    ) -> "Mesh":
        """Create the groups of a layout without changing the active mesh.

        Collective: every rank of the job must call this method, including ranks outside of the mesh, and several meshes
        must be created in the same order on all ranks.

        Args:
            ranks: contiguous ranks of the job that hold the model; default: all.
            tied_embeddings: whether the last pipeline stage uses the embedding as its output layer.
            num_distributed_optimizer_instances: number of groups into which ranks with the same parameters are divided;
                each group shards a whole optimizer state.
            timeout_minutes: maximum time for which a rank waits for another rank.

        Raises:
            OptionError: the layout does not fit the number of processes.
        """
        everyone = range(dist.get_world_size())
        if ranks is None:
            ranks = everyone
        if not ranks or ranks.step != 1 or ranks[0] not in everyone or ranks[-1] not in everyone:
            raise ValueError(f"{ranks} are not contiguous ranks of the job, {everyone}")
        check_layout(layout, len(ranks))
        # initialize_model_parallel fails if groups exist, so they are hidden from it.
        with _parallel_state(dict.fromkeys(_read_parallel_state())), megatron_fixes.lay_out(ranks):
            parallel_state.initialize_model_parallel(
                tensor_model_parallel_size=layout.tensor_model_parallel_size,
                pipeline_model_parallel_size=layout.pipeline_model_parallel_size,
                virtual_pipeline_model_parallel_size=num_virtual_stages(layout),
                context_parallel_size=layout.context_parallel_size,
                expert_model_parallel_size=layout.expert_model_parallel_size,
                expert_tensor_parallel_size=layout.expert_tensor_parallel_size,
                num_distributed_optimizer_instances=num_distributed_optimizer_instances,
                get_embedding_ranks=partial(_embedding_ranks, layout=layout, tied=tied_embeddings),
                create_gloo_process_groups=device.is_cuda,  # on a CPU, the groups already use gloo
                distributed_timeout_minutes=timeout_minutes,
            )
            groups = ProcessGroupCollection()
            if dist.get_rank() in ranks:
                groups = ProcessGroupCollection.use_mpu_process_groups()
            return cls(device, layout, ranks, groups, _read_parallel_state())

    @property
    def is_here(self) -> bool:
        """Whether this rank holds a part of the model."""
        return dist.get_rank() in self.ranks

    @property
    def tp(self) -> dist.ProcessGroup:
        """Group of the tensor-parallel ranks."""
        return self.groups.tp

    @property
    def pp(self) -> dist.ProcessGroup:
        """Group of the pipeline stages, in order."""
        return self.groups.pp

    @property
    def cp(self) -> dist.ProcessGroup:
        """Group of the context-parallel ranks."""
        return self.groups.cp

    @property
    def tp_cp(self) -> dist.ProcessGroup:
        """Group of the ranks that hold the same stage of one replica."""
        return self.groups.tp_cp

    @property
    def dp(self) -> dist.ProcessGroup:
        """Group of the data-parallel ranks, which compute different rows."""
        return self.groups.dp

    @property
    def dp_cp(self) -> dist.ProcessGroup:
        """Group of the data- and context-parallel ranks, which hold the same parameters."""
        return self.groups.dp_cp

    @property
    def ep(self) -> dist.ProcessGroup:
        """Group of the expert-parallel ranks, which hold different experts of a layer."""
        return self.groups.ep

    @contextmanager
    def active(self) -> Iterator[None]:
        """Set megatron-core's global groups (`parallel_state`) to the groups of this mesh inside the context.

        swiftlite passes groups as arguments if megatron-core accepts them. 0.16.1 still reads the global groups in the
        following places (paths below megatron/core):

            building    transformer/multi_token_prediction.py:651, 666 and 1046, the parts of an MTP layer
                        transformer/moe/moe_layer.py:158, layers with experts (`model.layers.router.MoELayer`)
            computing   multi_token_prediction.py:743 and 746, after the projection of an MTP layer
                        tensor_parallel/layers.py:482 and 519, the buffer that sequence parallelism gathers into
                        tensor_parallel/layers.py:1281, where nothing depends on it
                        transformer/moe/shared_experts.py:168, 172, 251 and 255, shared experts with
                        moe_shared_expert_overlap
                        tensor_parallel/cross_entropy.py:131 to 157
            a step      transformer/moe/moe_utils.py:1070, the update of expert biases
            saving      transformer/module.py:84, the sharded state of modules that keep no group

        The random states of tensor-parallel ranks remain those of the session's mesh. They are not used, because
        weights are loaded and dropout is 0.
        """
        with _parallel_state(self._globals):
            yield


def check_layout(layout: ParallelLayout, num_processes: int) -> None:
    """Check that a layout fits the number of processes.

    Raises:
        OptionError: the layout does not fit.
    """
    if problems := process_problems(layout, num_processes):
        raise OptionError(problems)


def _read_parallel_state() -> dict[str, Any]:
    """Return megatron-core's globals for groups and ranks: upper-case names with a leading underscore."""
    return {name: value for name, value in vars(parallel_state).items() if name.startswith("_") and name.isupper()}


@contextmanager
def _parallel_state(values: dict[str, Any]) -> Iterator[None]:
    """Set megatron-core's globals for groups and ranks to `values`, by name, inside the context."""
    before = _read_parallel_state()
    parallel_state.__dict__.update(values)
    try:
        yield
    finally:
        parallel_state.__dict__.update(before)


def _embedding_ranks(pp_ranks: Sequence[int], pp_size: int | None = None, *, layout: ParallelLayout, tied: bool):
    """Return the ranks of one pipeline that hold the embedding.

    These are the first rank, the rank with MTP layers, and the last rank if the output layer is tied.

    megatron-core would use only the first and the last rank. If MTP layers are on another stage, megatron-core would
    then silently add the gradient of the embedding to the gradient of the output layer (parallel_state.py:525,
    finalize_model_grads.py:146 of 0.16.1).
    """
    places = {0, mtp_pipeline_rank(layout)}
    if tied:
        places.add(len(pp_ranks) - 1)
    return [pp_ranks[place] for place in sorted(places)]
