"""Derive layout, batch sizes and schedule of a run from options. This module reads no files.

`make_plan` needs only options and the number of processes; `make_schedule` also needs the number of training rows.
"""

import math
from dataclasses import dataclass, replace
from typing import Literal

from swiftlite.args.commands import GkdArgs, SftArgs
from swiftlite.args.fields import DistributedArgs, KernelArgs, MtpInit, MtpLoss, ParallelLayout
from swiftlite.base.heads import Heads
from swiftlite.base.lora import Lora
from swiftlite.families.index import FAMILIES
from swiftlite.methods.index import method_of
from swiftlite.plan.distillation import teacher_layout
from swiftlite.plan.facts import Facts
from swiftlite.plan.heads import heads_for_engine, heads_of, lora_of, lr_of, mtp_init_of, mtp_loss_of
from swiftlite.plan.kernels import Kernels, Machine, choose, largest_head
from swiftlite.plan.layout import data_parallel_size, group_of, layout_of, length_divisor, length_multiple
from swiftlite.plan.low_precision import LowPrecision
from swiftlite.plan.trainable import trainable_of
from swiftlite.plan.trunk import Trunk

Packing = Literal["none", "micro_batch", "rows", "step"]
"""none: no packing. micro_batch: the samples of each micro-batch are packed. rows: all samples are packed into rows.
step: the samples of each step are packed.
"""
GPU_LENGTHS = 64


@dataclass(frozen=True)
class Plan:
    """Layout and batches of a training run."""

    world_size: int
    layout: ParallelLayout
    data_parallel_size: int
    micro_batch_size: int
    global_batch_size: int
    packing: Packing
    packing_length: int
    """Maximum number of tokens of a row, or of a micro-batch if each step is packed."""
    row_multiple: int
    """The length of each row is padded to a multiple of this number."""
    heads: Heads
    """MTP heads of the run."""
    mtp_init: MtpInit
    mtp_loss: MtpLoss
    detached_heads: bool
    """Whether the losses of the heads have no gradient with respect to the trunk."""
    temperature: float
    """Losses are those of logits divided by this number."""
    kernels: Kernels
    distributed: DistributedArgs
    lora: Lora | None
    """Adapters that are trained instead of the model's parameters; None without adapters."""
    trunk: Trunk
    lr: float
    min_lr: float
    save_steps: int
    ephemeral_save_steps: int | None
    eval_steps: int


@dataclass(frozen=True)
class Schedule:
    """Optimizer steps of a training run."""

    num_samples: int
    """Number of training rows after reading, tokenizing and packing; 0 if rows are read during training."""
    steps: int
    warmup_steps: int


def make_plan(
    args: SftArgs,
    world_size: int,
    checkpoint: Heads,
    machine: Machine = Machine(),
    head: int = 0,
    *,
    heads: Heads | None = None,
    is_quantized: bool = False,
) -> Plan:
    """Return layout and batches for `world_size` processes. The options must have passed `rules.check`.

    Args:
        checkpoint: heads of the model directory.
        machine: capabilities of the machine; default: a CPU.
        head: `plan.kernels.largest_head` of the model.
        heads: heads of the run, with a draft vocabulary and the head inputs of --draft_for; default: `heads_of`.
        is_quantized: whether the model is quantized.

    Raises:
        OptionError: a kernel is not available.
    """
    if heads is None:
        heads = heads_of(args, checkpoint)
    method = method_of(args)
    layout = layout_of(args)
    replicas = data_parallel_size(layout, world_size)
    lr = lr_of(args, checkpoint, is_quantized=is_quantized)
    kernels = choose(group_of(args, KernelArgs), machine, is_float32=args.torch_dtype == "float32", head=head)
    lora = lora_of(args, checkpoint)
    # --freeze_llm requires a tower, which options do not name.
    freezes_trunk = trainable_of(args, heads, lora, has_tower=args.freeze_llm).freezes_trunk
    keeps_files = is_quantized and lora is None and freezes_trunk and args.indexer_mode != "indexer_only"
    return Plan(
        world_size=world_size,
        layout=layout,
        data_parallel_size=replicas,
        micro_batch_size=args.micro_batch_size,
        global_batch_size=args.global_batch_size,
        packing=packing_of(args),
        packing_length=args.packing_length or args.max_length,
        heads=heads,
        mtp_init=mtp_init_of(args, checkpoint),
        mtp_loss=mtp_loss_of(args),
        detached_heads=method.detaches_heads,
        temperature=method.temperature(args),
        row_multiple=_row_multiple(args, machine.is_cuda, kernels.low_precision),
        kernels=kernels,
        distributed=distributed_of(args, replicas * layout.context_parallel_size, machine.is_cuda),
        lora=lora,
        trunk=Trunk.of(args, keeps_files=keeps_files),
        lr=lr,
        min_lr=min_lr_of(args, lr),
        save_steps=args.save_steps,
        ephemeral_save_steps=args.ephemeral_save_steps,
        eval_steps=args.eval_steps or args.save_steps,
    )


