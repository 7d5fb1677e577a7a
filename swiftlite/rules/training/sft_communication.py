"""Rules of `megatron sft` for communication: the distributed optimizer, NCCL, and the dispatch of tokens to experts."""

import os
from collections.abc import Iterator
from importlib.util import find_spec

from swiftlite.args.bounds import out_of_bounds
from swiftlite.args.commands import SftArgs
from swiftlite.args.config import Problem
from swiftlite.args.fields import DistributedArgs
from swiftlite.families.mlp import MixtureOfExperts
from swiftlite.plan.facts import Facts
from swiftlite.plan.layout import instances_problems, layout_of, process_problems, ranks_with_same_parameters
from swiftlite.plan.run import distributed_of

_BACKEND_MODULES = {"deepep": "deep_ep", "hybridep": "hybrid_ep_cpp"}
_HINT_TO_DISTRIBUTE = "remove it, or set --expert_model_parallel_size for a model with experts"


def distributed_in(args: SftArgs, facts: Facts) -> DistributedArgs:
    """Return the options of the distributed optimizer with their defaults in this run."""
    replicas, _ = ranks_with_same_parameters(layout_of(args), facts.world_size)
    return distributed_of(args, replicas, facts.machine.is_cuda)


def overlap_has_its_optimizer(args: SftArgs, facts: Facts) -> Iterator[Problem]:
    needed = ("use_distributed_optimizer", "overlap_grad_reduce")
    missing = [f"--{name} true" for name in needed if not vars(args)[name]]
    if args.overlap_param_gather and missing:
        yield f"--overlap_param_gather requires {' and '.join(missing)}", f"add {' '.join(missing)}"


def optimizer_has_its_instances(args: SftArgs, facts: Facts) -> Iterator[Problem]:
    layout, number = layout_of(args), args.num_distributed_optimizer_instances
    if number <= 1 or out_of_bounds(layout) or process_problems(layout, facts.world_size):
        return  # another rule reports it
    flag = f"--num_distributed_optimizer_instances {number}"
    if not distributed_in(args, facts).use_distributed_optimizer:
        yield f"{flag} requires --use_distributed_optimizer true", "add --use_distributed_optimizer true"
    if (args.megatron_config or {}).get("reduce_scatter_with_fp32_accumulation") is True:
        problem = f"{flag} does not support reduce_scatter_with_fp32_accumulation of --megatron_config"
        yield problem, "remove one of them"
    yield from instances_problems(layout, facts.world_size, number)


def optimizer_can_leave_the_gpu(args: SftArgs, facts: Facts) -> Iterator[Problem]:
    if not args.optimizer_cpu_offload:
        return
    if not facts.machine.is_cuda:
        problem = "--optimizer_cpu_offload true requires GPUs; without them, the optimizer is on the host"
        yield problem, "remove --optimizer_cpu_offload"
    if (args.megatron_config or {}).get("decoupled_weight_decay") is False:
        problem = "--optimizer_cpu_offload true does not support decoupled_weight_decay false of --megatron_config"
        yield problem, "remove one of them"


def nccl_can_register_buffers(args: SftArgs, facts: Facts) -> Iterator[Problem]:
    if (args.megatron_config or {}).get("nccl_ub") is not True or not facts.machine.is_cuda:
        return
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        if "expandable_segments:True" in os.environ.get(name, ""):
            yield f"nccl_ub of --megatron_config does not support {name}=expandable_segments:True", f"unset {name}"


