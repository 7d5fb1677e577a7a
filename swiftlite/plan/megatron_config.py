"""The settings of megatron-core that --megatron_config accepts, and reasons why it refuses others.

megatron-core's config classes have about 300 fields. swiftlite sets many of them, from its options or from config.json,
and has its own code in place of the code that reads most others. A value for one of those would be overwritten or
ignored, so only the fields in `SETTINGS` are accepted. This module does not import torch.
"""

import ast
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, get_args

from swiftlite.args import bounds
from swiftlite.args.commands import SftArgs
from swiftlite.args.config import Problem, near
from swiftlite.args.docs import options

Owner = Literal["TransformerConfig", "DistributedDataParallelConfig", "OptimizerConfig"]
FLAG = "--megatron_config"


@dataclass(frozen=True)
class Setting:
    """A field of a config class of megatron-core.

    Attributes:
        owner: name of the class.
        type: type of the value, with the bounds of a number.
        effect: what the setting does.
        default: the value that changes nothing, if there is one.
        is_changeable: whether a resumed run may change it, because it only distributes work.
    """

    owner: Owner
    type: Any
    effect: str
    default: bool = False
    is_changeable: bool = False


SETTINGS: dict[str, Setting] = {
    # transformer_config.py, in __post_init__
    "disable_bf16_reduced_precision_matmul": Setting(
        "TransformerConfig", bool, "sums of matrix products of bfloat16 are accumulated in float32"
    ),
    # schedules.py, in the interleaved schedule
    "overlap_p2p_comm_warmup_flush": Setting(
        "TransformerConfig", bool, "messages between stages also overlap at the start and the end of a step"
    ),
    # moe/router.py; `TopKRouter.apply_z_loss`
    "moe_z_loss_coeff": Setting(
        "TransformerConfig", bounds.PositiveFloat, "weight of the loss that keeps the logits of routers small"
    ),
    "moe_router_force_load_balancing": Setting(
        "TransformerConfig", bool, "routers select experts at random, for measurements of speed"
    ),
    # moe/token_dispatcher.py
    "moe_permute_fusion": Setting("TransformerConfig", bool, "Transformer Engine's kernels sort tokens by expert"),
    # param_and_grad_buffer.py
    "check_for_nan_in_grad": Setting(
        "DistributedDataParallelConfig", bool, "a rank stops at a NaN or an infinity before gradients are reduced"
    ),
    "reduce_scatter_with_fp32_accumulation": Setting(
        "DistributedDataParallelConfig", bool, "gradients are sent in bfloat16 and summed over ranks in float32"
    ),
    "pad_buckets_for_high_nccl_busbw": Setting(
        "DistributedDataParallelConfig",
        bool,
        "buckets are multiples of 65,536 parameters, which NCCL sends faster",
        is_changeable=True,
    ),
    "nccl_ub": Setting(
        "DistributedDataParallelConfig",
        bool,
        "parameters and gradients are in buffers that are registered with NCCL",
        is_changeable=True,
    ),
    # optimizer/__init__.py, in get_standard_config_overrides and where Adam is created
    "apply_wd_to_qk_layernorm": Setting("OptimizerConfig", bool, "weight decay of the norms of queries and keys"),
    "decoupled_lr": Setting(
        "OptimizerConfig", bounds.PositiveFloat, "peak learning rate of the embedding and the output layer"
    ),
    "decoupled_min_lr": Setting("OptimizerConfig", bounds.NonNegativeFloat, "learning rate at the end of its decay"),
    "decoupled_weight_decay": Setting(
        "OptimizerConfig", bool, "false: Adam with L2 regularization instead of AdamW", default=True
    ),
}
"""The accepted settings. The names of settings are unique over the config classes."""

