"""Compute the predictions of the teacher of `megatron gkd` in a separate layout.

The ranks of the teacher get the micro-batches of all ranks of the trained model. They send the final states of labels
to the last stage of the trained model, on which each rank has its part of the teacher's output matrix. Both layouts
have the same context-parallel size, so that a micro-batch is divided into the same parts.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, product
from typing import NamedTuple

import torch
import torch.distributed as dist

from swiftlite.data.batch import Batch
from swiftlite.families.resolved import HfModel
from swiftlite.model.forward import shard
from swiftlite.model.gpt import GPTModel
from swiftlite.model.loss.chunked_loss import TeacherTarget
from swiftlite.model.loss.losses import IGNORE_INDEX
from swiftlite.plan.layout import ParallelLayout
from swiftlite.runtime.device import on_device
from swiftlite.runtime.mesh import Mesh
from swiftlite.train.methods.frozen import open_frozen
from swiftlite.train.methods.teacher import label_states, without_heads
from swiftlite.train.phases import Run


class Place(NamedTuple):
    """A rank of the last stage of a mesh."""

    dp: int
    cp: int
    tp: int


@dataclass(frozen=True)
class DistantTeacher:
    """A frozen model in another layout than the trained model.

    Attributes:
        chunks: the teacher's stages on this rank.
        mesh: ranks and layout of the teacher.
        trained: ranks and layout of the trained model.
        senders: ranks of the job that have the teacher's last stage, by place.
        receivers: ranks of the job that have the trained model's last stage, by place.
        like_state: an empty tensor with the dtype and the device of states [0, H].
        output_VH: this rank's part of the teacher's output matrix on the last stage of the trained model.
        cap: cap of the teacher's logits, as for `TeacherTarget`.
    """

    chunks: Sequence[GPTModel]
    mesh: Mesh
    trained: Mesh
    senders: dict[Place, int]
    receivers: dict[Place, int]
    like_state: torch.Tensor
    output_VH: torch.Tensor
    cap: float | None

    @classmethod
    def open(cls, run: Run, model: HfModel, layout: ParallelLayout) -> "DistantTeacher":
        """Load the teacher. Collective.

        Raises:
            UserError: the model cannot be opened, or is not the same on all ranks.
        """
        chunks, mesh = open_frozen(run, model, layout, "--teacher_model", is_teacher=True)
        outside, dtype = model.family.architecture(model.config).outside, getattr(torch, run.args.torch_dtype)
        like = torch.empty((0, outside.hidden), dtype=dtype, device=mesh.device.torch_device)
        senders, receivers = _last_stage(mesh), _last_stage(run.mesh)
        output_VH = _divide_output(chunks, mesh, run.mesh, (senders, receivers), like, outside.vocab)
        cap = outside.logits_cap and outside.logits_cap / run.plan.temperature
        return cls(chunks, mesh, run.mesh, senders, receivers, like, output_VH, cap)

    @torch.no_grad()
    def states(self, batches: Sequence[Batch]) -> list[torch.Tensor]:
        """Return the states of this rank's micro-batches, as `Teacher.states`. Collective."""
        num_ranks, mesh = self.trained.dp.size(), self.mesh
        shared: list[list[Batch]] = [[] for _ in range(num_ranks)]
        # The teacher's data-parallel ranks divide them in another way than those of the trained model.
        dist.all_gather_object(shared, [without_heads(batch) for batch in batches], group=self.trained.dp)
        given = list(chain.from_iterable(zip(*shared, strict=True)))  # batch m of rank d has number m * num_ranks + d
        computed: list[torch.Tensor] = []
        if given and mesh.is_here:
            numbers = range(mesh.dp.rank(), len(given) + mesh.dp.rank(), mesh.dp.size())
            mine = [given[min(number, len(given) - 1)] for number in numbers]  # as many on each rank
            computed = label_states(self.chunks, mesh, mine)
        received, rank = [], dist.get_rank()
        num_senders = 1 + max(place.dp for place in self.senders)
        # All ranks go through the same pairs in the same order, so that sends and receives match without tags.
        for number, to in product(range(len(given)), self.receivers):
            # Tensor-parallel ranks of the teacher have equal states, of which the first one sends.
            source, target = self.senders[Place(number % num_senders, to.cp, 0)], self.receivers[to]
            if to.dp != number % num_ranks or rank not in (source, target):
                continue
            labels = shard(given[number], to.cp, self.trained.cp.size()).labels_KBS[0]
            like = self.like_state.new_empty((int((labels != IGNORE_INDEX).sum()), self.like_state.size(1)))
            states_NH = send(computed[number // num_senders] if rank == source else None, source, target, like)
            if rank == target:
                # On the host until the loss of the micro-batch, as in `teacher.py`.
                received.append(states_NH.cpu())
        return received

    def target(self, states_NH: torch.Tensor, beta: float) -> TeacherTarget:
        """Return the target of the loss of a micro-batch on the last stage, from its `states`."""
        return TeacherTarget(on_device(states_NH, self.mesh.device.torch_device), self.output_VH, beta, self.cap)


def send(tensor: torch.Tensor | None, source: int, target: int, like: torch.Tensor) -> torch.Tensor:
    """Send a tensor of rank `source` to rank `target`; return it on both.

    Args:
        tensor: the tensor on rank `source`.
        like: a tensor of the same shape, dtype and device, which is overwritten.
    """
    if tensor is not None:
        like.copy_(tensor)
    # Without labels nothing is sent, as both sides know.
    if source != target and like.numel():
        if dist.get_rank() == source:
            dist.send(like, target)
        else:
            dist.recv(like, source)
    return like


def _last_stage(mesh: Mesh) -> dict[Place, int]:
    """Return the ranks of the job that have the last stage of a mesh, by place. Collective over the job."""
    place = None
    if mesh.is_here and mesh.pp.rank() == mesh.pp.size() - 1:
        place = Place(mesh.dp.rank(), mesh.cp.rank(), mesh.tp.rank())
    places: list[Place | None] = [None] * dist.get_world_size()
    dist.all_gather_object(places, place)
    return {place: rank for rank, place in enumerate(places) if place is not None}


def _divide_output(
    chunks: Sequence[GPTModel],
    mesh: Mesh,
    trained: Mesh,
    ranks: tuple[dict[Place, int], dict[Place, int]],
    like_state: torch.Tensor,
    vocab_size: int,
) -> torch.Tensor:
    """Return this rank's part of the teacher's output matrix [V, H], as the trained model divides the vocabulary;
    empty before its last stage. Collective.

    Args:
        ranks: ranks of the last stage of the teacher and of the trained model, by place.
    """
    (senders, receivers), rank = ranks, dist.get_rank()
    whole = None
    if rank in senders.values():
        # Gathered and divided again, because the two models can have different tensor-parallel sizes.
        own_VH = chunks[-1].output_layers.of_trunk().weight_VH.detach()
        parts = [torch.empty_like(own_VH) for _ in range(mesh.tp.size())]
        dist.all_gather(parts, own_VH.contiguous(), group=mesh.tp)
        whole = torch.cat(parts).chunk(trained.tp.size())
    source, found = senders[Place(0, 0, 0)], like_state
    for to, target in receivers.items():
        if rank in (source, target):
            like = like_state.new_empty((vocab_size // trained.tp.size(), like_state.size(1)))
            part = send(whole[to.tp] if whole and rank == source else None, source, target, like)
            found = part if rank == target else found
    return found