def tokens_reach_their_experts(args: SftArgs, facts: Facts) -> Iterator[Problem]:
    name = args.moe_token_dispatcher_type
    if name == "alltoall" or out_of_bounds(layout_of(args)):
        return
    flag = f"--moe_token_dispatcher_type {name}"
    if lacking := _without_distributed_experts(args, facts):
        yield f"{flag} requires experts that are distributed over ranks, but {lacking}", _HINT_TO_DISTRIBUTE
        return
    if name == "flex":
        flag += f" --moe_flex_dispatcher_backend {args.moe_flex_dispatcher_backend}"
        yield from _flex_problems(flag, args, facts)
    is_gathering = name == "allgather" or args.moe_flex_dispatcher_backend == "hybridep"
    if is_gathering and args.tensor_model_parallel_size % _expert_ranks(args):
        yield (
            f"{flag} requires the ranks of all experts to have equal numbers of tokens: --tensor_model_parallel_size "
            f"{args.tensor_model_parallel_size} must be a multiple of {_expert_ranks(args)}, which is "
            "--expert_model_parallel_size x --expert_tensor_parallel_size",
            "use --moe_token_dispatcher_type alltoall",
        )
    if name == "allgather" and args.pipeline_model_parallel_size > 1:
        problem = f"{flag} does not support --pipeline_model_parallel_size {args.pipeline_model_parallel_size}"
        yield problem, "use --moe_token_dispatcher_type alltoall"


def shared_experts_can_overlap(args: SftArgs, facts: Facts) -> Iterator[Problem]:
    if not args.moe_shared_expert_overlap or out_of_bounds(layout_of(args)):
        return
    flag = "--moe_shared_expert_overlap true"
    if args.moe_token_dispatcher_type != "alltoall":
        problem = f"{flag} does not support --moe_token_dispatcher_type {args.moe_token_dispatcher_type}"
        yield problem, "use --moe_token_dispatcher_type alltoall"
    if lacking := _without_distributed_experts(args, facts):
        yield f"{flag} requires experts that are distributed over ranks, but {lacking}", _HINT_TO_DISTRIBUTE
    elif facts.architecture is not None and not any(
        isinstance(layer.mlp, MixtureOfExperts) and layer.mlp.shared_ffn for layer in facts.architecture.layers
    ):
        yield f"{flag} requires shared experts, which the model does not have", "remove it"
    elif facts.architecture is not None and any(
        isinstance(layer.mlp, MixtureOfExperts) and layer.mlp.latent for layer in facts.architecture.layers
    ):
        # megatron-core would give the latent states to the shared experts.
        yield f"{flag} does not support experts with latent states (moe_latent_size)", "remove it"
    is_split = args.tensor_model_parallel_size > 1 and args.transformer_impl == "transformer_engine"
    if is_split and args.tuner_type == "lora":
        # The adapter does not see that megatron-core moves the exchange of these layers out of the layer.
        yield (
            f"{flag} with --tuner_type lora does not support --transformer_impl transformer_engine and "
            f"--tensor_model_parallel_size {args.tensor_model_parallel_size}",
            "remove --moe_shared_expert_overlap",
        )


def _flex_problems(flag: str, args: SftArgs, facts: Facts) -> Iterator[Problem]:
    module = _BACKEND_MODULES[args.moe_flex_dispatcher_backend]
    if not facts.machine.is_cuda:
        yield f"{flag} requires GPUs", "use --moe_token_dispatcher_type alltoall"
    if find_spec(module) is None:
        yield (
            f"{flag} requires the package {module}, which is not installed",
            "install DeepEP from https://github.com/deepseek-ai/DeepEP, or use --moe_token_dispatcher_type alltoall",
        )
    if args.torch_dtype != "bfloat16":
        yield f"{flag} does not support --torch_dtype {args.torch_dtype}", "use --torch_dtype bfloat16"


def _expert_ranks(args: SftArgs) -> int:
    return args.expert_model_parallel_size * args.expert_tensor_parallel_size


def _without_distributed_experts(args: SftArgs, facts: Facts) -> str:
    """Return why experts are not distributed over ranks; empty if they are."""
    if facts.architecture is not None and not facts.architecture.has_experts:
        return "the model has no experts"
    if _expert_ranks(args) == 1:
        return "each rank has all experts"
    return ""
