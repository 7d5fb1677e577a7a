"""Save the optimizer state in a checkpoint independently of the parallel layout.

The moments and the float32 main weights of a parameter are saved under the parameter's name and in its shape. In
megatron-core 0.16.1 each optimizer (plain or distributed, with or without expert parallelism) has a separate format
that other optimizers cannot read. The format written here is the same for all optimizers; moments are float32.
"""

import itertools
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.dist_checkpointing.optimizer import (
    get_param_id_to_sharded_param_map,
    make_sharded_optimizer_tensor,
)
from megatron.core.optimizer import ChainedOptimizer, Float16OptimizerWithFloat16Params, MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

MOMENTS = ("exp_avg", "exp_avg_sq")
MAIN_WEIGHT = "main_weight"

Sharded = ShardedTensor | ShardedTensorFactory


class HoldsMoments(ABC):
    """A torch optimizer that does not store its moments as float32 tensors in `state`."""

    def kinds(self, main: torch.Tensor) -> tuple[str, ...]:
        """Return the moments of a tensor that the optimizer updates."""
        return MOMENTS

    @abstractmethod
    def state_of(self, main: torch.Tensor) -> dict[str, Any]:
        """Return the moments and the number of updates (`step`) of a tensor, zeros before the first update."""

    def moment(self, main: torch.Tensor, kind: str) -> torch.Tensor:
        """Return a moment of a tensor that the optimizer updates, as float32 on any device."""
        return self.state_of(main)[kind]

    def set_moment(self, main: torch.Tensor, kind: str, values: torch.Tensor) -> None:
        """Write a moment; values that `moment` returned restore its state exactly."""
        self.state_of(main)[kind].copy_(values)

    def weights_were_loaded(self) -> None:  # noqa: B027 - most optimizers keep no copies
        """Update copies of the tensors that the optimizer updates, whose values were loaded from a checkpoint."""


@dataclass(frozen=True)
class Slot:
    """A trained parameter and the part of its optimizer state on this rank.

    Attributes:
        parameter: the parameter of the model.
        inner: the torch optimizer that updates the parameter.
        main: the tensor that the optimizer updates: the parameter, its float32 copy, or a flat part of one of them.
            None if the whole state is on other ranks.
        start: start of `main` in the flat parameter.
        group: data-parallel ranks that the state is split over; None if each rank holds the whole state.
        instance: number of the group, if several groups hold equal states (`--num_distributed_optimizer_instances`).
    """

    parameter: torch.nn.Parameter
    inner: torch.optim.Optimizer
    main: torch.Tensor | None
    start: int = 0
    group: dist.ProcessGroup | None = None
    instance: int = 0

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of state of the parameter: moments and, unless the parameter is float32, its main weight."""
        moments = MOMENTS
        if isinstance(self.inner, HoldsMoments) and self.main is not None:
            moments = self.inner.kinds(self.main)
        if self.parameter.dtype is torch.float32:
            return moments
        return (*moments, MAIN_WEIGHT)

    def part(self, kind: str) -> torch.Tensor:
        """Return this rank's part of one kind of state (an element of `kinds`). Change it only with `set_part`.

        Before the first step, moments are zeros.
        """
        if self.main is None:
            return torch.empty(0, device=self.parameter.device)
        if kind == MAIN_WEIGHT:
            return self.main
        if isinstance(self.inner, HoldsMoments):
            return self.inner.moment(self.main, kind)
        state = self.inner.state[self.main]
        if not state and isinstance(self.inner, torch.optim.Adam):  # which initializes only an empty state, as a whole
            self.set_step(0)
        if kind not in state:
            state[kind] = torch.zeros_like(self.main)
        return state[kind]

    def set_part(self, kind: str, whole: torch.Tensor) -> None:
        """Set this rank's part of one kind of state.

        Args:
            whole: the state of the whole parameter.
        """
        if self.main is None:
            return
        part = whole.view(-1)[self.start : self.start + self.main.numel()].view(self.main.shape)
        if kind in MOMENTS and isinstance(self.inner, HoldsMoments):
            self.inner.set_moment(self.main, kind, part)
        else:
            self.part(kind).copy_(part)

    def set_step(self, step: int) -> None:
        """Set the optimizer's number of updates so far."""
        if isinstance(self.inner, HoldsMoments):
            if self.main is not None:
                self.inner.state_of(self.main)["step"].fill_(step)
        elif isinstance(self.inner, torch.optim.Adam) and self.main is not None:  # or its subclass AdamW
            is_fused = self.inner.param_groups[0].get("fused")
            # Where `_init_group` of torch/optim/adam.py puts it: on the device only for the fused kernel.
            device = self.main.device if is_fused else torch.device("cpu")
            self.inner.state[self.main]["step"] = torch.tensor(float(step), device=device)
        else:  # the FusedAdam of Transformer Engine and Apex has one counter per group
            for group in self.inner.param_groups:
                group["step"] = step


