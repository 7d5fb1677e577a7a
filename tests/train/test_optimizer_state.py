"""Test that optimizers resumed from a checkpoint make bitwise the same updates as without interruption, on one process.

tests/parallel/test_resume.py uses several processes.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from megatron.core.dist_checkpointing.mapping import is_main_replica
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer

from swiftlite.args.commands import SftArgs
from swiftlite.args.fields import OptimizerName
from swiftlite.base.heads import Heads
from swiftlite.families.resolved import HfModel, resolve
from swiftlite.model.gpt import GPTModel
from swiftlite.model.open import open_model
from swiftlite.plan.run import make_plan, make_schedule
from swiftlite.runtime.mesh import Mesh
from swiftlite.train.checkpoint.checkpointer import Checkpointer, load_checkpoint, sharded_model
from swiftlite.train.checkpoint.optimizer_state import MOMENTS, Slot, slots_of, state_to_load
from swiftlite.train.checkpoint.state import CheckpointState
from swiftlite.train.optim import make_optimizer, wrap_model
from tests.groups import SecondOfTwo, as_second_rank
from tests.tiers import pairwise
from tests.tiny import make_tiny_hf
from tests.torchao_here import torchao as torchao

Dtype = Literal["float32", "bfloat16"]
STATE = CheckpointState(step=0, mtp_num_layers=1, torch_dtype="float32")
SAVED_AFTER, UPDATES = 2, 4


FAMILIES = ("qwen3", "glm4_moe")


@pytest.fixture(scope="module", params=FAMILIES)
def hf_model(request, tmp_path_factory) -> HfModel:
    """Write two models. The second has experts, whose optimizer is one of several in a chain."""
    return resolve(make_tiny_hf(tmp_path_factory.mktemp("hf"), request.param, depth=1))


@dataclass
class Learning:
    """A model and its optimizer."""

    chunk: GPTModel
    wrapped: DistributedDataParallel
    optimizer: MegatronOptimizer

    def update(self, number: int) -> None:
        """Update with gradients that depend only on `number`."""
        torch.manual_seed(number)
        self.wrapped.zero_grad_buffer()
        self.optimizer.zero_grad()
        for parameter in self.chunk.parameters():
            parameter.main_grad.copy_(torch.randn(parameter.shape))  # pyright: ignore[reportAttributeAccessIssue]
        self.optimizer.step()

    def load(self, checkpoint: Path, mesh: Mesh) -> None:
        load_checkpoint(checkpoint, mesh, [self.chunk], self.optimizer)


def learn(
    hf_model: HfModel,
    mesh: Mesh,
    dtype: Dtype,
    is_distributed: bool,
    seed: int = 1,
    name: OptimizerName = "adamw",
) -> Learning:
    options: dict[str, Any] = {"lr_decay_style": "constant", "lr_warmup_fraction": 0.0, "clip_grad": 0.0}
    options["optimizer"] = name
    args = SftArgs(torch_dtype=dtype, train_iters=UPDATES, use_distributed_optimizer=is_distributed, lr=1e-2, **options)
    chunks, _ = open_model(hf_model, mesh, dtype=getattr(torch, dtype), heads=Heads(1), mtp_init="random", seed=seed)
    (wrapped,) = wrap_model(chunks, mesh, getattr(torch, dtype), args)
    optimizer, scheduler = make_optimizer(args, make_plan(args, 1, Heads(1)), make_schedule(args, 1), [wrapped], mesh)
    scheduler.step(increment=1)
    return Learning(chunks[0], wrapped, optimizer)


@pytest.mark.parametrize("optimizer_class", [torch.optim.AdamW, torch.optim.Adam])
@pytest.mark.parametrize(("is_fused", "device"), [(True, "meta"), (False, "cpu"), (None, "cpu")])
def test_a_fused_optimizer_counts_updates_on_the_device_of_its_parameters(is_fused, device, optimizer_class):
    """torch's fused optimizer refuses a step count on another device than its parameters."""
    parameter = torch.nn.Parameter(torch.empty(2, device="meta"))
    inner = optimizer_class([parameter])
    inner.param_groups[0]["fused"] = is_fused
    Slot(parameter, inner, parameter).set_step(3)
    assert inner.state[parameter]["step"].device.type == device


