"""Clip gradients on the device, those of the MTP heads by a separate norm, and check norms before the update.

With a common norm of trunk and heads, the large gradients of new heads would reduce the updates of the trunk.
"""

from collections.abc import Callable, Mapping
from itertools import chain
from typing import Any, cast

import torch
import torch.distributed as dist
from megatron.core.optimizer import ChainedOptimizer, MegatronOptimizer, ParamKey, clip_grads
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

    return override(_OF_HEADS, is_head_parameter, {_OF_HEADS: True, **settings})


def override(
    name: str, selects: Callable[[str], bool], settings: Mapping[str, Any]
) -> dict[ParamKey, ParamGroupOverride]:
    """Return an override for `get_megatron_optimizer` with settings of the parameters whose names are selected."""

    def is_selected(parameter: torch.nn.Parameter, full_name: str) -> bool:
        return selects(full_name.replace("module.", ""))  # the name without prefixes of wrappers

    key = ParamKey(with_name_predicate=ParamWithNamePredicate(name=name, fn=is_selected))
    return {key: cast(ParamGroupOverride, settings)}


class ClippedOptimizer(ChainedOptimizer):
    """An optimizer that clips gradients without waiting for their norms, which stay on the device.

    megatron-core's `ChainedOptimizer.step` reads the norm, so that the GPU is idle until the update is launched.

    Attributes:
        check: called with the norms before each update, by name as in the metrics; returns whether to update.
    """

    def __init__(self, optimizer: MegatronOptimizer, device: torch.device, mtp_clip_grad: float | None = None):
        """Wrap an optimizer.

        Args:
            device: device of the gradients; required also on a rank without gradients.
            mtp_clip_grad: maximum norm of the heads' gradients, whose groups were made with `separate_head_groups`; 0
                disables clipping. None: trunk and heads have a common norm.
        """
        optimizers = [optimizer]
        if isinstance(optimizer, ChainedOptimizer):
            optimizers = optimizer.chained_optimizers
        super().__init__(optimizers)
        self.check: Callable[[Mapping[str, torch.Tensor]], bool] = lambda norms: True
        self.device = device
        config: Any = self.config
        self._clipped: dict[str, tuple[bool | None, float]] = {"grad_norm": (None, config.clip_grad)}
        if mtp_clip_grad is not None:
            self._clipped = {"grad_norm": (False, config.clip_grad), "mtp_grad_norm": (True, mtp_clip_grad)}

    @torch.no_grad()
    def step(self) -> tuple[bool, torch.Tensor | None, int | None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Run one update like `ChainedOptimizer.step`.

        Returns:
            Whether parameters were updated, the norm of the gradients, float64 (of the trunk's, if the heads have
            another), and None.
        """
        if self.prepare_grads():
            return False, None, None
        norms = {name: self._square(are_heads).sqrt() for name, (are_heads, _) in self._clipped.items()}
        is_good = self.check(norms)
        if is_good:
            for name, (are_heads, largest) in self._clipped.items():
                self._clip(are_heads, largest, norms[name])
        return is_good and self.step_with_ready_grads(), norms["grad_norm"], None

    def _square(self, are_heads: bool | None) -> torch.Tensor:
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

    def _clip(self, are_heads: bool | None, largest: float, norm: torch.Tensor) -> None:
        """Scale gradients with the norm `norm` down to the norm `largest`. If `largest` is 0, clipping is disabled."""
        factor = (largest / (norm + 1e-6)).clamp(max=1)  # as in megatron-core
        # Reading the factor saves a pass over the gradients, but only on a CPU the host does not have to wait for it.
        if not largest or (not factor.is_cuda and factor == 1):
            return
        parameters = chain.from_iterable(_parameters(part, are_heads) for part in self.chained_optimizers)
        gradients: Any = [parameter.grad for parameter in parameters if parameter.grad is not None]
        if gradients:  # none on a pipeline stage without such parameters
            foreach: Any = torch  # torch's functions for lists of tensors have no types
            foreach._foreach_mul_(gradients, factor.float())


def _parameters(part: MegatronOptimizer, are_heads: bool | None) -> list[torch.Tensor]:
    """Return the tensors of heads or trunk (None: of both) that the optimizer updates.

    These are parameters, float32 copies of parameters, or flat shards of either.
    """
    groups = [group for group in part.param_groups if are_heads in (None, group.get(_OF_HEADS, False))]
    return list(chain.from_iterable(group["params"] for group in groups))


def _counts(parameter: Any, part: MegatronOptimizer) -> bool:
    """Return whether this rank's gradient of a parameter is included in a norm over all ranks.

    If several ranks of a model replica hold the same parameter, only one of them includes the gradient.
    """
    is_first = param_is_not_tensor_parallel_duplicate(parameter, getattr(part, "tp_group", None))
    return parameter.grad is not None and param_is_not_shared(parameter) and is_first
