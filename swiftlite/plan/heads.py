"""Choose defaults for MTP heads: their number, initial weights, loss and learning rate.

Training only the heads of a frozen trunk differs from fine-tuning. Heads can start from scratch, large steps cannot
damage the trunk, and every token has a target, because the target is the trunk's prediction.
"""

from dataclasses import replace
from typing import Any

from swiftlite.args.commands import SftArgs
from swiftlite.args.fields import MtpInit, MtpLoss
from swiftlite.base.heads import MTP, Heads
from swiftlite.base.lora import HeadsTuner, Lora
from swiftlite.families import Family, dflash
from swiftlite.families.drafters import DRAFTERS
from swiftlite.families.serving.index import DRAFT_FOR
from swiftlite.methods.index import method_of
from swiftlite.plan.layout import layout_of, mtp_is_with_last_layer

WEIGHT_OF_NEXT = 0.6
"""Weight of each draft's loss relative to the previous one, for an unrolled layer."""
LR_OF_ADAPTERS = 1e-4
"""Peak learning rate of adapters."""
LR_OF_NEW_HEADS = 1e-3
"""Peak learning rate if only new heads are trained, from measurements on SmolLM2-135M. It is too high for heads that
are already trained."""
LR_OF_GRAFTED_HEADS = 3e-4
"""Peak learning rate if only heads that were copied from another model are trained. On SmolLM2-135M, whose trunk was
changed by LoRA, a decoding step gave 1.37 tokens before the copied head was trained. After 154 steps, it gave 1.38
tokens at 1e-5, 1.86 at 3e-4, and 2.00 at 1e-3. The copied head had been trained for only 120 steps; to heads that were
trained longer, a large learning rate can do more harm.
"""
LR_ON_QUANTIZED_TRUNK = 3e-4
"""Peak learning rate if only the existing heads of a quantized model are trained. Such heads were often trained on the
unquantized trunk, and must adapt to the rounded one. On SmolLM2-135M with 4 bits, 33.8 % of the drafts were accepted
before, and 42.6 % after 60 steps at 1e-3. After 16 shorter steps, the share in simulated decoding was 33.9 % at 1e-4,
36.3 % at 3e-4 and 38.0 % at 1e-3. The default is below 1e-3, because the heads had been trained for only 60 steps;
larger steps can harm heads that were trained longer.
"""

OVERLAP_LOSSES: tuple[MtpLoss, ...] = ("nla", "kl", "tv")
"""Losses of the heads that are computed with the overlap of head and trunk (`overlap_of` in `model/loss/losses.py`)."""


def heads_of(args: SftArgs, checkpoint: Heads) -> Heads:
    """Return the MTP heads of the run. By default, they have the checkpoint's number of layers.

    A run that trains only heads has at least one.

    Args:
        checkpoint: heads of the model directory.
    """
    layers = args.mtp_num_layers
    if layers is None:
        layers = checkpoint.layers
        if args.mtp_mode == "heads_only":
            layers = layers or 1
    beta = args.mtp_unroll_beta or (dflash.WEIGHT_OF_NEXT if DRAFTERS[checkpoint.kind].is_block else WEIGHT_OF_NEXT)
    heads = Heads(layers, args.mtp_unroll, beta)
    if not layers:
        return heads
    heads = replace(heads, kind=checkpoint.kind, features=checkpoint.features)
    if args.mtp_unroll > 1 and args.mtp_unroll_weights == "joint":
        heads = replace(heads, beta=1.0, has_joint_weights=True)
    # `heads_for_engine` sets the inputs of --draft_for; the tokens of --draft_vocab are selected from the rows later.
    if args.draft_vocab is None:
        heads = replace(heads, draft_vocab=checkpoint.draft_vocab)
    if heads.kind != MTP:  # --draft_for is for MTP heads, also where the checkpoint's heads were trained with it
        return heads
    return replace(heads, drafting=checkpoint.drafting)


def heads_for_engine(args: SftArgs, checkpoint: Heads, family: Family) -> Heads:
    """Return the heads of the run with the inputs that the engine in --draft_for passes to heads."""
    heads = heads_of(args, checkpoint)
    if not args.draft_for or not heads.layers:
        return heads
    convention = DRAFT_FOR[args.draft_for](family)
    if convention is None:
        return heads
    return replace(heads, drafting=convention.drafting)


