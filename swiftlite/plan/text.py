"""Describe a plan as text, for --dry_run and the log of a run. This module reads no model, no rows and no weights."""

import itertools
import json
import shlex

from swiftlite.args.command_line import command_line
from swiftlite.args.commands import SftArgs
from swiftlite.base.heads import MTP, Heads
from swiftlite.hub import commits
from swiftlite.methods.index import method_of
from swiftlite.plan.best_metric import metric_of
from swiftlite.plan.kernels import Kernels
from swiftlite.plan.run import Plan, Schedule, holds_out
from swiftlite.plan.trainable import trainable_of


def render(
    args: SftArgs,
    plan: Plan,
    checkpoint: Heads,
    schedule: Schedule | None,
    quantization: str = "",
    restarts: str = "",
) -> str:
    """Return the text that --dry_run prints.

    Args:
        checkpoint: heads in the files of the model, which --drafter or --mtp_init can replace.
        schedule: None if the number of rows is not known yet.
        quantization: format of a quantized --model.
        restarts: description of the restarts after failures.
    """
    model_lines = _model_lines(args, plan, checkpoint)
    if quantization:
        model_lines.insert(1, ("quantization", f"{quantization}, decoded when the model is loaded"))
    layout = layout_lines(plan)
    if restarts:
        layout.append(("restarts", restarts))
    sections = [
        ("model", model_lines),
        ("layout", layout),
        ("steps", _step_lines(args, plan, schedule)),
        ("writes", _written_lines(args, plan)),
    ]
    lines_of_all = itertools.chain.from_iterable(lines for _, lines in sections)
    width = max(len(name) for name, _ in lines_of_all)
    read = "only config.json was read"
    if schedule:
        read = "config.json was read, rows were counted but not read"
    text = [f"plan of this run; {read}, nothing was written"]
    for section, lines in sections:
        text.append(section)
        text += [f"  {name:<{width}}  {value}" for name, value in lines]
    return "\n".join(text)


def _heads_line(args: SftArgs, plan: Plan, checkpoint: Heads) -> tuple[str, str]:
    """Return the line about the MTP heads or another drafter, with the source of its weights."""
    heads = plan.heads
    if not heads.layers:
        if checkpoint.layers:
            return "MTP depth", f"0, the {checkpoint.layers} of the checkpoint are removed"
        return "MTP depth", "0, the checkpoint has none"
    name, text, of_checkpoint = "MTP depth", f"{heads.layers}", f"the checkpoint, which has {checkpoint.layers}"
    if heads.kind != MTP:
        name, text, of_checkpoint = "drafter", heads.kind, "the checkpoint"
    sources = {
        "checkpoint": of_checkpoint,
        "random": "random initialization",
        "copy_last_layer": "a copy of the last decoder layer",
        "fit_last_layer": "a copy of the last decoder layer, fitted to training rows",
        "graft": f"{args.mtp_graft_from}",
    }
    text += f", weights from {sources[plan.mtp_init]}"
    if checkpoint.layers and plan.mtp_init != "checkpoint":
        text += f"; the {checkpoint.layers} of the checkpoint ({checkpoint.kind}) are not kept"
    return name, text


def _model_lines(args: SftArgs, plan: Plan, checkpoint: Heads) -> list[tuple[str, str]]:
    heads = plan.heads
    trains_tower = not (args.freeze_vit and args.freeze_aligner)
    lines = [
        ("model", args.model),
        ("torch_dtype", args.torch_dtype),
        _heads_line(args, plan, checkpoint),
        ("trains", trainable_of(args, heads, plan.lora, has_tower=trains_tower).words),
    ]
    lines += method_of(args).describe(args)
    if heads.features:
        lines.append(("features", f"inputs of decoder layers {', '.join(map(str, heads.features))} (from 0)"))
    if heads.layers and heads.unroll > 1:
        weights = ", ".join(f"{weight:.3g}" for weight in heads.weights)
        if heads.has_joint_weights:
            weights = "of the expected number of accepted ones"
        lines.append(("drafts", f"{heads.drafts} tokens with one MTP layer, loss weights {weights}"))
    if heads.layers and args.draft_for:
        lines.append(("head inputs", f"those of {args.draft_for}"))
    lines += plan.trunk.lines
    if heads.draft_vocab:
        lines.append(("draft vocabulary", f"{len(heads.draft_vocab)} tokens"))
    if heads.layers and args.mtp_mode == "joint":
        lines.append(("MTP loss weight", f"{args.mtp_loss_scaling_factor:g}"))
    lines += kernel_lines(plan.kernels)
    dispatch = {
        f"tokens reach their experts by {args.moe_token_dispatcher_type}": args.moe_token_dispatcher_type != "alltoall",
        f"kernels of {args.moe_flex_dispatcher_backend}": args.moe_token_dispatcher_type == "flex",
        "shared experts computed at the same time": args.moe_shared_expert_overlap,
    }
    if any(dispatch.values()):
        lines.append(("dispatch", ", ".join(name for name, is_used in dispatch.items() if is_used)))
    if args.megatron_config:
        settings = ", ".join(f"{name} {json.dumps(value)}" for name, value in args.megatron_config.items())
        lines.append(("megatron-core", settings))
    return lines


