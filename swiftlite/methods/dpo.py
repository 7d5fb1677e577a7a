"""Describe `megatron dpo`, which learns preferences from pairs of answers or, with `--loss_type kto`, from labeled
answers.
"""

from dataclasses import replace

from swiftlite.args.commands import DpoArgs
from swiftlite.methods.method import Lines, Method

WITHOUT_REFERENCE = ("simpo", "orpo")
"""Names of the losses that require no reference model."""


def describe_pairs(args: DpoArgs) -> Lines:
    """Return lines of the plan: the kind of answers, the loss, and the reference model, if any."""
    return _describe("pairs of answers", args)


def describe_single_answers(args: DpoArgs) -> Lines:
    """Return the same lines as `describe_pairs` for single answers with a label."""
    return _describe("single answers", args)


def _describe(answers: str, args: DpoArgs) -> Lines:
    lines = [("learns from", f"{answers}, {args.loss_type}, beta {args.beta:g}")]
    if args.loss_type not in WITHOUT_REFERENCE:
        lines.append(("reference", args.ref_model or "the model as it is before the first step"))
    return lines


def describe_files(args: DpoArgs) -> Lines:
    """Return the plan's line for the directory of reference log-probabilities, if it is inside --output_dir."""
    if args.loss_type in WITHOUT_REFERENCE or args.ref_logprobs_cache:
        return []
    return [("reference/", "log probabilities of the answers under the reference model; a resumed run reads them")]


FIGURES = ("loss", "rewards/chosen", "rewards/rejected", "rewards/accuracies", "rewards/margins")
FIGURES += ("logps/chosen", "logps/rejected")
"""Metrics that are means over pairs, by TRL's names."""


def evaluated_of_pairs(args: DpoArgs) -> tuple[str, ...]:
    """Return the names of the metrics of held-out pairs."""
    imitates = args.loss_type == "orpo" or (args.loss_type == "simpo" and args.cpo_alpha > 0)
    return (*FIGURES, "nll_loss") if imitates else FIGURES


DPO = Method(
    name="dpo",
    words="megatron dpo",
    args_class=DpoArgs,
    line="train on preferences (DPO, KTO and others)",
    training="swiftlite.train.methods.dpo:DPO",
    rules="swiftlite.rules.training.dpo",
    describe=describe_pairs,
    describe_files=describe_files,
    applies=lambda args: args.loss_type != "kto",
    lr=1e-6,  # as in TRL
    evaluated=evaluated_of_pairs,
    sequences_per_sample=2,
    imitates_rows=False,
)
KTO = replace(
    DPO,
    name="kto",
    training="swiftlite.train.methods.kto:KTO",
    rules="swiftlite.rules.training.kto",
    describe=describe_single_answers,
    applies=lambda args: args.loss_type == "kto",
    evaluated=lambda args: ("kl", *(name for name in FIGURES if name != "rewards/accuracies")),
    sequences_per_sample=1,
)