def mtp_init_of(args: SftArgs, checkpoint: Heads) -> MtpInit:
    """Return the source of the heads' initial weights."""
    if args.mtp_init is not None:
        return args.mtp_init
    if checkpoint.layers or args.mtp_mode != "heads_only":
        return "checkpoint"
    drafter = DRAFTERS[checkpoint.kind]
    if not drafter.is_fitted:
        return "copy_last_layer" if drafter.starts_with_copies else "random"
    if why_no_fit(args):
        return "copy_last_layer"
    return "fit_last_layer"


def with_source_of_heads(args: SftArgs, checkpoint: Heads) -> SftArgs:
    """Return the options with --mtp_init if the run requires it for new heads, for a plan, which does not need it."""
    is_missing = args.mtp_init is None and mtp_init_of(args, checkpoint) == "checkpoint"
    if not is_missing or args.mtp_num_layers in (None, 0, checkpoint.layers):
        return args
    init: MtpInit = "fit_last_layer"
    if why_no_fit(args):
        init = "copy_last_layer"
    return replace(args, mtp_init=init)


def why_no_fit(args: SftArgs) -> str:
    """Return why `fit_last_layer` is not possible; empty if it is possible."""
    if args.streaming:
        return "--streaming reads rows only during training"
    if not mtp_is_with_last_layer(layout_of(args)):
        return "--pipeline_model_parallel_layout has the last decoder layer and the heads on different stages"
    return ""


def mtp_loss_of(args: SftArgs) -> MtpLoss:
    """Return the loss of the heads."""
    if args.mtp_loss is not None:
        return args.mtp_loss
    if args.mtp_mode == "heads_only" or method_of(args).detaches_heads:
        return "kl"
    return "ce"


def new_heads_learn_alone(args: SftArgs, checkpoint: Heads) -> bool:
    """Return whether only new heads are trained."""
    return args.mtp_mode == "heads_only" and mtp_init_of(args, checkpoint) not in ("checkpoint", "graft")


def heads_tuner_of(args: SftArgs, checkpoint: Heads) -> HeadsTuner:
    """Return how MTP heads are trained in a run that trains adapters."""
    if args.mtp_tuner is not None:
        return args.mtp_tuner
    if mtp_init_of(args, checkpoint) in ("checkpoint", "graft"):
        return "lora"
    return "full"


def lora_of(args: SftArgs, checkpoint: Heads) -> Lora | None:
    """Return the adapters of the run; None if the model's own parameters are trained.

    Args:
        checkpoint: heads of the model directory.
    """
    if args.tuner_type != "lora":
        return None
    return Lora(
        rank=args.lora_rank,
        alpha=args.lora_alpha,
        dropout=args.lora_dropout,
        is_rank_stabilized=args.use_rslora,
        has_magnitudes=args.use_dora,
        targets=tuple(args.target_modules),
        saved=tuple(args.lora_modules_to_save),
        on_trunk=args.mtp_mode != "heads_only",
        heads=heads_tuner_of(args, checkpoint),
    )


def lr_of(args: SftArgs, checkpoint: Heads, *, is_quantized: bool = False) -> float:
    """Return the peak learning rate.

    Args:
        checkpoint: heads of the model directory.
        is_quantized: whether the model is quantized.
    """
    if args.lr is not None:
        return args.lr
    if new_heads_learn_alone(args, checkpoint):
        return LR_OF_NEW_HEADS
    if args.tuner_type == "lora":
        return LR_OF_ADAPTERS
    if args.mtp_mode == "heads_only" and args.mtp_init == "graft":
        return LR_OF_GRAFTED_HEADS
    if args.mtp_mode == "heads_only" and is_quantized:
        return LR_ON_QUANTIZED_TRUNK
    return method_of(args).lr


def heads_defaults(args: SftArgs, checkpoint: Heads, *, is_quantized: bool = False) -> dict[str, Any]:
    """Return the default values of options for heads, by option name. The arguments are those of `lr_of`."""
    unset = replace(args, mtp_num_layers=None, mtp_init=None, mtp_loss=None)
    return {
        "mtp_num_layers": heads_of(unset, checkpoint).layers,
        "mtp_init": mtp_init_of(unset, checkpoint),
        "mtp_loss": mtp_loss_of(unset),
        "mtp_tuner": heads_tuner_of(replace(unset, mtp_tuner=None), checkpoint),
        "lr": lr_of(replace(args, lr=None), checkpoint, is_quantized=is_quantized),
    }
