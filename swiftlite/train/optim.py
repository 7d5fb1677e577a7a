"""Create megatron-core's DDP wrappers, optimizer and learning-rate schedule."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import (
    MegatronOptimizer,
    OptimizerConfig,
    ParamKey,
    get_megatron_optimizer,
    get_standard_config_overrides,
)
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler, ParamGroupOverride
from megatron.core.transformer.module import Float16Module
from megatron.core.utils import unwrap_model

from swiftlite.args.commands import SftArgs
from swiftlite.args.fields import DistributedArgs
from swiftlite.args.rl_fields import CompletionArgs
from swiftlite.families.vision import is_aligner_parameter, is_vit_parameter
from swiftlite.model.gpt import GPTModel
from swiftlite.model.layers.tensor_parallel import add_gradients_in_place
from swiftlite.model.ranks import broadcast_from_last_stage
from swiftlite.plan.megatron_config import settings_of
from swiftlite.plan.run import Plan, Schedule
from swiftlite.runtime.mesh import Mesh
from swiftlite.train.clipping import ClippedOptimizer, override, separate_head_groups
from swiftlite.train.muon import Muon, matrices_of
from swiftlite.train.offloaded_adamw import OffloadedAdamW


def wrap_model(
    chunks: Sequence[GPTModel],
    mesh: Mesh,
    dtype: torch.dtype,
    distributed: DistributedArgs | None = None,
    settings: Mapping[str, Any] = {},
) -> list[DistributedDataParallel]:
    """Wrap the chunks in megatron-core's modules for mixed precision and DDP.

    Args:
        distributed: `Plan.distributed`; an option with the value None is disabled.
        settings: further arguments of DistributedDataParallelConfig, from --megatron_config.
    """
    distributed = distributed or DistributedArgs()
    wrapped = []
    for number, chunk in enumerate(chunks):
        ddp_config = DistributedDataParallelConfig(
            grad_reduce_in_fp32=not distributed.grad_reduce_in_bf16,
            overlap_grad_reduce=bool(distributed.overlap_grad_reduce),
            use_distributed_optimizer=bool(distributed.use_distributed_optimizer),
            overlap_param_gather=bool(distributed.overlap_param_gather),
            bucket_size=distributed.ddp_bucket_size,
            num_distributed_optimizer_instances=distributed.num_distributed_optimizer_instances,
            **settings,
        )
        module = chunk
        if dtype is torch.bfloat16:
            module = Float16Module(chunk.config, chunk)
        # As in megatron-core's own trainer, only the first virtual stage splits its gradients into buckets.
        wrapped.append(
            DistributedDataParallel(
                chunk.config, ddp_config, module, disable_bucketing=number > 0, pg_collection=mesh.groups
            )
        )
    for chunk in wrapped:
        chunk.broadcast_params()
        add_gradients_in_place(chunk, bool(distributed.overlap_grad_reduce))
    return wrapped


def make_optimizer(
    args: SftArgs, plan: Plan, schedule: Schedule, model: Sequence[DistributedDataParallel], mesh: Mesh
) -> tuple[ClippedOptimizer, OptimizerParamScheduler]:
    """Create the optimizer and its learning-rate schedule, and connect both to the model's config."""
    optimizer = _optimizer(args, plan, model, mesh)
    no_sync = [chunk.no_sync for chunk in model]
    for chunk in model:
        chunk.config.grad_scale_func = optimizer.scale_loss
        chunk.config.no_sync_func = no_sync[0]
        if len(no_sync) > 1:
            # A list if there are virtual stages, unlike its annotation (schedules.py:858 of 0.16.1).
            chunk.config.no_sync_func = no_sync  # pyright: ignore[reportAttributeAccessIssue]
        chunk.config.finalize_model_grads_func = partial(finalize_gradients, mesh=mesh)
    return optimizer, _learning_rate(args, plan, schedule, optimizer)