def kernel_lines(kernels: Kernels) -> list[tuple[str, str]]:
    """Return lines that describe the kernels, as (name, text)."""
    described = kernels.described
    lines = [("layers", described["layers"]), ("attention", described["attention"]), ("fused", described["fused"])]
    if kernels.low_precision:
        lines.append(("products", described["precision"]))
    if kernels.is_deterministic:
        lines.append(("kernels", "deterministic"))
    return lines


def layout_lines(plan: Plan) -> list[tuple[str, str]]:
    """Return lines that describe processes and batches, as (name, text)."""
    layout = plan.layout
    lines = [("processes", _processes(plan))]
    if layout.sequence_parallel:
        lines.append(("sequence parallel", "tensor-parallel ranks split rows by position"))
    if layout.pipeline_model_parallel_layout:
        lines.append(("stages", layout.pipeline_model_parallel_layout))
    elif layout.num_virtual_stages_per_pipeline_rank:
        lines.append(("virtual stages", f"{layout.num_virtual_stages_per_pipeline_rank} per pipeline rank"))
    if layout.expert_model_parallel_size * layout.expert_tensor_parallel_size > 1:
        experts = f"distributed over {layout.expert_model_parallel_size} ranks"
        if layout.expert_tensor_parallel_size > 1:
            experts += f", matrices of each split over {layout.expert_tensor_parallel_size}"
        lines.append(("experts", experts))
    packed = {
        "none": "padded to the longest of a micro-batch",
        "micro_batch": "concatenated in each micro-batch",
        "rows": "packed into rows",
        "step": "packed in each step",
    }
    distributed = {
        "Muon for matrices": plan.distributed.optimizer == "muon",
        "8-bit moments of AdamW": plan.distributed.optimizer == "adamw_8bit",
        f"{plan.distributed.optimizer_offload_fraction:.0%} of the moments of AdamW on the host": (
            plan.distributed.optimizer_cpu_offload
        ),
        "gradients in bfloat16": plan.distributed.grad_reduce_in_bf16,
        "sharded optimizer state": plan.distributed.use_distributed_optimizer,
        "overlapped reduction of gradients": plan.distributed.overlap_grad_reduce,
        "overlapped gather of parameters": plan.distributed.overlap_param_gather,
        f"buckets of {plan.distributed.ddp_bucket_size} parameters": plan.distributed.ddp_bucket_size,
        f"{plan.distributed.num_distributed_optimizer_instances} copies of the sharded optimizer state": (
            plan.distributed.num_distributed_optimizer_instances > 1
        ),
    }
    if any(distributed.values()):
        lines.append(("data parallel", ", ".join(name for name, is_used in distributed.items() if is_used)))
    return [*lines, ("samples", packed[plan.packing]), ("global batch", _global_batch(plan))]


def _processes(plan: Plan) -> str:
    """Return the number of processes as a product: "8 = tensor parallel 2 x data parallel 4"."""
    if plan.world_size == 1:
        return "1"
    sizes = {
        "tensor parallel": plan.layout.tensor_model_parallel_size,
        "pipeline parallel": plan.layout.pipeline_model_parallel_size,
        "context parallel": plan.layout.context_parallel_size,
        "data parallel": plan.data_parallel_size,
    }
    return f"{plan.world_size} = " + " x ".join(f"{name} {size}" for name, size in sizes.items() if size > 1)


def _global_batch(plan: Plan) -> str:
    if plan.packing == "step":
        return (
            f"{plan.global_batch_size} samples, in micro-batches of at most {plan.packing_length} tokens with balanced "
            "work"
        )
    unit = "samples"
    if plan.packing == "rows":
        unit = f"rows of {plan.packing_length} tokens"
    number = plan.global_batch_size // (plan.micro_batch_size * plan.data_parallel_size)
    return (
        f"{plan.global_batch_size} {unit} = micro batch {plan.micro_batch_size} x data parallel "
        f"{plan.data_parallel_size} x {number} accumulated"
    )


