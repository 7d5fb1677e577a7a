"""Choose defaults for MTP heads: their number, initial weights, loss and learning rate.

Training only the heads of a frozen trunk differs from fine-tuning: heads may start from scratch, large steps lose
nothing, and the target is known at every token, because it is the trunk's prediction."""

from dataclasses import replace
from typing import Any

from swiftlite.args.commands import SftArgs
from swiftlite.args.fields import MtpInit, MtpLoss
from swiftlite.conventions.index import CONVENTIONS
from swiftlite.families import Family
from swiftlite.heads import Heads
from swiftlite.lora import HeadsTuner, Lora
from swiftlite.methods.index import method_of
from swiftlite.plan.layout import layout_of, mtp_is_with_last_layer

LR_OF_ADAPTERS = 1e-4
"""Peak learning rate of adapters."""
LR_OF_NEW_HEADS = 1e-3
"""Peak learning rate where heads alone learn, and start anew; measured on SmolLM2-135M. Heads that somebody has trained
already would be thrown back by it."""
LR_OF_GRAFTED_HEADS = 3e-4
"""Where heads alone learn that were trained on another trunk. Measured on SmolLM2-135M behind a trunk that LoRA had
changed, tokens per step of drafting: 1.37 before, after 154 steps 1.38 at 1e-5, 1.86 at 3e-4, 2.00 at 1e-3. That head
had been trained for 120 steps only; one that was trained for long has more to lose."""


def heads_of(args: SftArgs, checkpoint: Heads) -> Heads:
    """MTP heads of the run: as many layers as were asked for, else as the checkpoint has.

    A run of heads alone has at least one.

    Args:
        checkpoint: the heads of the model directory.
    """
    layers = checkpoint.layers if args.mtp_num_layers is None else args.mtp_num_layers
    if args.mtp_num_layers is None and args.mtp_mode == "heads_only":
        layers = layers or 1
    # `heads_for_engine` adds what --draft_for feeds them; which tokens --draft_vocab chooses the rows tell.
    drafted = checkpoint.draft_vocab if layers and args.draft_vocab is None else ()
    return Heads(layers, args.mtp_unroll, args.mtp_unroll_beta, drafted, checkpoint.drafting if layers else None)


def heads_for_engine(args: SftArgs, checkpoint: Heads, family: Family) -> Heads:
    """Return the heads of the run, with the inputs that the engine of --draft_for gives them."""
    heads = heads_of(args, checkpoint)
    convention = CONVENTIONS[args.draft_for](family) if args.draft_for and heads.layers else None
    return replace(heads, drafting=convention.drafting) if convention else heads


def mtp_init_of(args: SftArgs, checkpoint: Heads) -> MtpInit:
    """Return the source of the heads' initial weights."""
    if args.mtp_init is not None:
        return args.mtp_init
    if checkpoint.layers or args.mtp_mode != "heads_only":
        return "checkpoint"
    return "copy_last_layer" if why_no_fit(args) else "fit_last_layer"


def why_no_fit(args: SftArgs) -> str:
    """Return why `fit_last_layer` is not possible; empty if it is."""
    if args.streaming:
        return "--streaming reads training rows later"
    if not mtp_is_with_last_layer(layout_of(args)):
        return "--pipeline_model_parallel_layout has the last decoder layer on another stage than the heads"
    return ""


def mtp_loss_of(args: SftArgs) -> MtpLoss:
    """Return the loss of the heads."""
    if args.mtp_loss is not None:
        return args.mtp_loss
    return "kl" if args.mtp_mode == "heads_only" else "ce"


def new_heads_learn_alone(args: SftArgs, checkpoint: Heads) -> bool:
    """Return whether only new heads are trained."""
    return args.mtp_mode == "heads_only" and mtp_init_of(args, checkpoint) not in ("checkpoint", "graft")


def heads_tuner_of(args: SftArgs, checkpoint: Heads) -> HeadsTuner:
    """Return how the heads are trained with adapters."""
    if args.mtp_tuner is not None:
        return args.mtp_tuner
    return "lora" if mtp_init_of(args, checkpoint) in ("checkpoint", "graft") else "full"


def lora_of(args: SftArgs, checkpoint: Heads) -> Lora | None:
    """The adapters of the run; None where the model's own parameters learn.

    Args:
        checkpoint: the heads of the model directory.
    """
    if args.tuner_type != "lora":
        return None
    return Lora(
        rank=args.lora_rank,
        alpha=args.lora_alpha,
        dropout=args.lora_dropout,
        is_rank_stabilised=args.use_rslora,
        has_magnitudes=args.use_dora,
        targets=tuple(args.target_modules),
        saved=tuple(args.lora_modules_to_save),
        on_trunk=args.mtp_mode != "heads_only",
        heads=heads_tuner_of(args, checkpoint),
    )


def lr_of(args: SftArgs, checkpoint: Heads) -> float:
    """The peak learning rate."""
    if args.lr is not None:
        return args.lr
    if new_heads_learn_alone(args, checkpoint):
        return LR_OF_NEW_HEADS
    if args.tuner_type == "lora":
        return LR_OF_ADAPTERS
    if args.mtp_mode == "heads_only" and args.mtp_init == "graft":
        return LR_OF_GRAFTED_HEADS
    return method_of(args).lr


def heads_defaults(args: SftArgs, checkpoint: Heads) -> dict[str, Any]:
    """Return the values of these options if they are unset, by name."""
    unset = replace(args, mtp_num_layers=None, mtp_init=None, mtp_loss=None)
    return {
        "mtp_num_layers": heads_of(unset, checkpoint).layers,
        "mtp_init": mtp_init_of(unset, checkpoint),
        "mtp_loss": mtp_loss_of(unset),
        "mtp_tuner": heads_tuner_of(replace(unset, mtp_tuner=None), checkpoint),
        "lr": lr_of(replace(args, lr=None), checkpoint),
    }
