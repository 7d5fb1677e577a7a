"""Test that every shim is necessary: a training step and a save work with all shims, and fail without any one."""

import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from packaging.version import Version
from torch._inductor import config as inductor
from torch.multiprocessing.spawn import ProcessRaisedException

from swiftlite.args.commands import SftArgs
from swiftlite.args.fields import MoeArgs
from swiftlite.base.heads import Heads
from swiftlite.data.batch import collate
from swiftlite.data.sample import make_sample
from swiftlite.families import index
from swiftlite.model.build import build_model
from swiftlite.model.layers.router import TopKRouter
from swiftlite.plan.cost.flops import training_flops
from swiftlite.plan.layout import group_of, layout_of
from swiftlite.plan.run import make_plan, make_schedule
from swiftlite.runtime import cpu
from swiftlite.runtime.compat import MCORE_VERSION
from swiftlite.runtime.distributed import session
from swiftlite.train.batches.train_batches import TrainBatches
from swiftlite.train.checkpoint.checkpointer import Checkpointer
from swiftlite.train.checkpoint.state import CheckpointState
from swiftlite.train.methods.next_token import NextTokenObjective
from swiftlite.train.optim import make_optimizer, wrap_model
from swiftlite.train.trainer import Trainer
from tests.parallel.launch import launch
from tests.tiers import some_of

pytestmark = pytest.mark.gloo  # a process for each
SHIMS = ["device_literal", "tensor_type", "patch_current_device", "patch_synchronize", "patch_rng_state"]
SHIMS += ["tensor_cuda"]
if Version("0.19") <= MCORE_VERSION:
    SHIMS += ["patch_streams"]
SHIMS_OF_EXPERTS = ["patch_alltoall_dispatcher", "patch_streams"]
"""Shims that are needed if experts are distributed over ranks."""
# What stands there without: a function that hands its argument on, as most shims are, or the stock method.
STOCK = {"tensor_cuda": torch.Tensor.cuda}
DTYPES: dict[str, Any] = {"tensor_type": "bfloat16"}
"""Where a shim is needed only in another dtype than float32: optimizer.py:671 asks for the types of parameters."""
HF_CONFIG = {
    "model_type": "glm4_moe",
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "n_shared_experts": 1,
    "first_k_dense_replace": 0,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
    "partial_rotary_factor": 0.5,
    "attention_bias": False,
    "use_qk_norm": False,
}


def step_and_save(shim: str, out_dir: Path, **options: Any) -> None:
    """Run one training step and save one checkpoint in a separate process.

    Args:
        shim: the shim that is removed; "" for none.
        options: further options of `swiftlite megatron sft`.
    """
    if shim:
        setattr(cpu, shim, STOCK.get(shim, lambda value=None: value))
    args = SftArgs(torch_dtype=DTYPES.get(shim, "float32"), micro_batch_size=1, train_iters=1, **options)
    dtype = getattr(torch, args.torch_dtype)
    architecture = index.get(HF_CONFIG).architecture(HF_CONFIG)
    with session(layout_of(args)) as mesh:
        moe = group_of(args, MoeArgs)
        (model,) = build_model(architecture, HF_CONFIG, mesh=mesh, dtype=dtype, heads=Heads(1), moe=moe)
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.1)
        wrapped = wrap_model([model], mesh, dtype)
        plan = make_plan(args, dist.get_world_size(), Heads(1))
        schedule = make_schedule(args, 1)
        optimizer, scheduler = make_optimizer(args, plan, schedule, wrapped, mesh)
        batch = collate([make_sample([1, 2, 3, 4], [0, 1, 1, 1])], 0, num_drafts=1)
        flops = training_flops(HF_CONFIG, Heads(1))
        trainer = Trainer(
            mesh=mesh,
            model=wrapped,
            objective=NextTokenObjective(Heads(1), 0.1),
            optimizer=optimizer,
            scheduler=scheduler,
            plan=plan,
            schedule=schedule,
            batches=TrainBatches(lambda step: [batch]),
            eval_batches=[],
            flops=flops,
            metric_loggers=[],
            logging_steps=1,
            checkpointer=None,
        )
        assert trainer.step(1)["grad_norm"] > 0
        Checkpointer(
            out_dir, mesh, [model], optimizer, CheckpointState(step=0, mtp_num_layers=1, torch_dtype=args.torch_dtype)
        ).save(1)
        # What pipeline stages do with a tied embedding (language_module.py:244).
        torch.zeros(1).cuda()
        assert not torch.cuda.is_available()


def test_a_step_and_a_save_run_with_all_shims(tmp_path):
    launch(1, step_and_save, "", tmp_path)


@pytest.mark.parametrize("shim", some_of(SHIMS, "device_literal", "tensor_cuda"))
def test_each_shim_is_needed(tmp_path, shim):
    with pytest.raises(ProcessRaisedException) as raised:
        launch(1, step_and_save, shim, tmp_path)
    assert_of_cuda(raised.value)


@pytest.mark.parametrize("shim", some_of(["", *SHIMS_OF_EXPERTS], ""))
def test_each_shim_of_experts_is_needed(tmp_path, shim):
    step = partial(step_and_save, expert_model_parallel_size=2, moe_shared_expert_overlap=True)
    if not shim:
        launch(2, step, shim, tmp_path)
        return
    with pytest.raises(ProcessRaisedException) as raised:
        launch(2, step, shim, tmp_path)
    assert_of_cuda(raised.value)


def assert_of_cuda(error: ProcessRaisedException) -> None:
    """Assert that an error of a process is about CUDA."""
    # A torch built for CUDA says so as it loads; what is asked for is the error.
    said = [line for line in str(error).splitlines() if "No CUDA runtime is found" not in line]
    assert any(word in line for line in said for word in ("CUDA", "cuda", "NVIDIA")), said


def without_a_compiler(shim: str, directory: Path) -> None:
    # The stock router's count, in whose place ours is, is among what megatron-core compiles.
    del TopKRouter._apply_expert_bias  # this process ends with the step
    inductor.cpp.cxx = (str(directory / "no-compiler"),)  # pyright: ignore[reportAttributeAccessIssue]
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(directory / "cache")
    step_and_save(shim, directory)


def test_no_compiler_is_needed(tmp_path):
    launch(1, without_a_compiler, "", tmp_path)
    with pytest.raises(ProcessRaisedException, match="compiler"):
        launch(1, without_a_compiler, "run_eagerly", tmp_path)
