"""Name the options that a resumed run may change."""

import dataclasses

from swiftlite.args.fields import DistributedArgs, ParallelLayout, ProfilingArgs, RecomputeArgs, RunArgs

CHANGE_UPDATES = {
    "aligner_lr",
    "beta",
    "clip_grad",
    "lr",
    "min_lr",
    "mtp_clip_grad",
    "mtp_loss_scaling_factor",
    "mtp_lr",
    "skip_bad_steps",
    "teacher_kl_coef",
    "vit_lr",
}
"""Options that messages about steps that are not finite advise to change. The weights then differ from those of a run
without the change."""
CHANGEABLE = {
    *(field.name for field in dataclasses.fields(RunArgs)),
    *(field.name for field in dataclasses.fields(ProfilingArgs)),
    *(field.name for field in dataclasses.fields(ParallelLayout)),
    *(field.name for field in dataclasses.fields(DistributedArgs)),
    *(field.name for field in dataclasses.fields(RecomputeArgs)),
    "cache_trunk_states",
    # their content counts, which checkpoints have digests of
    "dataset",
    "val_dataset",
    "dataset_cache",
    "dataset_num_proc",
    "max_bad_rows",
    "media_root",
    "ref_logprobs_cache",
    "ref_pipeline_model_parallel_size",
    "ref_tensor_model_parallel_size",
    "teacher_pipeline_model_parallel_size",
    "teacher_tensor_model_parallel_size",
    "stream_trunk_gb",
    "micro_batch_size",
    "moe_flex_dispatcher_backend",
    "moe_shared_expert_overlap",
    "moe_token_dispatcher_type",
    "num_train_epochs",
    "train_iters",
    "trust_remote_code",
    # of megatron grpo: completions that were scored with other reward functions are scored again, and those that were
    # drawn by another policy are drawn again (`rollouts/policy_identity.py`)
    "external_plugins",
    "infer_backend",
    "log_completions",
    "max_batch_size",
    "reward_pipeline_model_parallel_size",
    "reward_server",
    "reward_tensor_model_parallel_size",
    "reward_timeout",
    "rollouts_total_limit",
    "tool_timeout",
    "tools",
    *CHANGE_UPDATES,
}
"""Length, places of data, reports, profiles, evaluations, checkpoints, the distribution of work, and
`CHANGE_UPDATES`."""
