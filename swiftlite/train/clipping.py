"""Clip the gradients of the MTP heads by a separate norm, and check norms before the weights are updated.

With a common norm of trunk and heads, the large gradients of new heads would reduce the updates of the trunk.
"""

import math
from collections.abc import Callable, Mapping
from itertools import chain
from typing import Any, cast

import torch
import torch.distributed as dist
from megatron.core.optimizer import ChainedOptimizer, MegatronOptimizer, ParamKey, clip_grads
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer.optimizer_config import ParamWithNamePredicate
from megatron.core.optimizer_param_scheduler import ParamGroupOverride
from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate
from megatron.core.transformer.module import param_is_not_shared

from swiftlite.plan.trainable import is_head_parameter

_OF_HEADS = "is_of_heads"
"""Key of torch's `param_groups`: whether a group holds parameters of the heads."""


def separate_head_groups(settings: Mapping[str, float] = {}) -> dict[ParamKey, ParamGroupOverride]:
    """Return overrides for `get_megatron_optimizer` that put parameters of trunk and heads into separate groups.

    Args:
        settings: further settings of the heads' groups, such as their learning rate.
    """

    def belongs_to_heads(parameter: torch.nn.Parameter, name: str) -> bool:
        return is_head_parameter(name.replace("module.", ""))  # the name without prefixes of wrappers

    key = ParamKey(with_name_predicate=ParamWithNamePredicate(name=_OF_HEADS, fn=belongs_to_heads))
    return {key: cast(ParamGroupOverride, {_OF_HEADS: True, **settings})}


class CheckedOptimizer(ChainedOptimizer):
    """An optimizer that updates nothing if a check of the gradients' norms fails.

    `ChainedOptimizer.step` calls `get_grad_norm` before it clips, and `step_with_ready_grads` last. Before the latter
    it has changed only gradients.

    Attributes:
        check: called with the norms before each update, by name as in the metrics; returns whether to update.
        norms: the norms at the last step, before the gradients were clipped.
    """

    def __init__(self, optimizer: MegatronOptimizer):
        """Wrap an optimizer."""
        optimizers = [optimizer]
        if isinstance(optimizer, ChainedOptimizer):
            optimizers = optimizer.chained_optimizers
        super().__init__(optimizers)
        self.check: Callable[[Mapping[str, float]], bool] = lambda norms: True
        self.norms: dict[str, float] = {}

    def get_grad_norm(self) -> float:
        norm = super().get_grad_norm()
        self.norms = {"grad_norm": float(norm)}
        return norm

    @torch.no_grad()
    def step_with_ready_grads(self) -> bool:
        return self.check(self.norms) and super().step_with_ready_grads()


class SeparateClipping(CheckedOptimizer):
    """An optimizer that clips the gradients of the trunk and of the MTP heads by separate norms."""

    def __init__(self, optimizer: MegatronOptimizer, mtp_clip_grad: float, device: torch.device):
        """Wrap an optimizer whose parameter groups were made with `separate_head_groups`.

        Args:
            mtp_clip_grad: maximum norm of the heads' gradients; 0 disables clipping.
            device: device of the gradients; required also on a rank without gradients.
        """
        super().__init__(optimizer)
        self.mtp_clip_grad = mtp_clip_grad
        self.device = device

    @torch.no_grad()
    def step(self) -> tuple[bool, float | None, int | None]:
        """Run one update like `ChainedOptimizer.step`, but clip the gradients of trunk and heads separately.

        Returns:
            Whether parameters were updated, the norm of the trunk's gradients, and None.
        """
        if self.prepare_grads():
            return False, None, None
        # One copy to the host for both norms, because each copy waits for the GPU.
        squares = torch.stack([self._square(are_heads) for are_heads in (True, False)])
        mtp_norm, trunk_norm = (math.sqrt(square) for square in squares.tolist())
        self.norms = {"grad_norm": trunk_norm, "mtp_grad_norm": mtp_norm}
        config: Any = self.config
        self._clip(are_heads=True, largest=self.mtp_clip_grad, norm=mtp_norm)
        self._clip(are_heads=False, largest=config.clip_grad, norm=trunk_norm)
        return self.step_with_ready_grads(), trunk_norm, None

    def _square(self, are_heads: bool) -> torch.Tensor:
        """Return the square of the gradients' norm over all ranks, a float64 scalar on the device."""
        square = torch.zeros((), dtype=torch.float64, device=self.device)
        for part in self.chained_optimizers:
            gradients: Any = [parameter.grad for parameter in _parameters(part, are_heads) if _counts(parameter, part)]
            local = torch.zeros(1, device=self.device)
            if gradients:
                local, _ = clip_grads.multi_tensor_applier(clip_grads.l2_norm_impl, local.int(), [gradients], False)
            local = local**2
            # Collective: ranks without such parameters must call it too.
            dist.all_reduce(local, group=part.get_grad_stats_parallel_group())
            square += local[0]
        return square

    def _clip(self, *, are_heads: bool, largest: float, norm: float) -> None:
        """Scale gradients with the norm `norm` down to the norm `largest`. If `largest` is 0, clipping is disabled."""
        if largest > 0:
            for part in self.chained_optimizers:
                clip_grad_by_total_norm_fp32(_parameters(part, are_heads), max_norm=largest, total_norm=norm)


def _parameters(part: MegatronOptimizer, are_heads: bool) -> list[torch.Tensor]:
    """Return the tensors of heads or trunk that the optimizer updates.

    These are parameters, float32 copies of parameters, or flat shards of either.
    """
    groups = [group for group in part.param_groups if group.get(_OF_HEADS, False) == are_heads]
    return list(chain.from_iterable(group["params"] for group in groups))


def _counts(parameter: Any, part: MegatronOptimizer) -> bool:
    """Return whether this rank's gradient of a parameter is included in a norm over all ranks.

    If several ranks of a model replica hold the same parameter, only one of them includes the gradient.
    """
    is_first = param_is_not_tensor_parallel_duplicate(parameter, getattr(part, "tp_group", None))
    return parameter.grad is not None and param_is_not_shared(parameter) and is_first
