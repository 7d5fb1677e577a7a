"""Rules of `megatron sft` for --megatron_config: every setting must be known, and must have an effect in this run."""

from collections.abc import Callable, Iterator
from importlib.util import find_spec

from swiftlite.args.bounds import out_of_bounds
from swiftlite.args.commands import SftArgs
from swiftlite.args.config import Problem
from swiftlite.plan.facts import Facts
from swiftlite.plan.heads import lr_of
from swiftlite.plan.layout import layout_of, num_virtual_stages, process_problems
from swiftlite.plan.megatron_config import FLAG, SETTINGS, setting_problems
from swiftlite.plan.run import min_lr_of
from swiftlite.rules.training.sft_communication import distributed_in


def megatron_config_is_known(args: SftArgs, facts: Facts) -> Iterator[Problem]:
    yield from setting_problems(args.megatron_config)


def megatron_config_has_an_effect(args: SftArgs, facts: Facts) -> Iterator[Problem]:
    if out_of_bounds(layout_of(args)) or process_problems(layout_of(args), facts.world_size):
        return  # other rules report it
    for name, value in (args.megatron_config or {}).items():
        if any(setting_problems({name: value})) or value is SETTINGS[name].default:
            continue
        if missing := _missing(name, args, facts):
            yield f"{FLAG}: {name} has no effect: {missing}", f'remove "{name}"'


def decoupled_lr_is_above_its_minimum(args: SftArgs, facts: Facts) -> Iterator[Problem]:
    settings = args.megatron_config or {}
    if args.lr_decay_style == "constant" or any(setting_problems(settings)) or "decoupled_lr" not in settings:
        return
    if _missing("decoupled_lr", args, facts):
        return  # another rule reports it
    lowest = settings.get(
        "decoupled_min_lr", min_lr_of(args, lr_of(args, facts.heads, is_quantized=facts.is_quantized))
    )
    if settings["decoupled_lr"] < lowest:
        problem = f"{FLAG}: decoupled_lr {settings['decoupled_lr']:g} is less than decoupled_min_lr {lowest:g}"
        verb = "lower" if "decoupled_min_lr" in settings else "set"
        yield problem, f'{verb} "decoupled_min_lr"'


def _missing(name: str, args: SftArgs, facts: Facts) -> str:
    """Return why a setting has no effect in the run; empty if it has one."""
    if name not in _MISSING:
        return ""
    return _MISSING[name](args, facts)


def _experts(args: SftArgs, facts: Facts) -> str:
    if facts.architecture is not None and not facts.architecture.has_experts:
        return "the model has no experts"
    return ""


def _sorted_by_kernels(args: SftArgs, facts: Facts) -> str:
    if args.expert_model_parallel_size * args.expert_tensor_parallel_size == 1:
        return "each rank has all experts"
    if find_spec("transformer_engine") is None:
        return "Transformer Engine is not installed"
    return _experts(args, facts)


def _interleaved(args: SftArgs, facts: Facts) -> str:
    if num_virtual_stages(layout_of(args)) is None:
        return "the pipeline has no virtual stages"
    return ""


def _reduced_in_bfloat16(args: SftArgs, facts: Facts) -> str:
    if missing := _sharded_optimizer(args, facts):
        return missing
    return "" if args.grad_reduce_in_bf16 else "--grad_reduce_in_bf16 is not true"


def _sharded_optimizer(args: SftArgs, facts: Facts) -> str:
    if not distributed_in(args, facts).use_distributed_optimizer:
        return "--use_distributed_optimizer is not true"
    return ""


def _registered_with_nccl(args: SftArgs, facts: Facts) -> str:
    if not facts.machine.is_cuda:
        return "NCCL registers the memory of GPUs, and the run is on CPUs"
    if facts.world_size == 1:
        return "there is one process"
    return ""


def _bfloat16(args: SftArgs, facts: Facts) -> str:
    return "" if args.torch_dtype == "bfloat16" else f"--torch_dtype is {args.torch_dtype}"


def _trained_embedding(args: SftArgs, facts: Facts) -> str:
    if args.mtp_mode == "heads_only":
        return "--mtp_mode heads_only trains no embedding"
    if args.tuner_type == "lora" and not {"embed_tokens", "lm_head"} & set(args.lora_modules_to_save):
        return "--tuner_type lora trains no embedding"
    if args.freeze_llm:
        return "--freeze_llm is true"
    return ""


def _minimum_of_a_decay(args: SftArgs, facts: Facts) -> str:
    if "decoupled_lr" not in (args.megatron_config or {}):
        return "decoupled_lr is not set"
    if args.lr_decay_style == "constant":
        return "--lr_decay_style is constant"
    return ""


def _query_norms(args: SftArgs, facts: Facts) -> str:
    architecture = facts.architecture
    if architecture is not None and not architecture.mcore_config().get("qk_layernorm"):
        return "queries and keys of the model have no norms"
    if args.tuner_type == "lora":
        return "--tuner_type lora trains no norms of queries and keys"
    if args.weight_decay == 0:
        return "--weight_decay is 0"
    return ""


def _weight_decay(args: SftArgs, facts: Facts) -> str:
    if args.optimizer != "adamw":
        return f"--optimizer {args.optimizer} has only decoupled weight decay"
    return "--weight_decay is 0" if args.weight_decay == 0 else ""


# Functions that return why a setting has no effect in a run, or "".
_MISSING: dict[str, Callable[[SftArgs, Facts], str]] = {
    "apply_wd_to_qk_layernorm": _query_norms,
    "decoupled_lr": _trained_embedding,
    "decoupled_min_lr": _minimum_of_a_decay,
    "decoupled_weight_decay": _weight_decay,
    "disable_bf16_reduced_precision_matmul": _bfloat16,
    "moe_permute_fusion": _sorted_by_kernels,
    "moe_router_force_load_balancing": _experts,
    "moe_z_loss_coeff": _experts,
    "nccl_ub": _registered_with_nccl,
    "overlap_p2p_comm_warmup_flush": _interleaved,
    "pad_buckets_for_high_nccl_busbw": _sharded_optimizer,
    "reduce_scatter_with_fp32_accumulation": _reduced_in_bfloat16,
}
