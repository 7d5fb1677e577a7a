"""Rules of `megatron sft` for batches, optimizer, kernels and layout, and the list of all its rules.

The other rules are in `sft_communication.py` (distributed optimizer, NCCL, dispatch to experts), `sft_data.py` (files,
packing, streaming), `sft_heads.py` (MTP), `sft_lora.py` (adapters), `sft_megatron.py` (--megatron_config),
`sft_profile.py` (--profile_steps), `sft_report.py` (--report_to), `sft_resume.py` (--resume) and `sft_vision.py`
(vision tower).
"""

import math
from collections.abc import Iterator

from swiftlite.args.bounds import out_of_bounds
from swiftlite.args.commands import SftArgs
from swiftlite.args.config import Problem
from swiftlite.args.fields import KernelArgs
from swiftlite.args.mock_config import FLAG
from swiftlite.plan.facts import Facts
from swiftlite.plan.heads import heads_of, lr_of
from swiftlite.plan.kernels import kernel_problems, largest_head
from swiftlite.plan.layout import (
    choices,
    data_parallel_size,
    group_of,
    layout_of,
    layout_problems,
    num_virtual_stages,
    process_problems,
)
from swiftlite.plan.low_precision import low_precision_of, model_problems
from swiftlite.plan.run import holds_out, packing_of
from swiftlite.rules import common
from swiftlite.rules.training import (
    sft_communication,
    sft_data,
    sft_heads,
    sft_indexers,
    sft_lora,
    sft_megatron,
    sft_profile,
    sft_report,
    sft_resume,
    sft_vision,
)

NO_HEADS = "the model has no MTP layers"
Idle = dict[str, tuple[bool, str]]
"""For options by name: whether they have no effect, and why."""