def test_state_that_other_ranks_hold_is_an_empty_part(hf_model, mesh):
    """Data-parallel ranks exchange all parts in the same order, so each rank requires a part for every parameter."""
    optimizer = learn(hf_model, mesh, "bfloat16", is_distributed=True).optimizer
    parameters = [slot.parameter for slot in slots_of(optimizer)]
    parts = getattr(optimizer, "chained_optimizers", [optimizer])
    for part in parts:
        for here, shards in zip(part.model_float16_groups, part.shard_fp32_from_float16_groups, strict=True):
            for place in [place for place, parameter in enumerate(here) if parameter is parameters[0]]:
                del here[place], shards[place]
    empty, *others = slots_of(optimizer)
    assert [slot.parameter is parameter for slot, parameter in zip((empty, *others), parameters, strict=True)]
    assert {empty.part(kind).numel() for kind in empty.kinds} == {0}
    assert all(slot.part(kind).numel() for slot in others for kind in slot.kinds)


def test_an_owner_reads_and_writes_the_main_replica(hf_model, mesh):
    """Replicas are numbered by rank, but a parameter may be owned by the second rank."""
    learning = learn(hf_model, mesh, "float32", is_distributed=True)
    group: Any = SecondOfTwo()
    slots = [replace(slot, group=group) for slot in slots_of(learning.optimizer)]
    tensors = state_to_load(slots, sharded_model([learning.chunk], as_second_rank(mesh, "dp_cp")))
    assert 0 < len(tensors) < len(slots) * len(MOMENTS)
    assert all(is_main_replica(tensor.replica_id) for tensor in tensors.values())


@pytest.mark.parametrize(
    ("hf_model", "optimizer_and_dtype", "saves_distributed", "resumes_distributed"),
    pairwise(
        FAMILIES,
        [("adamw", "float32"), ("adamw", "bfloat16"), ("adamw_8bit", "bfloat16")],
        [False, True],
        [False, True],
    ),
    indirect=["hf_model"],
)
def test_updates_go_on(hf_model, mesh, tmp_path, request, optimizer_and_dtype, saves_distributed, resumes_distributed):
    """A checkpoint in either of megatron-core's two formats is resumed in both formats.

    With bfloat16, the checkpoint also contains float32 main weights. 8-bit moments are restored exactly, although the
    checkpoint contains them as float32.
    """
    optimizer, dtype = optimizer_and_dtype
    if optimizer == "adamw_8bit":
        request.getfixturevalue("torchao")
    unbroken = learn(hf_model, mesh, dtype, saves_distributed, 0, optimizer)
    resumed = learn(hf_model, mesh, dtype, resumes_distributed, 1, optimizer)
    assert_goes_on(unbroken, resumed, tmp_path, mesh)


@pytest.mark.parametrize("is_distributed", [(True, False), (False, True)], ids=["to plain", "to distributed"])
def test_updates_of_a_model_with_two_precisions_go_on(mesh, tmp_path, is_distributed):
    """Linear attention has float32 parameters in a bfloat16 model, which are first in the distributed optimizer."""
    hf_model = resolve(make_tiny_hf(tmp_path / "hf", "qwen3_next", depth=1))
    unbroken, resumed = (learn(hf_model, mesh, "bfloat16", form, seed) for seed, form in enumerate(is_distributed))
    assert len({parameter.dtype for parameter in unbroken.chunk.parameters()}) == 2
    assert_goes_on(unbroken, resumed, tmp_path, mesh)


def assert_goes_on(unbroken: Learning, resumed: Learning, tmp_path: Path, mesh: Mesh) -> None:
    """Assert that updates after a checkpoint was loaded equal those of the optimizer that saved it."""
    for number in range(UPDATES):
        if number == SAVED_AFTER:
            Checkpointer(tmp_path, mesh, [unbroken.chunk], unbroken.optimizer, STATE).save(number)
        unbroken.update(number)
    resumed.load(tmp_path / f"checkpoint-{SAVED_AFTER}", mesh)
    for number in range(SAVED_AFTER, UPDATES):
        resumed.update(number)
    expected = dict(unbroken.chunk.named_parameters())
    for name, parameter in resumed.chunk.named_parameters():
        assert torch.equal(parameter, expected[name]), name