def _optimizer(args: SftArgs, plan: Plan, model: Sequence[DistributedDataParallel], mesh: Mesh) -> ClippedOptimizer:
    """Create the optimizer. Biases and norms have no weight decay."""
    is_bfloat16 = args.torch_dtype == "bfloat16"
    config = OptimizerConfig(
        optimizer="adam",
        lr=plan.lr,
        min_lr=plan.min_lr,
        weight_decay=args.weight_decay,
        adam_beta1=args.adam_beta1,
        adam_beta2=args.adam_beta2,
        adam_eps=args.adam_eps,
        clip_grad=args.clip_grad,
        bf16=is_bfloat16,
        params_dtype=torch.bfloat16 if is_bfloat16 else torch.float32,
        use_distributed_optimizer=bool(plan.distributed.use_distributed_optimizer),
        overlap_param_gather=bool(plan.distributed.overlap_param_gather),
        **settings_of(args.megatron_config, "OptimizerConfig"),
    )
    overrides = get_standard_config_overrides(config) | _tower_learning_rates(args, plan)
    mtp_clip_grad = args.mtp_clip_grad if plan.heads.layers else None
    if mtp_clip_grad is None and plan.heads.layers and plan.detached_heads:
        mtp_clip_grad = args.clip_grad
    if mtp_clip_grad is not None:
        overrides |= separate_head_groups(_head_learning_rate(args, plan))
    optimizer = get_megatron_optimizer(
        config,
        list(model),
        overrides,
        # They would save optimizer state in megatron-core's format; swiftlite's is in `optimizer_state.py`.
        use_gloo_process_groups=False,
        pg_collection=mesh.groups,
    )
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        if part.is_stub_optimizer:  # no parameter on this rank
            continue
        if plan.distributed.optimizer == "adamw_8bit":
            from swiftlite.train.adamw_8bit import AdamW8bit  # requires torchao

            # megatron-core only creates AdamW and SGD, but updates with any optimizer of torch.
            part.optimizer = AdamW8bit(part.optimizer.param_groups)
        if plan.distributed.optimizer_cpu_offload:
            # megatron-core's own choice of this class keeps main weights on the host too, where neither our checkpoints
            # nor our clipping find them.
            fraction = plan.distributed.optimizer_offload_fraction
            part.optimizer = OffloadedAdamW(part.optimizer.param_groups, fraction)
        if plan.distributed.optimizer == "muon":
            matrices = matrices_of(unwrap_model(list(model)), mesh)
            part.optimizer = Muon(part.optimizer.param_groups, matrices)
        # One kernel per tensor instead of ten; without Apex, megatron-core creates torch's AdamW with default options.
        if isinstance(part.optimizer, torch.optim.Adam):  # or its subclass AdamW
            for group in part.optimizer.param_groups:
                group["fused"] = True
    return ClippedOptimizer(optimizer, mesh.device.torch_device, mtp_clip_grad)


def finalize_gradients(
    model: Sequence[DistributedDataParallel], num_targets: torch.Tensor | None = None, *, mesh: Mesh, **options: Any
) -> None:
    """Complete the gradients of a step like megatron-core's `finalize_model_grads`, without waiting for the device.

    megatron-core's function reads the number of targets, and divides by it unless it is 0.

    Args:
        num_targets: number of targets of this rank on the last pipeline stage. None: gradients are not divided.
        options: further arguments of megatron-core's function.
    """
    finalize_model_grads(list(model), **options)
    if num_targets is None:
        return
    dist.all_reduce(broadcast_from_last_stage(num_targets, mesh), group=mesh.dp_cp)
    for chunk in model:
        chunk.scale_gradients(1.0 / num_targets.clamp(min=1))  # pyright: ignore[reportArgumentType]: tensors are allowed


def _head_learning_rate(args: SftArgs, plan: Plan) -> dict[str, float]:
    """Return the maximum and the minimum of the heads' learning rate if it differs from --lr."""
    if not isinstance(args, CompletionArgs) or args.mtp_lr is None:
        return {}
    return _learning_rates(args.mtp_lr, plan)


def _tower_learning_rates(args: SftArgs, plan: Plan) -> dict[ParamKey, ParamGroupOverride]:
    """Return overrides with the learning rates of the vision tower and its aligner; other parameters have --lr."""
    overrides = {}
    for part, selects, lr in (
        ("vit", is_vit_parameter, args.vit_lr),
        ("aligner", is_aligner_parameter, args.aligner_lr),
    ):
        if lr is not None:
            overrides |= override(part, selects, _learning_rates(lr, plan))
    return overrides


def _learning_rates(lr: float, plan: Plan) -> dict[str, float]:
    """Return the maximum and the minimum of a learning rate whose schedule has the shape of --lr's schedule."""
    return {"max_lr": lr, "min_lr": lr * plan.min_lr / plan.lr}


def _learning_rate(
    args: SftArgs, plan: Plan, schedule: Schedule, optimizer: MegatronOptimizer
) -> OptimizerParamScheduler:
    """Return the learning-rate schedule: linear warmup from 0, then decay with --lr_decay_style to the minimum."""
    steps = max(1, schedule.steps)  # Megatron requires a step, also if nothing is trained
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=plan.lr,
        min_lr=plan.min_lr,
        lr_warmup_steps=min(schedule.warmup_steps, steps - 1),  # at least one decay step is required
        lr_decay_steps=steps,
        lr_decay_style=args.lr_decay_style,
        start_wd=args.weight_decay,
        end_wd=args.weight_decay,
        wd_incr_steps=steps,
        wd_incr_style="constant",
        wsd_decay_steps=max(1, round(steps * args.lr_wsd_decay_fraction)),
        lr_wsd_decay_style=args.lr_wsd_decay_style,
    )