def slots_of(optimizer: MegatronOptimizer) -> list[Slot]:
    """Return a slot for every trained parameter on this rank, in the same order on all data-parallel ranks."""
    parts: list[Any] = [optimizer]
    if isinstance(optimizer, ChainedOptimizer):
        parts = optimizer.chained_optimizers
    slots: list[Slot] = []
    for part in parts:
        if part.is_stub_optimizer:  # no parameter on this rank
            continue
        if isinstance(part, DistributedOptimizer):
            slots += _shared_slots(part)
        else:
            slots += _whole_slots(part)
    return slots


def state_to_save(slots: Sequence[Slot], model_state: dict[str, Any]) -> dict[str, Sharded]:
    """Return the tensors for `dist_checkpointing.save`. Collective over data-parallel ranks.

    With the distributed optimizer, the ranks that share a parameter hold parts of its state. One of them, its owner,
    gathers the parts. The parameters are distributed evenly over owners, so that all ranks of the group write and none
    holds more than its share. Of groups with equal states, only the first writes.

    Args:
        model_state: the sharded tensors of the model.
    """
    tensors = {}
    owners = _owners(slots)
    # Keys only pair tensors with slots; names in files are those of the parameters (`_like`).
    for number, (slot, sharded) in enumerate(_placed(slots, model_state)):
        for kind in slot.kinds:
            if slot.group is None:
                tensors[f"{number}.{kind}"] = _like(sharded, slot.part(kind), kind)
            elif slot.instance == 0:
                whole = _gather(slot, kind, owners[number])
                if whole is not None:
                    tensors[f"{number}.{kind}"] = _by_its_owner(_like(sharded, whole, kind), slot)
    return tensors


def state_to_load(slots: Sequence[Slot], model_state: dict[str, Any]) -> dict[str, Sharded]:
    """Return the tensors that `dist_checkpointing.load` fills on this rank.

    With the distributed optimizer, these are the whole states of the parameters that this rank owns, as in
    `state_to_save`. Each byte is therefore read by only one rank of a group. If this rank holds the whole state of a
    parameter, the state is read in place.
    """
    tensors = {}
    owners = _owners(slots)
    for number, (slot, sharded) in enumerate(_placed(slots, model_state)):
        for kind in slot.kinds:
            if slot.group is None:
                tensors[f"{number}.{kind}"] = _like(sharded, slot.part(kind).detach(), kind)
            elif slot.group.rank() == owners[number]:
                # On the host, so that the whole state of all owned parameters takes no memory on the device.
                whole = torch.empty(slot.parameter.shape)
                tensors[f"{number}.{kind}"] = _by_its_owner(_like(sharded, whole, kind), slot)
    return tensors


@torch.no_grad()
def set_state(slots: Sequence[Slot], loaded: dict[str, torch.Tensor], step: int) -> None:
    """Copy loaded state into the optimizer. Collective over data-parallel ranks.

    Args:
        loaded: result of `state_to_load`, filled by `dist_checkpointing.load`; tensors are removed one by one to free
            memory.
        step: number of updates so far.
    """
    for number, (slot, owner) in enumerate(zip(slots, _owners(slots), strict=True)):
        for kind in slot.kinds:
            whole = loaded.pop(f"{number}.{kind}", None)
            if slot.group is not None:
                whole = _distribute(slot, whole, owner)
            assert whole is not None
            slot.set_part(kind, whole)
        # After the moments: for an empty state, `part` starts the counter at 0.
        slot.set_step(step)
    for inner in {id(slot.inner): slot.inner for slot in slots}.values():
        if isinstance(inner, HoldsMoments):
            inner.weights_were_loaded()


