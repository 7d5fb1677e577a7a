"""Test that options for communication reach megatron-core's configs, by value."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.distributed import DistributedDataParallelConfig

from swiftlite.args.commands import SftArgs
from swiftlite.args.fields import MoeArgs
from swiftlite.families.resolved import resolve
from swiftlite.model.build import build_config
from swiftlite.model.open import build_hf_model
from swiftlite.runtime.device import current_device
from swiftlite.train import optim, phases
from tests.parallel.launch import launch
from tests.tiny import make_tiny_hf

MIXTURE: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 8,
    "num_attention_heads": 1,
    "activation_func": "silu",
    "num_moe_experts": 4,
    "moe_shared_expert_intermediate_size": 8,
}


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("moe_token_dispatcher_type", ["alltoall", "allgather", "flex"]),
        ("moe_flex_dispatcher_backend", ["deepep", "hybridep"]),
        ("moe_shared_expert_overlap", [False, True]),
    ],
)
def test_options_of_experts_reach_the_config(name, values):
    for value in values:
        moe = replace(MoeArgs(), **{name: value})
        config = build_config(MIXTURE, device=current_device(), dtype=torch.bfloat16, mtp_num_layers=0, moe=moe)
        assert getattr(config, name) == value
    assert getattr(MoeArgs(), name) == values[0]


class Reached(Exception):
    """The config was created."""


@pytest.mark.parametrize("value", [False, True])
def test_nccl_ub_reaches_the_config(mesh, tmp_path, monkeypatch, value):
    """Buffers of NCCL cannot be allocated on a CPU, so the test ends where DistributedDataParallel gets its config."""

    def end(model_config: Any, ddp_config: DistributedDataParallelConfig, *_: Any, **__: Any) -> None:
        raise Reached(ddp_config.nccl_ub)

    chunks = build_hf_model(resolve(make_tiny_hf(tmp_path, "llama")), mesh, dtype=torch.float32)
    monkeypatch.setattr(optim, "DistributedDataParallel", end)
    # megatron-core refuses expandable segments with nccl_ub; swiftlite's own start-up sets them for other runs.
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    with pytest.raises(Reached) as reached:
        optim.wrap_model(chunks, mesh, torch.float32, settings={"nccl_ub": value})
    assert reached.value.args == (value,)


def groups_of_instances(directory: Path, number: int) -> tuple[int, int, int]:
    """Return the number of instances in the config, and the sizes of the groups within and between instances."""
    hf_model = resolve(directory)
    args = SftArgs(use_distributed_optimizer=True, num_distributed_optimizer_instances=number)
    with phases.open_session(args, hf_model) as mesh:
        chunks = build_hf_model(hf_model, mesh, dtype=torch.float32)
        wrapped: Any = optim.wrap_model(chunks, mesh, torch.float32, args)[0]  # `buffers` is taken for torch's method
        (buffer,) = wrapped.buffers
        between = 1
        if number > 1:
            between = wrapped.inter_dist_opt_group.size()
        return wrapped.ddp_config.num_distributed_optimizer_instances, buffer.data_parallel_world_size, between


@pytest.mark.gloo
@pytest.mark.parametrize("number", [1, 2])
def test_instances_reach_the_config_and_the_groups(tmp_path, number):
    directory = make_tiny_hf(tmp_path, "llama")
    assert launch(2, groups_of_instances, directory, number) == [(number, 2 // number, number)] * 2