_RENAMED = {
    "bf16": "torch_dtype",
    "bucket_size": "ddp_bucket_size",
    "fp4": "fp4_format",
    "fp8": "fp8_format",
    "grad_reduce_in_fp32": "grad_reduce_in_bf16",
    "moe_enable_deepep": "moe_flex_dispatcher_backend",
    "num_layers_in_first_pipeline_stage": "decoder_first_pipeline_num_layers",
    "num_layers_in_last_pipeline_stage": "decoder_last_pipeline_num_layers",
    "params_dtype": "torch_dtype",
    "pipeline_dtype": "torch_dtype",
    "virtual_pipeline_model_parallel_size": "num_virtual_stages_per_pipeline_rank",
}
"""Options of swiftlite by megatron-core's names, where they differ."""

_FROM_MODEL = frozenset(
    """
    activation_func add_bias_linear add_qkv_bias attention_output_gate beta_fast beta_slow ffn_hidden_size
    gated_linear_unit hetereogenous_dist_checkpoint hidden_size init_method_std kv_channels kv_lora_rank
    layernorm_epsilon layernorm_zero_centered_gamma moe_ffn_hidden_size moe_grouped_gemm moe_layer_freq
    moe_router_dtype moe_router_enable_expert_bias moe_router_group_topk moe_router_load_balancing_type
    moe_router_num_groups moe_router_pre_softmax moe_router_score_function moe_router_topk
    moe_router_topk_scaling_factor moe_shared_expert_gate moe_shared_expert_intermediate_size mscale mscale_all_dim
    multi_latent_attention normalization num_attention_heads num_layers num_moe_experts num_query_groups
    original_max_position_embeddings q_lora_rank qk_head_dim qk_layernorm qk_pos_emb_head_dim rope_type rotary_base
    rotary_interleaved rotary_percent rotary_scaling_factor softmax_scale v_head_dim window_size
    """.split()
)
"""Fields that describe the model."""

_SET = frozenset(
    """
    apply_rope_fusion attention_dropout average_in_collective batch_p2p_comm batch_p2p_sync bias_activation_fusion
    bias_dropout_fusion calculate_per_token_loss deallocate_pipeline_outputs embedding_init_method
    finalize_model_grads_func first_last_layers_bf16 fp16 fp4_recipe grad_scale_func gradient_accumulation_fusion
    hidden_dropout init_method loss_scale masked_softmax_fusion no_sync_func output_layer_init_method overlap_p2p_comm
    perform_initialization persist_layer_norm use_cpu_initialization use_te_activation_func variable_seq_lengths
    """.split()
)
"""Fields that swiftlite sets, without an option."""


_SCHEDULE = "megatron-core's schedule for it does not call the forward pass of swiftlite"
_GRAPHS = "a CUDA graph has one shape, but micro-batches, evaluations and decoding have rows of different lengths"
_OFFLOADING = "megatron-core's forward pass starts it, which swiftlite replaces"
_FSDP = "models are wrapped in DistributedDataParallel"
_OPTIMIZER = "the state of the optimizer is on the device; see --optimizer"
_DROPPING = "no token is dropped"
_USER_BUFFERS = "its buffers are not created"

_REASONS = {
    "overlap_moe_expert_parallel_comm": _SCHEDULE,
    "ep_overlap_early_attn_memory_release": _SCHEDULE,
    "delay_wgrad_compute": _SCHEDULE,
    "cuda_graph_impl": _GRAPHS,
    "cuda_graph_scope": _GRAPHS,
    "enable_cuda_graph": _GRAPHS,
    "external_cuda_graph": _GRAPHS,
    "fine_grained_activation_offloading": _OFFLOADING,
    "use_megatron_fsdp": _FSDP,
    "use_custom_fsdp": _FSDP,
    "use_precision_aware_optimizer": _OPTIMIZER,
    "moe_expert_capacity_factor": _DROPPING,
    "moe_token_dropping": _DROPPING,
    "tp_comm_overlap": _USER_BUFFERS,
    "distribute_saved_activations": "--sequence_parallel true divides what a layer stores",
}
"""Why fields that users of megatron-core know have no effect."""


