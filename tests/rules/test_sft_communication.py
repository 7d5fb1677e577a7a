"""Test the rules for the distributed optimizer, NCCL and the dispatch of tokens to experts."""

import dataclasses

import pytest

from swiftlite import rules
from swiftlite.families import FAMILIES
from swiftlite.rules.training import sft_communication
from tests.messages import mention_each, mentions
from tests.rules.good import SFT, change_config, problems_of

MIXTURE = {
    "model_type": "qwen3_moe",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
SHARED = {
    "model_type": "glm4_moe",
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
SHARDED = {"use_distributed_optimizer": True}
EP2, TP2 = {"expert_model_parallel_size": 2}, {"tensor_model_parallel_size": 2, "sequence_parallel": True}
FLEX = {"moe_token_dispatcher_type": "flex", "torch_dtype": "bfloat16"}


@pytest.fixture
def gpu(monkeypatch):
    monkeypatch.setattr(rules, "sees_gpu", lambda: True)
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


def problems(world_size=1, **options):
    return problems_of(dataclasses.replace(SFT, **options), world_size)


@pytest.mark.parametrize(
    ("world_size", "number", "options", "problem"),
    [
        (4, 3, SHARDED, "3 4"),
        (4, 8, SHARDED, "8 4"),
        (4, 4, SHARDED | TP2, "4 2"),
        (4, 2, {}, "2 --use_distributed_optimizer"),
        (4, 2, SHARDED | {"megatron_config": {"reduce_scatter_with_fp32_accumulation": True}}, "2 --megatron_config"),
    ],
)
def test_instances_that_cannot_be(here, no_gpu, world_size, number, options, problem):
    found = problems(world_size, num_distributed_optimizer_instances=number, **options)
    assert any(mentions(text, f"--num_distributed_optimizer_instances {problem}") for text, _ in found), found


def test_instances_divide_the_ranks_with_the_same_experts(here):
    """With 4 ranks and experts on 4, each expert is on one rank."""
    change_config(**MIXTURE)
    options = SHARDED | {"num_distributed_optimizer_instances": 2}
    ((problem, hint),) = problems(4, expert_model_parallel_size=4, **options)
    assert mentions(problem, "--num_distributed_optimizer_instances 2 experts, 1")
    assert mentions(hint, "1")
    assert rules.check(dataclasses.replace(SFT, **EP2, **options), 4) == []


@pytest.mark.parametrize(("world_size", "options"), [(4, SHARDED), (8, SHARDED | TP2), (8, SHARDED | TP2 | EP2)])
def test_instances_of_equal_size(here, world_size, options):
    change_config(**MIXTURE)
    assert rules.check(dataclasses.replace(SFT, num_distributed_optimizer_instances=2, **options), world_size) == []


def test_an_optimizer_leaves_a_gpu(here, no_gpu):
    ((problem, hint),) = problems(optimizer_cpu_offload=True)
    assert mentions(problem, "--optimizer_cpu_offload GPUs")
    assert mentions(hint, "--optimizer_cpu_offload")
    ((problem, hint),) = problems(optimizer_offload_fraction=0.5)
    assert mentions(problem, "--optimizer_offload_fraction 0.5 --optimizer_cpu_offload")


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"megatron_config": {"decoupled_weight_decay": False}}, "decoupled_weight_decay --megatron_config"),
        ({"optimizer": "adamw_8bit"}, "--optimizer adamw_8bit"),
        ({"optimizer_offload_fraction": 0.0}, "--optimizer_offload_fraction 0.0 0 1"),
    ],
)
def test_an_optimizer_that_cannot_leave_the_gpu(here, gpu, options, problem):
    assert rules.check(dataclasses.replace(SFT, optimizer_cpu_offload=True)) == []
    found = problems(optimizer_cpu_offload=True, **options)
    assert any(mentions(text, problem) for text, _ in found), found


def test_buffers_of_nccl_are_no_expandable_segments(here, gpu, monkeypatch):
    args = dataclasses.replace(SFT, megatron_config={"nccl_ub": True})
    assert rules.check(args, 2) == []
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    ((problem, hint),) = problems_of(args, 2)
    assert mentions(problem, "nccl_ub --megatron_config PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True")
    assert mentions(hint, "PYTORCH_CUDA_ALLOC_CONF")


@pytest.mark.parametrize("name", ["allgather", "flex"])
def test_a_dispatcher_has_experts_on_several_ranks(here, no_gpu, name):
    ((problem, _),) = problems(moe_token_dispatcher_type=name)
    assert mentions(problem, f"--moe_token_dispatcher_type {name} no experts")
    change_config(**MIXTURE)
    ((problem, hint),) = problems(moe_token_dispatcher_type=name)
    assert mentions(problem, f"--moe_token_dispatcher_type {name} all experts")
    assert mentions(hint, "--expert_model_parallel_size")


