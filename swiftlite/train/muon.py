"""Update matrices with Muon, and all other parameters with AdamW (`--optimizer muon`), in megatron-core's optimizers.

megatron-core 0.16.1 has Muon too (megatron.core.optimizer.muon), for which it requires the package emerging-optimizers,
which exists for Python 3.12 and later. The same parameters are matrices here: all with two dimensions except embeddings
and output layers, so those of experts, routers and MTP layers too. Queries, keys and values are separate matrices.
The arithmetic is that of torch.optim.Muon with `adjust_lr_fn="match_rms_adamw"`, with which AdamW's learning rate and
weight decay fit matrices too.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from swiftlite.base.lora import is_adapter
from swiftlite.families.vision import is_aligner_parameter, is_vit_parameter
from swiftlite.model.gpt import GPTModel
from swiftlite.runtime.mesh import Mesh
from swiftlite.train.checkpoint.optimizer_state import HoldsMoments

MOMENTUM = 0.95
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
NEWTON_SCHULZ_STEPS = 5
EPS = 1e-7
RMS_OF_ADAMW = 0.2
"""Usual root mean square of an update of AdamW with a learning rate of 1."""


@dataclass(frozen=True)
class Matrix:
    """The distribution of a matrix over ranks, and the rows that are separate matrices.

    Attributes:
        group: the ranks that hold parts of it; None if this rank holds it as a whole.
        dim: the dimension that is divided over the ranks.
        parts: numbers of consecutive rows that belong to different matrices, repeated to the last row, such as those of
            the queries, the key and the value of a query group; empty: it is one matrix.
    """

    group: dist.ProcessGroup | None = None
    dim: int = 0
    parts: Sequence[int] = ()

    def orthogonalized(self, part: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of the orthogonalized matrix, scaled to the size of an update of AdamW. Collective
        over the group, because the iteration multiplies the whole matrix by itself.
        """
        if self.group is None or self.group.size() == 1:
            return self._whole(part)
        parts = [torch.empty_like(part) for _ in range(self.group.size())]
        dist.all_gather(parts, part.contiguous(), group=self.group)
        return self._whole(torch.cat(parts, self.dim)).chunk(self.group.size(), self.dim)[self.group.rank()]

    def _whole(self, whole: torch.Tensor) -> torch.Tensor:
        if not self.parts:
            return _update_of(whole)
        groups = whole.view(-1, sum(self.parts), whole.size(1)).split(list(self.parts), dim=1)
        updates = [_update_of(rows.reshape(-1, whole.size(1))).view_as(rows) for rows in groups]
        return torch.cat(updates, dim=1).view_as(whole)


def _update_of(matrix: torch.Tensor) -> torch.Tensor:
    scale = RMS_OF_ADAMW * math.sqrt(max(matrix.shape))
    return orthogonalize(matrix).float() * scale


def orthogonalize(matrix: torch.Tensor) -> torch.Tensor:
    """Return the matrix with singular values near 1, by a Newton-Schulz iteration as in torch.

    It iterates in bfloat16 as torch does, except on a CPU: without native bfloat16, its products of matrices take 50
    times as long as those in float32.
    """
    a, b, c = COEFFICIENTS
    found = matrix.float() if matrix.is_cpu else matrix.bfloat16()
    is_tall = matrix.size(0) > matrix.size(1)
    if is_tall:
        found = found.T
    found = found / found.norm().clamp(min=EPS)
    for _ in range(NEWTON_SCHULZ_STEPS):
        gram = found @ found.T
        found = torch.addmm(found, torch.addmm(gram, gram, gram, beta=b, alpha=c), found, beta=a)
    return found.T if is_tall else found


def matrices_of(chunks: Iterable[GPTModel], mesh: Mesh) -> dict[torch.Tensor, Matrix]:
    """Return the matrices that Muon updates, by the tensors that the optimizer updates."""
    found = {}
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            if parameter.requires_grad and parameter.ndim == 2 and not _is_for_adamw(name):
                main = getattr(parameter, "main_param", parameter)
                found[main] = _matrix(name, parameter, chunk.config, mesh)
    return found


def _is_for_adamw(name: str) -> bool:
    is_outer = "embeddings." in name or "output_layer." in name
    return is_outer or is_adapter(name) or is_vit_parameter(name) or is_aligner_parameter(name)


def _matrix(name: str, parameter: Any, config: Any, mesh: Mesh) -> Matrix:
    group, dim, rows = None, 0, len(parameter)
    if getattr(parameter, "tensor_model_parallel", False):
        is_of_experts = not getattr(parameter, "allreduce", True)
        group, dim = mesh.groups.expt_tp if is_of_experts else mesh.tp, parameter.partition_dim
        rows *= group.size()
    heads, size = config.num_attention_heads // config.num_query_groups, config.kv_channels
    parts = (heads * size, size, size)
    if not name.endswith("linear_qkv.weight") or rows != config.num_query_groups * sum(parts):  # it has gates too
        parts = ()
    return Matrix(group, dim, parts)


class Muon(torch.optim.AdamW, HoldsMoments):
    """Muon for `matrices` and AdamW for all other parameters of megatron-core's groups."""

    def __init__(self, param_groups: list[dict[str, Any]], matrices: Mapping[torch.Tensor, Matrix]):
        """Take over the groups of another AdamW, with its settings (lr, betas, eps, weight_decay)."""
        super().__init__([{"params": [torch.empty(0)]}])
        defaults = {name: value for name, value in self.param_groups[0].items() if name != "params"}
        self.param_groups = param_groups
        self.matrices = matrices
        for group in param_groups:
            for name, value in defaults.items():
                group.setdefault(name, value)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Run an update."""
        groups = self.param_groups
        for group in groups:
            for main in group["params"]:
                if main in self.matrices:
                    self._update(main, group["lr"], group["weight_decay"])
        self.param_groups = [group | {"params": self._others(group["params"])} for group in groups]
        try:
            super().step(closure)
        finally:
            self.param_groups = groups

    def _others(self, mains: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        return [main for main in mains if main not in self.matrices]

    def _update(self, main: torch.Tensor, lr: float, weight_decay: float) -> None:
        gradient, momentum = main.grad, self.moment(main, "exp_avg")
        if gradient is None:
            return
        momentum.lerp_(gradient, 1 - MOMENTUM)
        update = self.matrices[main].orthogonalized(gradient.lerp(momentum, MOMENTUM))
        main.mul_(1 - lr * weight_decay).add_(update, alpha=-lr)

    def kinds(self, main: torch.Tensor) -> tuple[str, ...]:
        return ("exp_avg",) if main in self.matrices else super().kinds(main)

    def state_of(self, main: torch.Tensor) -> dict[str, Any]:
        state = self.state[main]
        if not state:
            for each in self.kinds(main):
                state[each] = torch.zeros_like(main)
            state["step"] = torch.zeros((), device=main.device)
        return state