def global_batch_divides(args: SftArgs, facts: Facts) -> Iterator[Problem]:
    if packing_of(args) == "step":
        return  # ranks get samples by their work, not by number
    layout = layout_of(args)
    micro = args.micro_batch_size
    if micro < 1 or args.global_batch_size < 1 or out_of_bounds(layout):
        return  # another rule reports it
    if process_problems(layout, facts.world_size):
        return
    data_parallel = data_parallel_size(layout, facts.world_size)
    unit = micro * data_parallel
    if args.global_batch_size % unit:
        smallest = max(args.global_batch_size // unit, 1) * unit
        near_sizes = [str(smallest + more * unit) for more in range(3)]
        yield (
            f"--global_batch_size {args.global_batch_size} must be a multiple of "
            f"--micro_batch_size x data parallel = {micro} x {data_parallel}",
            f"use {choices(near_sizes)}",
        )


def virtual_stages_have_micro_batches(args: SftArgs, facts: Facts) -> Iterator[Problem]:
    layout = layout_of(args)
    if out_of_bounds(args) or layout_problems(layout, facts.architecture, facts.heads.layers):
        return  # other rules report it
    if num_virtual_stages(layout) is None or process_problems(layout, facts.world_size):
        return
    if packing_of(args) == "step":
        return  # the schedule rounds the number of micro-batches up
    unit = args.micro_batch_size * data_parallel_size(layout, facts.world_size)
    number = args.global_batch_size // unit
    pp = args.pipeline_model_parallel_size
    if args.global_batch_size % unit == 0 and number % pp:
        yield (
            f"virtual pipeline stages require a multiple of {pp} micro-batches per step, but there are {number} = "
            f"--global_batch_size {args.global_batch_size} / {unit}",
            f"use --global_batch_size {math.ceil(number / pp) * pp * unit}",
        )


def kernels_are_here(args: SftArgs, facts: Facts) -> Iterator[Problem]:
    kernels = group_of(args, KernelArgs)
    head = largest_head(facts.architecture)
    yield from kernel_problems(kernels, facts.machine, is_float32=args.torch_dtype == "float32", head=head)


def low_precision_fits_the_model(args: SftArgs, facts: Facts) -> Iterator[Problem]:
    low = low_precision_of(group_of(args, KernelArgs))
    if low and facts.architecture:
        yield from model_problems(low, layout_of(args), facts.architecture)


def te_attention_has_whole_rows(args: SftArgs, facts: Facts) -> Iterator[Problem]:
    if args.attention_backend != "te":
        return
    hint = "use --attention_backend auto"
    if args.context_parallel_size > 1:
        flag = f"--context_parallel_size {args.context_parallel_size}"
        yield (
            f"--attention_backend te does not support {flag}",
            hint,
        )
    if args.mtp_unroll > 1:
        flag = f"--mtp_unroll {args.mtp_unroll}"
        yield f"--attention_backend te does not support {flag}", hint


def min_lr_is_below_lr(args: SftArgs, facts: Facts) -> Iterator[Problem]:
    lr = lr_of(args, facts.heads, is_quantized=facts.is_quantized)
    if args.min_lr is not None and args.min_lr > lr:
        yield f"--min_lr {args.min_lr} must not exceed --lr {lr}", "the learning rate decays from --lr to --min_lr"


def learning_rate_has_its_phases(args: SftArgs, facts: Facts) -> Iterator[Problem]:
    warmup, decay = args.lr_warmup_fraction, args.lr_wsd_decay_fraction
    if args.lr_decay_style == "inverse-square-root" and not warmup:
        yield (
            "--lr_decay_style inverse-square-root requires a warmup: without one, step 4 has half of --lr",
            "use --lr_warmup_fraction 0.05",
        )
    if args.lr_decay_style == "WSD" and warmup + decay > 1:
        yield (
            f"--lr_warmup_fraction {warmup:g} and --lr_wsd_decay_fraction {decay:g} are more than all steps",
            f"use --lr_wsd_decay_fraction {1 - warmup:g} or less",
        )


def sft_settings_without_effect(args: SftArgs, facts: Facts) -> Iterator[str]:
    """Yield a note for each changed option that has no effect because of another option or the model."""
    idle = _idle_of_heads(args, facts) | _idle_of_held_out_rows(args, facts) | _idle_of_rows(args)
    idle |= _idle_of_processes(args, facts)
    not_full = (args.recompute_granularity != "full", "--recompute_granularity is not full")
    architecture = facts.architecture
    no_experts = (architecture is not None and not architecture.has_experts, "the model has no experts")
    not_profiled = (not args.profile_steps, "--profile_steps is not given")
    not_wsd = (args.lr_decay_style != "WSD", "--lr_decay_style is not WSD")
    idle |= {
        "num_train_epochs": (args.train_iters is not None, "--train_iters is given"),
        "min_lr": (args.lr_decay_style == "constant", "--lr_decay_style is constant"),
        "lr_wsd_decay_fraction": not_wsd,
        "lr_wsd_decay_style": not_wsd,
        "recompute_method": not_full,
        "recompute_num_layers": not_full,
        "recompute_modules": (args.recompute_granularity != "selective", "--recompute_granularity is not selective"),
        "moe_aux_loss_coeff": no_experts,
        "moe_router_bias_update_rate": no_experts,
        "indexer_loss_coeff": (args.indexer_mode == "frozen", "--indexer_mode is frozen"),
        "vit_lr": (args.freeze_vit, "--freeze_vit is true"),
        "vit_gradient_checkpointing": (args.freeze_vit, "--freeze_vit is true"),
        "aligner_lr": (args.freeze_aligner, "--freeze_aligner is true"),
        **sft_heads.idle_of_trunk(args),
        "profile_kind": not_profiled,
        "profile_ranks": not_profiled,
    }
    yield from common.without_effect(args, idle)


def _idle_of_heads(args: SftArgs, facts: Facts) -> Idle:
    no_heads = (_has_no_heads(args, facts), NO_HEADS)
    not_unrolled = (args.mtp_unroll == 1, "--mtp_unroll is 1")
    no_beta = not_unrolled
    if args.mtp_unroll_weights == "joint" and args.mtp_unroll > 1:
        no_beta = (True, "--mtp_unroll_weights is joint")
    names = (
        "mtp_loss_scaling_factor",
        "mtp_loss",
        "mtp_clip_grad",
        "mtp_unroll",
        "draft_for",
        "mtp_tuner",
        "draft_vocab",
    )
    idle: Idle = dict.fromkeys(names, no_heads)
    return idle | {
        "clip_grad": (
            args.mtp_mode == "heads_only" and args.mtp_clip_grad is not None,
            "only heads are trained, and --mtp_clip_grad clips them",
        ),
        "mtp_unroll_beta": no_beta,
        "mtp_unroll_weights": not_unrolled,
        "mtp_init": (args.mtp_num_layers == 0, "--mtp_num_layers is 0"),
    }


def _has_no_heads(args: SftArgs, facts: Facts) -> bool:
    return heads_of(args, facts.heads).layers == 0


def _idle_of_held_out_rows(args: SftArgs, facts: Facts) -> Idle:
    streamed_or_mock = FLAG
    if args.streaming:
        streamed_or_mock = "--streaming"
    is_read_whole = not args.streaming and args.sft_mock_dataset_config_json is None
    not_split = (not is_read_whole, f"{streamed_or_mock} is given")
    if args.val_dataset:
        not_split = (True, "--val_dataset is given")
    why = f"{streamed_or_mock} without --val_dataset"
    if args.split_dataset_ratio == 0:
        why = "--split_dataset_ratio is 0"
    nothing_held_out = (not holds_out(args), f"nothing is held out: {why}")
    unmeasured = nothing_held_out
    if _has_no_heads(args, facts):
        unmeasured = (True, NO_HEADS)
    is_measured = args.acceptance_samples > 0
    return {
        "split_dataset_ratio": not_split,
        "eval_steps": nothing_held_out,
        "eval_iters": nothing_held_out,
        "acceptance_samples": (is_measured and unmeasured[0], unmeasured[1]),
        "acceptance_max_new_tokens": (not is_measured, "--acceptance_samples is 0"),
    }


def _idle_of_rows(args: SftArgs) -> Idle:
    return {
        "micro_batch_size": (packing_of(args) == "step", "--packing_length determines the micro-batches"),
        "packing_length": (not args.packing, "--packing is not given"),
        "padding_free": (args.packing, "--packing leaves no padding"),
        "streaming_buffer_size": (not args.streaming, "--streaming is not given"),
        "dataset_shuffle": (args.streaming, "--streaming reads files in order"),
        "dataset_num_proc": (args.streaming, "--streaming tokenizes during training"),
    }


def _idle_of_processes(args: SftArgs, facts: Facts) -> Idle:
    distributed = sft_communication.distributed_in(args, facts)
    return {
        "ddp_bucket_size": (not distributed.overlap_grad_reduce, "--overlap_grad_reduce is not true"),
        "moe_flex_dispatcher_backend": (
            args.moe_token_dispatcher_type != "flex",
            "--moe_token_dispatcher_type is not flex",
        ),
    }


RULES = (
    common.hf_model_is_a_directory,
    common.family_takes_the_model,
    sft_data.dataset_files_exist,
    sft_data.columns_have_different_names,
    common.val_dataset_files_exist,
    common.output_dir_is_given,
    sft_resume.output_dir_is_not_the_model,
    sft_resume.output_dir_fits_resume,
    sft_resume.ephemeral_saves_are_frequent,
    sft_resume.best_model_has_a_metric,
    sft_resume.resume_knows_the_options,
    sft_resume.resume_has_steps_left,
    sft_resume.resume_keeps_the_command,
    sft_resume.resume_keeps_the_options,
    common.numbers_are_in_range,
    sft_data.mock_dataset_is_described,
    sft_data.streamed_files_have_rows,
    sft_data.packing_options_go_together,
    sft_data.conversations_stay_whole,
    common.images_have_a_place_and_a_size,
    sft_data.mixture_has_its_shares,
    sft_data.packing_has_room,
    sft_data.attention_takes_packed_rows,
    sft_resume.resume_packs_the_same_rows,
    min_lr_is_below_lr,
    learning_rate_has_its_phases,
    common.layout_fits,
    sft_indexers.indexers_can_be_trained,
    sft_indexers.long_rows_have_selections,
    sft_indexers.other_models_have_selections,
    global_batch_divides,
    virtual_stages_have_micro_batches,
    sft_communication.overlap_has_its_optimizer,
    sft_communication.optimizer_has_its_instances,
    sft_communication.nccl_can_register_buffers,
    sft_communication.tokens_reach_their_experts,
    sft_communication.shared_experts_can_overlap,
    common.gradients_have_the_dtype_of_weights,
    common.optimizer_is_installed,
    common.optimizer_has_whole_matrices,
    common.optimizer_can_be_offloaded,
    sft_communication.optimizer_can_leave_the_gpu,
    sft_megatron.megatron_config_is_known,
    sft_megatron.megatron_config_has_an_effect,
    sft_megatron.decoupled_lr_is_above_its_minimum,
    kernels_are_here,
    low_precision_fits_the_model,
    te_attention_has_whole_rows,
    common.recompute_options_fit,
    sft_heads.mtp_weights_have_a_source,
    sft_heads.mtp_options_have_heads,
    sft_heads.one_layer_is_unrolled,
    sft_heads.joint_weights_have_an_overlap,
    sft_heads.fit_has_something_to_fit_to,
    sft_heads.options_apply_to_the_drafter,
    sft_heads.features_are_layers,
    sft_heads.drafter_fits_the_model,
    sft_heads.drafter_reads_a_frozen_trunk,
    sft_heads.drafter_is_with_the_layers_it_reads,
    sft_heads.draft_vocab_can_be_learned,
    sft_lora.lora_options_have_adapters,
    sft_lora.target_modules_are_layers,
    sft_lora.modules_to_save_are_whole,
    sft_lora.rank_is_low,
    sft_lora.heads_and_adapters_go_together,
    sft_vision.frozen_parts_can_be_trained,
    sft_vision.something_is_trained,
    sft_heads.draft_for_is_measured,
    sft_heads.vllm_drafts_without_plugin,
    sft_heads.trunk_states_repeat,
    sft_heads.trunk_in_files_is_only_read,
    common.graft_has_heads,
    sft_heads.graft_is_given_once,
    sft_report.report_to_can_be,
    sft_profile.profile_can_be_recorded,
)
NOTES = (
    sft_settings_without_effect,
    sft_resume.changes_apply_to_further_steps,
    sft_data.held_out_rows_are_trained_on,
    sft_data.streams_hold_nothing_out,
    sft_heads.heads_draft_fewer_tokens,
    sft_heads.blocks_have_several_tokens,
    sft_heads.heads_learn_slowly,
    sft_heads.a_frozen_trunk_is_rounded,
)
