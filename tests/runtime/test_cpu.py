"""Every shim is needed: a training step and a save run with all of them, and fail without any one."""

import os
import subprocess
import sys

import pytest
from packaging.version import Version

from swiftlite.runtime.compat import MCORE_VERSION

pytestmark = pytest.mark.gloo  # a process for each
SHIMS = ["device_literal", "tensor_type", "patch_current_device", "patch_synchronize", "patch_rng_state"]
SHIMS += ["patch_alltoall_dispatcher", "pinned_memory", "tensor_cuda"]
if Version("0.19") <= MCORE_VERSION:
    SHIMS += ["patch_current_stream"]
PROGRAM = """
import sys
from pathlib import Path
import torch
from megatron.core.models.common.embeddings.rope_utils import get_pos_emb_on_this_cp_rank
from swiftlite.runtime import cpu

# What stands there without: a function that hands its argument on, as most shims are, or the stock method.
STOCK = {"tensor_cuda": torch.Tensor.cuda}
if sys.argv[1]:
    setattr(cpu, sys.argv[1], STOCK.get(sys.argv[1], lambda value=None: value))
from swiftlite.args.commands import SftArgs
from swiftlite.plan.flops import training_flops
from swiftlite.plan.run import make_plan, make_schedule
from swiftlite.families import index
from swiftlite.heads import Heads
from swiftlite.model.build import build_model
from swiftlite.runtime.distributed import session
from swiftlite.train.checkpoint import Checkpointer
from swiftlite.train.objective import NextTokenObjective
from swiftlite.train.optim import make_optimizer, wrap_model
from swiftlite.train.trainer import Trainer
from swiftlite.data.batch import collate
from swiftlite.data.sample import make_sample

hf_config = dict(
    model_type="glm4_moe", vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
    num_attention_heads=2, num_key_value_heads=2, head_dim=8, rms_norm_eps=1e-6, max_position_embeddings=16,
    n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, n_shared_experts=1, first_k_dense_replace=0,
    n_group=1, topk_group=1, norm_topk_prob=True, routed_scaling_factor=1.0, partial_rotary_factor=0.5,
    attention_bias=False, use_qk_norm=False,
)
args = SftArgs(torch_dtype="float32", micro_batch_size=1, global_batch_size=1, train_iters=1)

def main():
    with session() as mesh:
        device = mesh.device
        architecture = index.get(hf_config).architecture(hf_config)
        (model,) = build_model(architecture, hf_config, mesh=mesh, dtype=torch.float32, heads=Heads(1))
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.1)
        wrapped = wrap_model([model], mesh, torch.float32)
        plan, schedule = make_plan(args, 1, Heads(1)), make_schedule(args, 1)
        optimizer, scheduler = make_optimizer(args, plan, schedule, wrapped, mesh)
        batch = collate([make_sample([1, 2, 3, 4], [0, 1, 1, 1])], 0, num_drafts=1)
        trainer = Trainer(
            mesh=mesh, model=wrapped, objective=NextTokenObjective(Heads(1), 0.1), optimizer=optimizer,
            scheduler=scheduler, plan=plan, schedule=schedule, train_batches=lambda step: [batch], eval_batches=[],
            count_flops=training_flops(hf_config, Heads(1)).step, sinks=[], logging_steps=1, checkpointer=None,
        )
        assert trainer.step(1)["grad_norm"] > 0
        Checkpointer(Path(sys.argv[2]), mesh, [model], optimizer, {}).save(1)
        # What context-parallel ranks ask for in every forward pass.
        get_pos_emb_on_this_cp_rank(torch.zeros(4, 1, 1, 2), 0, mesh.cp)
        assert not torch.cuda.is_available()

if __name__ == "__main__":
    main()
"""


def run_without(shim: str, tmp_path, **environment: str) -> subprocess.CompletedProcess:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    command = [sys.executable, "-W", "ignore", str(program), shim, str(tmp_path / "out")]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment})


def test_a_step_and_a_save_run_with_all_shims(tmp_path):
    result = run_without("", tmp_path)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("shim", SHIMS)
def test_each_shim_is_needed(tmp_path, shim):
    result = run_without(shim, tmp_path)
    assert result.returncode != 0
    # A torch built for CUDA says so as it loads; what is asked for is the error.
    said = [line for line in result.stderr.splitlines() if "No CUDA runtime is found" not in line]
    assert any(word in line for line in said for word in ("CUDA", "cuda", "NVIDIA")), result.stderr


def test_no_compiler_is_needed(tmp_path):
    nowhere = {"CXX": str(tmp_path / "no-compiler"), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
    done = run_without("", tmp_path, **nowhere)
    assert done.returncode == 0, done.stderr
    done = run_without("run_eagerly", tmp_path, **nowhere)
    assert done.returncode != 0
    assert "compiler" in done.stderr
