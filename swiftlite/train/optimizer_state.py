"""The optimizer's state in a checkpoint: each parameter's moments (and float32 main weights) under the parameter's own
name and in its shape, so that the layout does not show in it.

megatron-core has a form for each of its optimizers; none can be read by another (0.16.1: plain against distributed,
experts shared or not). Here both write the same.
"""

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
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

MOMENTS = ("exp_avg", "exp_avg_sq")
MAIN_WEIGHT = "main_weight"

Sharded = ShardedTensor | ShardedTensorFactory


@dataclass(frozen=True)
class Slot:
    """One parameter that learns, and the part of its state that this rank holds.

    Attributes:
        parameter: the model's.
        inner: torch's optimizer.
        main: what that updates: the parameter itself, its float32 copy, or a flat part of either. None where all of the
            parameter's state is on other ranks.
        first: where in the flat parameter `main` begins.
        group: data-parallel ranks among which the parameter's state is shared; None where each holds all of it.
    """

    parameter: torch.nn.Parameter
    inner: torch.optim.Optimizer
    main: torch.Tensor | None
    first: int = 0
    group: dist.ProcessGroup | None = None

    @property
    def kinds(self) -> tuple[str, ...]:
        """What there is of this parameter: its moments and, when it is not float32 itself, the weight that is."""
        return MOMENTS if self.parameter.dtype is torch.float32 else (*MOMENTS, MAIN_WEIGHT)

    def part(self, kind: str) -> torch.Tensor:
        """The numbers that this rank holds; moments are zeros before the first step."""
        if self.main is None:
            return torch.empty(0, device=self.parameter.device)
        if kind == MAIN_WEIGHT:
            return self.main
        state = self.inner.state[self.main]
        if kind not in state:
            state[kind] = torch.zeros_like(self.main)
        return state[kind]

    def set_step(self, step: int) -> None:
        """Tell torch's optimizer how many updates there have been."""
        if isinstance(self.inner, torch.optim.AdamW) and self.main is not None:
            on = self.main.device if self.inner.param_groups[0].get("fused") else torch.device("cpu")
            self.inner.state[self.main]["step"] = torch.tensor(float(step), device=on)
        else:  # Transformer Engine's and Apex' FusedAdam count once per group
            for group in self.inner.param_groups:
                group["step"] = step


def slots_of(optimizer: MegatronOptimizer) -> list[Slot]:
    """Every parameter that learns on this rank, in an order that all data-parallel ranks share."""
    parts = getattr(optimizer, "chained_optimizers", [optimizer])
    return [slot for part in parts if not getattr(part, "is_stub_optimizer", False) for slot in _slots_of(part)]


def state_to_save(slots: Sequence[Slot], model_state: dict[str, Any]) -> dict[str, Sharded]:
    """Tensors for `dist_checkpointing.save`; collective over data-parallel ranks.

    With the distributed optimizer the parts of a parameter are brought together on one of the ranks that share it, the
    next one for each parameter: no rank ever holds more than its share, and all write.

    Args:
        model_state: the model's own sharded tensors.
    """
    tensors = {}
    for number, (slot, sharded) in enumerate(_placed(slots, model_state)):
        for kind in slot.kinds:
            if slot.group is None:
                tensors[f"{number}.{kind}"] = _like(sharded, slot.part(kind), kind)
            else:
                whole = _gather(slot, kind, owner=number % slot.group.size())
                if whole is not None:
                    tensors[f"{number}.{kind}"] = _written_here(_like(sharded, whole, kind))
    return tensors


def state_to_load(slots: Sequence[Slot], model_state: dict[str, Any]) -> dict[str, Sharded]:
    """Empty tensors of whole parameters for `dist_checkpointing.load`."""
    return {
        f"{number}.{kind}": _like(sharded, torch.empty(slot.parameter.shape), kind)
        for number, (slot, sharded) in enumerate(_placed(slots, model_state))
        for kind in slot.kinds
    }


@torch.no_grad()
def set_state(slots: Sequence[Slot], loaded: dict[str, torch.Tensor], step: int) -> None:
    """Put what `dist_checkpointing.load` brought for `state_to_load` into the optimizer."""
    for number, slot in enumerate(slots):
        for kind in slot.kinds:
            part = slot.part(kind)
            part.copy_(loaded[f"{number}.{kind}"].view(-1)[slot.first : slot.first + part.numel()].view(part.shape))
        slot.set_step(step)


def _slots_of(part: Any) -> Iterator[Slot]:
    inner = part.optimizer
    if isinstance(part, DistributedOptimizer):
        for parameter in (parameter for buffer in part.buffers for parameter in buffer.params):
            if parameter not in part.model_param_group_index_map:
                yield Slot(parameter, inner, None, group=part.data_parallel_group)
                continue
            group, place = part.model_param_group_index_map[parameter]
            first = part._get_model_param_range_map(parameter)["param"].start
            yield Slot(parameter, inner, inner.param_groups[group]["params"][place], first, part.data_parallel_group)
        return
    pairs: list[tuple[Sequence, Sequence]] = [(group["params"], group["params"]) for group in inner.param_groups]
    if hasattr(part, "float16_groups"):
        pairs = [
            *zip(part.float16_groups, part.fp32_from_float16_groups, strict=True),
            *((group, group) for group in part.fp32_from_fp32_groups),
        ]
    for parameters, mains in pairs:
        for parameter, main in zip(parameters, mains, strict=True):
            yield Slot(parameter, inner, main)


def _placed(slots: Sequence[Slot], model_state: dict[str, Any]) -> Iterator[tuple[Slot, Sharded]]:
    """Each slot with its parameter's place in the whole model."""
    sharded = get_param_id_to_sharded_param_map(model_state, iter([slot.parameter for slot in slots]))
    return ((slot, sharded[number]) for number, slot in enumerate(slots))


def _gather(slot: Slot, kind: str, owner: int) -> torch.Tensor | None:
    """The whole parameter's numbers on the owner, None elsewhere.

    Added up as integers, where all ranks but one have zeros: so every bit arrives as it was.
    """
    assert slot.group is not None
    part = slot.part(kind)
    whole = torch.zeros(slot.parameter.numel(), device=slot.parameter.device)
    whole[slot.first : slot.first + part.numel()] = part.view(-1)
    dist.reduce(whole.view(torch.int32), dist.get_global_rank(slot.group, owner), group=slot.group)
    return whole.view(slot.parameter.shape).cpu() if slot.group.rank() == owner else None


def _like(sharded: Sharded, tensor: torch.Tensor, kind: str) -> Sharded:
    """A tensor that has the same place in the whole model as the parameter, under a name of its own."""
    return make_sharded_optimizer_tensor(sharded, tensor, prefix=f"optimizer.{kind}")


def _written_here(sharded: Sharded) -> Sharded:
    """The same, and of all data-parallel ranks it is this one that writes it."""
    assert isinstance(sharded.replica_id, tuple)
    return replace(sharded, replica_id=(*sharded.replica_id[:-1], 0))