def plan_of(args: SftArgs, facts: Facts) -> Plan:
    """Return the plan of a run before its rows are read.

    Of the draft vocabulary of --draft_vocab, only the size is known; the ids are placeholders.

    Raises:
        OptionError: a kernel is not available.
    """
    heads = heads_of(args, facts.heads)
    if family := FAMILIES.get(str(facts.hf_config.get("model_type"))):
        heads = heads_for_engine(args, facts.heads, family)
    if heads.layers and args.draft_vocab:
        heads = replace(heads, draft_vocab=tuple(range(args.draft_vocab)))
    return make_plan(
        args,
        facts.world_size,
        facts.heads,
        facts.machine,
        largest_head(facts.architecture),
        heads=heads,
        is_quantized=facts.is_quantized,
    )


def distributed_of(args: DistributedArgs, num_replicas: int, is_cuda: bool) -> DistributedArgs:
    """Return the options with defaults, which are true on GPUs if several ranks hold the same parameters.

    On a CPU, overlapping communication with gloo does not save time.

    Args:
        num_replicas: number of ranks that hold the same parameters.
    """
    default = is_cuda and num_replicas > 1
    divides_matrices = args.optimizer != "muon"  # whose iteration needs whole ones

    def settled(value: bool | None, needed: bool = True) -> bool:
        if value is None:
            return default and needed
        return value

    shares = settled(args.use_distributed_optimizer, divides_matrices)
    overlaps = settled(args.overlap_grad_reduce)
    return replace(
        group_of(args, DistributedArgs),
        use_distributed_optimizer=shares,
        overlap_grad_reduce=overlaps,
        overlap_param_gather=settled(args.overlap_param_gather, shares and overlaps),
    )


def _row_multiple(args: SftArgs, is_cuda: bool, low_precision: LowPrecision | None) -> int:
    """Return `row_multiple_of` for the layouts in which rows are computed: the model's, and with gkd the teacher's."""
    layouts = [layout_of(args)]
    if isinstance(args, GkdArgs):
        layouts.append(teacher_layout(args, None))
    return math.lcm(*(row_multiple_of(each, packing_of(args), is_cuda, low_precision) for each in layouts))


def row_multiple_of(
    layout: ParallelLayout, packing: Packing, is_cuda: bool, low_precision: LowPrecision | None = None
) -> int:
    """Return the number by which the length of a row must be divisible.

    Every rank has an equal part of a row, and the part's number of tokens must be divisible by what low-precision
    products require. On GPUs, the result for padded rows is larger, so that rows have few different lengths: cuDNN
    creates a plan for each length.
    """
    needed = length_multiple(layout)
    if low_precision:
        needed = math.lcm(needed, low_precision.tokens * length_divisor(layout))
    if is_cuda and packing == "none":
        needed = math.lcm(needed, GPU_LENGTHS)
    return needed


def holds_out(args: SftArgs) -> bool:
    """Return whether there are held-out rows: those of --val_dataset, or a part of a --dataset that is not streamed."""
    is_whole = not args.streaming and args.sft_mock_dataset_config_json is None
    return bool(args.val_dataset) or (is_whole and args.split_dataset_ratio > 0)


def packing_of(args: SftArgs) -> Packing:
    """Return the kind of packing that the options select."""
    if args.packing and args.sequence_packing_scheduler == "dp_balanced":
        return "step"
    if args.packing:
        return "rows"
    if args.padding_free:
        return "micro_batch"
    return "none"


def min_lr_of(args: SftArgs, lr: float) -> float:
    """Return the learning rate at the end of the decay from `lr`."""
    if args.lr_decay_style == "constant":
        return lr
    if args.min_lr is None:
        return lr / 10
    return args.min_lr


def make_schedule(args: SftArgs, num_samples: int) -> Schedule:
    """Return the steps for a number of rows: --train_iters steps, or --num_train_epochs passes over the rows.

    The last batch is filled up with rows of the next pass, so that every step has the same size.
    """
    num_in_epoch = num_samples * method_of(args).rows_per_prompt(args)
    steps = args.train_iters
    if steps is None:
        steps = math.ceil(num_in_epoch * args.num_train_epochs / args.global_batch_size)
    return Schedule(
        num_samples=num_samples,
        steps=steps,
        warmup_steps=math.ceil(steps * args.lr_warmup_fraction),
    )