@pytest.mark.parametrize(
    ("world_size", "options", "problem"),
    [
        (2, EP2, "--tensor_model_parallel_size 1 2"),
        (4, EP2 | TP2 | {"pipeline_model_parallel_size": 2}, "--pipeline_model_parallel_size 2"),
    ],
)
def test_gathered_tokens_are_equally_many(here, no_gpu, world_size, options, problem):
    change_config(**MIXTURE)
    ((found, hint),) = problems(world_size, moe_token_dispatcher_type="allgather", **options)
    assert mentions(found, f"--moe_token_dispatcher_type allgather {problem}")
    assert mentions(hint, "--moe_token_dispatcher_type alltoall")


def test_tokens_can_be_gathered(here, no_gpu):
    change_config(**MIXTURE)
    args = dataclasses.replace(SFT, moe_token_dispatcher_type="allgather", **EP2, **TP2)
    assert rules.check(args, 4) == []


def test_flex_requires_a_gpu_and_its_package(here, no_gpu):
    change_config(**MIXTURE)
    for backend, module in (("deepep", "deep_ep"), ("hybridep", "hybrid_ep_cpp")):
        flag = f"--moe_token_dispatcher_type flex --moe_flex_dispatcher_backend {backend}"
        found = problems(2, **EP2, **TP2, **FLEX, moe_flex_dispatcher_backend=backend)
        assert mention_each([text for text, _ in found], [f"{flag} GPUs", f"{flag} {module}"])


def test_flex_with_its_package(here, gpu, monkeypatch):
    """The package needs NVIDIA's compiler, so it is only named here."""
    monkeypatch.setattr(sft_communication, "find_spec", lambda name: name)
    change_config(**MIXTURE)
    for world_size, options in ((2, {}), (4, {"moe_flex_dispatcher_backend": "hybridep"} | TP2)):
        assert rules.check(dataclasses.replace(SFT, **FLEX, **EP2, **options), world_size) == []
    ((problem, _),) = problems(2, **FLEX, **EP2, moe_flex_dispatcher_backend="hybridep")
    assert mentions(problem, "hybridep --tensor_model_parallel_size 1 2")
    ((problem, _),) = problems(2, **(FLEX | {"torch_dtype": "float32"}), **EP2)
    assert mentions(problem, "--moe_token_dispatcher_type flex --torch_dtype float32")


def test_a_backend_without_flex_is_noted(here):
    args = dataclasses.replace(SFT, moe_flex_dispatcher_backend="hybridep")
    assert mention_each(rules.check(args), ["--moe_flex_dispatcher_backend hybridep --moe_token_dispatcher_type flex"])


@pytest.mark.parametrize(
    ("config", "options", "problem"),
    [
        ({}, {}, "no experts"),
        (MIXTURE, {}, "all experts"),
        (MIXTURE, EP2, "shared experts"),
        (SHARED, EP2 | TP2 | {"moe_token_dispatcher_type": "allgather"}, "--moe_token_dispatcher_type allgather"),
    ],
)
def test_shared_experts_that_cannot_overlap(here, no_gpu, config, options, problem):
    change_config(**config)
    ((found, _),) = problems(2, moe_shared_expert_overlap=True, **options)
    assert mentions(found, f"--moe_shared_expert_overlap {problem}")


def test_shared_experts_next_to_experts_with_latent_states(here, no_gpu):
    change_config(model_type="nemotron_h", layer_norm_epsilon=1e-5, **FAMILIES["nemotron_h"].tiny)
    found = [text for text, _ in problems(2, moe_shared_expert_overlap=True, **EP2)]
    assert any(mentions(text, "--moe_shared_expert_overlap moe_latent_size") for text in found), found


def test_adapters_see_the_exchange_of_shared_experts(here, no_gpu):
    change_config(**SHARED)
    lora = {"tuner_type": "lora", "moe_shared_expert_overlap": True, "transformer_impl": "transformer_engine"}
    found = [text for text, _ in problems(2, **EP2, **TP2, **lora)]
    assert any(mentions(text, "--moe_shared_expert_overlap --tuner_type lora") for text in found), found


def test_shared_experts_can_overlap(here, no_gpu):
    change_config(**SHARED)
    assert rules.check(dataclasses.replace(SFT, moe_shared_expert_overlap=True, **EP2), 2) == []
