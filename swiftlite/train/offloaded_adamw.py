"""megatron-core's AdamW with moments in the memory of the host (`--optimizer_cpu_offload`).

The host holds a copy of the main weights, the gradients and the moments of the tensors that are offloaded. In a step,
gradients are copied to the host, each tensor is updated there as soon as its gradient has arrived, and the weights are
copied back. The main weights also stay on the GPU, where megatron-core rounds them to the parameters.
"""

from typing import Any

import torch
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer

from swiftlite.train.checkpoint.optimizer_state import HoldsMoments


class OffloadedAdamW(HybridDeviceOptimizer, HoldsMoments):
    """megatron-core's HybridDeviceOptimizer, whose moments can be saved and loaded."""

    def __init__(self, param_groups: list[dict[str, Any]], offload_fraction: float):
        """Take over the groups of another AdamW, with its settings (lr, betas, eps, weight_decay).

        Args:
            offload_fraction: minimum share of the elements that is offloaded; tensors are offloaded as a whole.
        """
        # The shards of a distributed optimizer can be views of parameters, which torch's constructor refuses.
        super().__init__(
            [{"params": []}],
            offload_fraction=offload_fraction,
            cpu_optimizer_cls=_AdamW,
            gpu_optimizer_cls=_AdamW,
        )
        self.param_groups = param_groups
        for group in param_groups:
            group["fused"] = True  # each step copies the settings of these groups to the groups of both devices
        self._init_sub_optimizers()
        self._optimizer_of = {
            parameter: optimizer
            for optimizer in self.sub_optimizers
            for group in optimizer.param_groups
            for parameter in group["params"]
        }

    def weights_were_loaded(self) -> None:
        for main, copy in self.gpu_params_map_cpu_copy.items():
            copy.copy_(main.detach())

    def state_of(self, main: torch.Tensor) -> dict[str, Any]:
        updated = self.param_to_inner_param[main]
        state = self._optimizer_of[updated].state[updated]
        if not state:
            state["step"] = torch.tensor(0.0, device=updated.device)
            state["exp_avg"] = torch.zeros_like(updated)
            state["exp_avg_sq"] = torch.zeros_like(updated)
        return state


class _AdamW(torch.optim.AdamW):
    """torch's AdamW for groups that already have settings."""

    def __init__(self, param_groups: list[dict[str, Any]]):
        super().__init__([{"params": []}])
        self.param_groups = [self.defaults | group for group in param_groups]