def settings_of(given: Mapping[str, Any] | None, owner: Owner) -> dict[str, Any]:
    """Return the settings of one config class.

    Args:
        given: the value of --megatron_config, without problems.
    """
    return {name: value for name, value in (given or {}).items() if SETTINGS[name].owner == owner}


def kept_by_resume(given: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Return the settings that a resumed run must not change; None if there are none.

    Args:
        given: a value of --megatron_config, also one with problems.
    """
    kept = dict(given or {})
    for name in given or {}:
        if name in SETTINGS and SETTINGS[name].is_changeable:
            del kept[name]
    return kept or None


def setting_problems(given: Mapping[str, Any] | None) -> Iterator[Problem]:
    """Yield a problem for each setting that is not accepted, and for each value that does not fit its setting."""
    from pydantic import TypeAdapter, ValidationError

    for name, value in (given or {}).items():
        if name not in SETTINGS:
            yield _refusal(name)
            continue
        kind = SETTINGS[name].type
        try:
            TypeAdapter(kind).validate_python(value, strict=True)
        except ValidationError:
            yield f"{FLAG}: {name} {json.dumps(value)} must be {_expected(kind, value)}", ""


def _expected(kind: Any, value: Any) -> str:
    """Return a description of the values of a type, for the message on an invalid value."""
    if kind is bool:
        return "true or false"
    _, limits = get_args(kind)
    if isinstance(value, float) and not math.isfinite(value):
        return f"a finite number, {bounds.describe(limits)}"
    return f"a number {bounds.describe(limits)}"


def _refusal(name: str) -> Problem:
    """Return why a setting is not accepted, and what to do instead."""
    remove = f"remove {json.dumps(name)}"
    option = _RENAMED.get(name, name)
    if name in _FROM_MODEL:
        return f"{FLAG} contains {name!r}, which is read from config.json of --model", remove
    if name in _SET:
        return f"{FLAG} contains {name!r}, which swiftlite sets", remove
    if option in options(SftArgs):
        return f"{FLAG} contains {name!r}, which has its own option", f"use --{option}"
    if name in _REASONS:
        return (
            f"{FLAG} contains {name!r}, which is not supported: {_REASONS[name]}",
            f"{remove}; see docs/en/parallel.md",
        )
    if name in megatron_names():
        return f"{FLAG} contains {name!r}, which is not used by swiftlite", f"{remove}; see docs/en/parallel.md"
    hint = f"use {', '.join(sorted(SETTINGS))}"
    if suggestion := near(name, {*SETTINGS, *megatron_names()}):
        hint = f"did you mean {suggestion}?"
    return f"{FLAG} contains {name!r}, which megatron-core does not have", hint


_SOURCES = (
    "model_parallel_config.py",
    "transformer/transformer_config.py",
    "distributed/distributed_data_parallel_config.py",
    "optimizer/optimizer_config.py",
)


@cache
def megatron_names() -> frozenset[str]:
    """Return the fields of the config classes of the installed megatron-core.

    They are read from its source, because importing it loads torch.
    """
    spec = find_spec("megatron")
    if spec is None:
        return frozenset()
    names: set[str] = set()
    for folder in spec.submodule_search_locations or ():
        for source in (Path(folder, "core", name) for name in _SOURCES):
            if source.is_file():
                names |= _fields_in(source)
    return frozenset(names)


def _fields_in(source: Path) -> set[str]:
    """Return the annotated fields of the classes in a file."""
    classes = [node for node in ast.parse(source.read_text(encoding="utf-8")).body if isinstance(node, ast.ClassDef)]
    statements = [statement for each in classes for statement in each.body]
    fields = [each.target for each in statements if isinstance(each, ast.AnnAssign)]
    return {field.id for field in fields if isinstance(field, ast.Name) and not field.id.startswith("_")}
