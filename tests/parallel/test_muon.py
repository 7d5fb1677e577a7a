"""Test that updates of matrices are those of torch.optim.Muon on whole matrices, and all others those of AdamW."""

import zlib
from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from swiftlite.args.commands import SftArgs
from swiftlite.base.heads import Heads
from swiftlite.families.resolved import resolve
from swiftlite.model.open import open_model
from swiftlite.plan.layout import layout_of
from swiftlite.plan.run import make_plan, make_schedule
from swiftlite.runtime.distributed import session
from swiftlite.runtime.mesh import Mesh
from swiftlite.train.checkpoint.optimizer_state import slots_of
from swiftlite.train.muon import Muon
from swiftlite.train.optim import make_optimizer, wrap_model
from tests.parallel.launch import launch
from tests.parallel.parity import SIZES, TP2_SP
from tests.tiers import some_of
from tests.tiny import make_tiny_hf

pytestmark = pytest.mark.gloo

LR, DECAY = 1e-2, 0.3
TP2 = {"tensor_model_parallel_size": 2}
CASES: dict[str, tuple[int, str, dict[str, Any]]] = {
    "alone": (1, "qwen2", {}),
    "TP2": (2, "qwen2", TP2),
    "TP2 bfloat16": (2, "qwen2", TP2 | {"torch_dtype": "bfloat16"}),
    "DP2": (2, "qwen2", {}),
    "DP2 bfloat16": (2, "qwen2", {"torch_dtype": "bfloat16"}),
    "TP2 ETP2": (2, "qwen3_moe", TP2_SP | {"expert_tensor_parallel_size": 2}),
    "TP2 EP2": (2, "qwen3_moe", TP2_SP | {"expert_model_parallel_size": 2}),
}
# Numbers of rows of queries, key and value in a query group of a model of SIZES.
GROUP = (64, 32, 32)


class Reference:
    """Copies of the whole matrices of a model and of its other parameters, with torch's optimizers."""

    def __init__(self, named: Mapping[str, torch.nn.Parameter], mesh: Mesh):
        self.mesh = mesh
        is_outer = {name: "embedding" in name or "output_layer" in name for name in named}
        self.matrices = {
            name: self.parts(name, parameter, main_of(parameter).detach().clone())
            for name, parameter in named.items()
            if parameter.ndim == 2 and not is_outer[name]
        }
        self.others = {
            name: main_of(each).detach().clone() for name, each in named.items() if name not in self.matrices
        }
        matrices = [*chain.from_iterable(self.matrices.values())]
        self.muon = torch.optim.Muon(matrices, lr=LR, weight_decay=DECAY, adjust_lr_fn="match_rms_adamw")
        decayed = [name for name in self.others if not (name.endswith("bias") or "norm" in name)]
        groups = [
            {
                "params": [self.others[name] for name in self.others if (name in decayed) == is_decayed],
                "weight_decay": w,
            }
            for is_decayed, w in ((True, DECAY), (False, 0.0))
        ]
        self.adamw = torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.95), eps=1e-8)

    def parts(self, name: str, parameter: Any, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Return the whole matrix of which each rank gives its part; for queries, keys and values three matrices."""
        if getattr(parameter, "tensor_model_parallel", False):
            group = self.mesh.tp if getattr(parameter, "allreduce", True) else self.mesh.groups.expt_tp
            parts = [torch.empty_like(tensor) for _ in range(group.size())]
            dist.all_gather(parts, tensor.contiguous(), group=group)
            tensor = torch.cat(parts, parameter.partition_dim)
        if not name.endswith("linear_qkv.weight"):
            return [tensor]
        rows = tensor.view(-1, sum(GROUP), tensor.size(1)).split(list(GROUP), dim=1)
        return [each.reshape(-1, tensor.size(1)).clone() for each in rows]

    def step(self, named: Mapping[str, torch.nn.Parameter]) -> None:
        for name, parameter in named.items():
            gradient: torch.Tensor = parameter.main_grad  # pyright: ignore[reportAssignmentType, reportAttributeAccessIssue]
            if name in self.others:
                self.others[name].grad = gradient.clone()
                continue
            for whole, part in zip(self.matrices[name], self.parts(name, parameter, gradient), strict=True):
                whole.grad = part
        with patch.object(torch.Tensor, "bfloat16", torch.Tensor.float):  # swiftlite iterates in float32 on a CPU
            self.muon.step()
        self.adamw.step()

    def difference(self, named: Mapping[str, torch.nn.Parameter]) -> float:
        """Return the largest difference of a weight."""
        largest = 0.0
        for name, parameter in named.items():
            expected, found = [self.others.get(name)], [main_of(parameter).detach()]
            if name in self.matrices:
                expected, found = self.matrices[name], self.parts(name, parameter, found[0])
            for one, other in zip(expected, found, strict=True):
                assert one is not None
                largest = max(largest, float((one - other).abs().max()))
        return largest


def main_of(parameter: Any) -> torch.Tensor:
    return getattr(parameter, "main_param", parameter)


def update(hf_dir: Path, world_size: int, options: dict[str, Any]) -> dict[str, Any]:
    """Run three updates with random gradients."""
    rates: dict[str, Any] = {"lr": LR, "weight_decay": DECAY, "lr_decay_style": "constant", "lr_warmup_fraction": 0.0}
    usual: dict[str, Any] = {"torch_dtype": "float32", "optimizer": "muon", "clip_grad": 0.0, "train_iters": 3}
    args = SftArgs(model=str(hf_dir), **usual | rates | options)
    dtype = getattr(torch, args.torch_dtype)
    with session(layout_of(args)) as mesh:
        chunks, _ = open_model(resolve(hf_dir), mesh, dtype=dtype, heads=Heads(1), mtp_init="random")
        wrapped = wrap_model(chunks, mesh, dtype)
        plan = make_plan(args, world_size, Heads(1))
        optimizer, scheduler = make_optimizer(args, plan, make_schedule(args, 4), wrapped, mesh)
        named = dict(chunks[0].named_parameters())
        reference = Reference(named, mesh)
        for step in range(3):
            wrapped[0].zero_grad_buffer()
            for name, parameter in named.items():
                is_split = getattr(parameter, "tensor_model_parallel", False)
                place = (step, name, mesh.tp.rank() if is_split else 0, mesh.dp.rank())
                generator = torch.Generator().manual_seed(zlib.crc32(str(place).encode()))
                gradient: Any = parameter.main_grad  # pyright: ignore[reportAttributeAccessIssue]
                gradient.copy_(torch.randn(parameter.shape, generator=generator))
            wrapped[0].finish_grad_sync()
            reference.step(named)
            scheduler.step(increment=1)
            optimizer.step()
        slots = slots_of(optimizer)
        return {
            "difference": reference.difference(named),
            "matrices": sorted(reference.matrices),
            "by muon": sorted(
                name
                for name, parameter in named.items()
                for slot in slots
                if slot.parameter is parameter and isinstance(slot.inner, Muon) and "exp_avg_sq" not in slot.kinds
            ),
        }


@pytest.mark.parametrize("name", some_of(CASES, "TP2", "DP2 bfloat16"))
def test_updates_are_those_of_torch(tmp_path, name):
    num_processes, family, options = CASES[name]
    hf_dir = make_tiny_hf(tmp_path / "hf", family, depth=1, **SIZES)
    for found in launch(num_processes, update, hf_dir, num_processes, options):
        assert found["by muon"] == found["matrices"]
        assert {name.rpartition(".")[0].rpartition(".")[2] for name in found["matrices"]} >= {"linear_qkv", "eh_proj"}
        assert found["difference"] <= 1e-6