def _step_lines(args: SftArgs, plan: Plan, schedule: Schedule | None) -> list[tuple[str, str]]:
    if args.train_iters == 0:
        steps = "0 (--train_iters): nothing is trained; heads are saved as they were initialized"
    elif args.train_iters is not None:
        steps = f"{args.train_iters} (--train_iters)"
    elif schedule:
        steps = f"at most {schedule.steps} = {schedule.num_samples} rows x {args.num_train_epochs:g} / global batch"
    else:
        steps = f"rows kept x {args.num_train_epochs:g} / global batch, known after reading the data"
    learning_rate = f"{plan.lr:g} after {args.lr_warmup_fraction:g} of the steps"
    if args.lr_decay_style != "constant":
        style = args.lr_decay_style
        if style == "WSD":
            style = f"constant, then {args.lr_wsd_decay_style} in the last {args.lr_wsd_decay_fraction:g} of the steps,"
        learning_rate += f", {style} to {plan.min_lr:g}"
    dataset = " ".join(args.dataset) or "random tokens of the lengths of --sft_mock_dataset_config_json"
    if args.streaming:
        dataset += ", read during training"
    evaluates = "never: no rows are held out"
    if holds_out(args):
        held_out = " ".join(args.val_dataset) or f"{args.split_dataset_ratio:g} of the rows"
        evaluates = f"every {plan.eval_steps} steps on {held_out}"
        if not method_of(args).evaluates(args):
            evaluates = f"acceptance of drafts before and after training, on {held_out}"
    saves = f"every {plan.save_steps} steps and at the end, keeps {args.save_total_limit or 'all'}"
    if metric := metric_of(args):
        saves += f", and the best one by {metric}"
    if plan.ephemeral_save_steps:
        saves += f"; every {plan.ephemeral_save_steps} steps, keeps it until the next checkpoint"
    return [
        ("dataset", dataset),
        ("steps", steps),
        ("learning rate", learning_rate),
        ("evaluates", evaluates),
        ("saves", saves),
        ("seed", str(args.seed)),
        *_profile_lines(args),
    ]


def _profile_lines(args: SftArgs) -> list[tuple[str, str]]:
    if not args.profile_steps:
        return []
    first, last = args.profile_steps
    ranks = ", ".join(map(str, args.profile_ranks))
    lines = [("profiles", f"steps {first} to {last} on rank {ranks} ({args.profile_kind})")]
    if args.profile_kind == "nsys":
        lines.append(("start with", nsys_line(args)))
    return lines


def nsys_line(args: SftArgs) -> str:
    """Return the command that starts this run under Nsight Systems, for --profile_kind nsys."""
    first, last = args.profile_steps
    report = shlex.quote(f"{args.output_dir}/profile/steps-{first}-{last}")
    how = "nsys profile --trace cuda,nvtx --capture-range cudaProfilerApi --capture-range-end stop"
    return f"{how} --output {report} {command_line(method_of(args).words, type(args), vars(args))}"


def _written_lines(args: SftArgs, plan: Plan) -> list[tuple[str, str]]:
    lines = [
        ("args.json", f"these options; to repeat: swiftlite {method_of(args).words} args.json --output_dir OTHER"),
        ("source/", "config, tokenizer and generation files of the model"),
        ("checkpoint-N/", "weights, optimizer, data position; `export --to_hf` and `--resume` read them"),
        ("metrics.jsonl", f"losses, every {args.logging_steps} steps"),
        ("run_report.json", "rows kept and dropped, changed parameters"),
        ("run_report.html", "report page for a browser"),
    ]
    measures_acceptance = args.acceptance_samples and plan.trunk.holds_layers
    if plan.heads.layers and measures_acceptance and holds_out(args):
        lines.append(("acceptance.json", f"draft acceptance before and after, on {args.acceptance_samples} prompts"))
        lines.append(("drafts.json", "some of the answers, with accepted and rejected drafts"))
    if metric := metric_of(args):
        lines.append(("best_checkpoint.json", f"{metric} of each evaluation"))
    if commits.known():
        lines.append((commits.COMMITS_FILE, "commits of models and datasets on the Hugging Face hub"))
    lines += method_of(args).describe_files(args)
    if args.profile_steps:
        lines.append(("profile/", f"profile of steps {' to '.join(map(str, args.profile_steps))}"))
    if "tensorboard" in args.report_to:
        lines.append(("tensorboard/", "the same metrics, if tensorboard is installed"))
    return [(f"{args.output_dir}/{name}", value) for name, value in lines]