def _shared_slots(part: DistributedOptimizer) -> Iterator[Slot]:
    """Yield the slots of megatron-core's distributed optimizer, which shards state over data-parallel ranks.

    Parameters are concatenated in a flat buffer, and each rank holds the state of one range of the buffer. Example: two
    parameters of 6 and 4 elements, two ranks. Rank 0 holds the state of elements 0 to 4 of the first parameter. Rank 1
    holds the state of element 5 of the first parameter (`start` is 5) and of the whole second parameter.
    """
    ranks: dict[str, Any] = {"group": part.data_parallel_group, "instance": part.distributed_optimizer_instance_id}
    # Not from model_param_group_index_map, whose places are wrong in groups with float32 and bfloat16 parameters: the
    # optimizer has the float32 parameters first (distrib_optimizer.py:442 of 0.16.1).
    parameters = itertools.chain(*part.model_fp32_groups, *part.model_float16_groups)
    shards = itertools.chain(*part.shard_fp32_groups, *part.shard_fp32_from_float16_groups)
    mains = dict(zip(parameters, shards, strict=True))
    # In the order of the buffers, which is the same on all ranks, although each has the state of other parameters.
    for buffer in part.buffers:
        for parameter in buffer.params:
            if parameter in mains:
                main = mains[parameter]
                start = part._get_model_param_range_map(parameter)["param"].start
                yield Slot(parameter, part.optimizer, main, start, **ranks)
            else:
                yield Slot(parameter, part.optimizer, main=None, **ranks)


def _whole_slots(part: Any) -> Iterator[Slot]:
    """Yield the slots of megatron-core's other optimizers, in which each data-parallel rank holds the whole state."""
    if isinstance(part, Float16OptimizerWithFloat16Params):
        parameters = [*itertools.chain(*part.float16_groups), *itertools.chain(*part.fp32_from_fp32_groups)]
        mains = [*itertools.chain(*part.fp32_from_float16_groups), *itertools.chain(*part.fp32_from_fp32_groups)]
    else:
        parameters = list(itertools.chain(*(group["params"] for group in part.optimizer.param_groups)))
        mains = parameters
    for parameter, main in zip(parameters, mains, strict=True):
        yield Slot(parameter, part.optimizer, main)


def _placed(slots: Sequence[Slot], model_state: dict[str, Any]) -> Iterator[tuple[Slot, Sharded]]:
    """Yield each slot with the place of its parameter in the whole model."""
    if not slots:  # only weights are saved; megatron-core would warn of an empty mapping
        return
    places = get_param_id_to_sharded_param_map(model_state, (slot.parameter for slot in slots))
    for number, slot in enumerate(slots):
        yield slot, places[number]


def _gather(slot: Slot, kind: str, owner: int) -> torch.Tensor | None:
    """Return one kind of state of the whole parameter on the owner; None on other ranks.

    The parts are summed as integers. At each element only one rank has a nonzero value, so every bit is preserved.
    """
    assert slot.group is not None
    part = slot.part(kind)
    whole = torch.zeros(slot.parameter.numel(), device=slot.parameter.device)
    whole[slot.start : slot.start + part.numel()] = part.view(-1)
    dist.reduce(whole.view(torch.int32), dist.get_global_rank(slot.group, owner), group=slot.group)
    if slot.group.rank() != owner:
        return None
    return whole.view(slot.parameter.shape).cpu()


def _distribute(slot: Slot, whole: torch.Tensor | None, owner: int) -> torch.Tensor:
    """Broadcast the whole parameter's state from its owner, and return it on every rank that shares the parameter."""
    assert slot.group is not None
    received = torch.empty(slot.parameter.shape, device=slot.parameter.device)
    if whole is not None:
        received.copy_(whole)
    dist.broadcast(received, dist.get_global_rank(slot.group, owner), group=slot.group)
    return received


def _owners(slots: Sequence[Slot]) -> list[int]:
    """Return the owner of each parameter: the rank of its group that reads and writes its state.

    Each parameter is assigned to the rank with the fewest elements so far. If its state is not split, the owner is 0.
    """
    numbers: dict[dist.ProcessGroup, list[int]] = {}  # of elements that each rank of a group owns
    owners = []
    for slot in slots:
        rank_numels = [0]
        if slot.group:
            rank_numels = numbers.setdefault(slot.group, [0] * slot.group.size())
        owners.append(rank_numels.index(min(rank_numels)))
        rank_numels[owners[-1]] += slot.parameter.numel()
    return owners


def _like(sharded: Sharded, tensor: torch.Tensor, kind: str) -> Sharded:
    """Return `tensor` with the place of the parameter `sharded` in the whole model, and with a name that includes
    `kind`.
    """
    return make_sharded_optimizer_tensor(sharded, tensor, prefix=f"optimizer.{kind}")


def _by_its_owner(sharded: Sharded, slot: Slot) -> Sharded:
    """Return the tensor with the number of its group as replica among data-parallel ranks, because only its owner in
    the group holds it.
    """
    assert isinstance(sharded.replica_id, tuple)
    return replace(sharded, replica_id=(*sharded.replica_id[:-1], slot.instance))
