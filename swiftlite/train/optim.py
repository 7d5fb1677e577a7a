"""DDP, AdamW and the learning-rate schedule, all megatron-core's."""

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import (
    MegatronOptimizer,
    OptimizerConfig,
    get_megatron_optimizer,
    get_standard_config_overrides,
)
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer.module import Float16Module

from swiftlite.args.commands import SftArgs
from swiftlite.args.plan import Plan, Schedule
from swiftlite.model.gpt import GPTModel
from swiftlite.runtime.device import Device


def wrap_model(model: GPTModel, dtype: torch.dtype) -> DistributedDataParallel:
    """The model under megatron-core's precision and data-parallel wrappers; gradients accumulate in float32."""
    module = Float16Module(model.config, model) if dtype is torch.bfloat16 else model
    wrapped = DistributedDataParallel(
        model.config,
        DistributedDataParallelConfig(grad_reduce_in_fp32=True, overlap_grad_reduce=False),
        module,
    )
    wrapped.broadcast_params()
    return wrapped


def make_optimizer(
    args: SftArgs, plan: Plan, schedule: Schedule, model: DistributedDataParallel, device: Device
) -> tuple[MegatronOptimizer, OptimizerParamScheduler]:
    """AdamW (no decay on biases and norms) and its schedule; connects both to the model's config."""
    config = OptimizerConfig(
        optimizer="adam",
        lr=plan.lr,
        min_lr=plan.min_lr,
        weight_decay=args.weight_decay,
        adam_beta1=args.adam_beta1,
        adam_beta2=args.adam_beta2,
        adam_eps=args.adam_eps,
        clip_grad=args.clip_grad,
        bf16=args.torch_dtype == "bfloat16",
        params_dtype=torch.bfloat16 if args.torch_dtype == "bfloat16" else torch.float32,
    )
    optimizer = get_megatron_optimizer(
        config, [model], get_standard_config_overrides(config), use_gloo_process_groups=device.is_cuda
    )
    for group in optimizer.param_groups:
        # One kernel per tensor instead of ten; megatron-core takes torch's AdamW (where Apex is absent) as it comes.
        if isinstance(optimizer.optimizer, torch.optim.AdamW):
            group["fused"] = True
    scheduler = OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=plan.lr,
        min_lr=plan.min_lr,
        lr_warmup_steps=min(schedule.warmup_steps, schedule.steps - 1),  # megatron-core wants at least one decay step
        lr_decay_steps=schedule.steps,
        lr_decay_style=args.lr_decay_style,
        start_wd=args.weight_decay,
        end_wd=args.weight_decay,
        wd_incr_steps=schedule.steps,
        wd_incr_style="constant",
    )
    model.config.grad_scale_func = optimizer.scale_loss
    model.config.no_sync_func = model.no_sync
    model.config.finalize_model_grads_func = finalize_model_grads
    return optimizer, scheduler
