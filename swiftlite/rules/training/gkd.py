"""Rules of `megatron gkd`: the rules of `megatron sft`, and rules for the teacher and completions."""

from collections.abc import Iterator

from swiftlite.args.bounds import out_of_bounds
from swiftlite.args.commands import DoctorArgs, GkdArgs
from swiftlite.args.config import Problem
from swiftlite.families.index import FAMILIES, known_architecture
from swiftlite.plan.distillation import teacher_layout
from swiftlite.plan.facts import Facts, near_path
from swiftlite.plan.heads import heads_of
from swiftlite.plan.layout import layout_of, layout_problems, process_problems
from swiftlite.rules import common
from swiftlite.rules.training import grpo, sft

UNSUPPORTED = grpo.UNSUPPORTED_WITH_COMPLETIONS


def options_of_sft_are_left_out(args: GkdArgs, facts: Facts) -> Iterator[Problem]:
    yield from grpo.left_out_with_completions(args, "megatron gkd", UNSUPPORTED)


def teacher_is_a_model(args: GkdArgs | DoctorArgs, facts: Facts) -> Iterator[Problem]:
    if args.teacher_model is None:
        yield "--teacher_model is missing", "give a Hugging Face model, as for --model"
        return
    directory, config = facts.described("teacher_model")
    vocab_size, expected = (each.get("vocab_size") for each in (config, facts.hf_config))
    if not config:
        yield (
            f"--teacher_model {args.teacher_model} has no config.json",
            near_path(directory) or "give the directory of a Hugging Face model",
        )
    elif known_architecture(config) is None:
        yield (
            f"--teacher_model {args.teacher_model}: unknown model_type {config.get('model_type')}",
            f"known: {', '.join(FAMILIES)}",
        )
    elif facts.hf_config and vocab_size != expected:
        yield (
            f"--teacher_model {args.teacher_model} has vocab_size {vocab_size}, --model has {expected}",
            "give a model with the same tokenizer and vocab_size",
        )


def teacher_fits_the_layout(args: GkdArgs | DoctorArgs, facts: Facts) -> Iterator[Problem]:
    """Reject layouts that suit the trained model but not the teacher. `doctor --plan` has the same rule."""
    if args.teacher_model is None or out_of_bounds(args):
        return
    architecture = known_architecture(facts.described("teacher_model")[1])
    layout, own = teacher_layout(args, architecture), layout_of(args)
    problems = [*layout_problems(layout, architecture, 0), *process_problems(layout, facts.world_size)]
    of_model = [*layout_problems(own, facts.architecture, 0), *process_problems(own, facts.world_size)]
    for problem, hint in problems:
        if (problem, hint) not in of_model:  # another rule reports those
            yield f"--teacher_model {args.teacher_model}: {problem}", hint or "the teacher has the layout of --model"


def completions_fit_the_batches(args: GkdArgs, facts: Facts) -> Iterator[Problem]:
    if args.lmbda:
        yield from grpo.completions_leave_room(args, facts)
        yield from grpo.batches_count_completions(args, facts)


def completions_can_be_drawn(args: GkdArgs, facts: Facts) -> Iterator[Problem]:
    if args.lmbda:
        yield from grpo.engine_can_generate(args, facts)
        yield from grpo.draft_schedule_fits_the_engine(args, facts)


def settings_have_an_effect(args: GkdArgs, facts: Facts) -> Iterator[str]:
    """Yield a note for each changed option that has no effect."""
    no_heads = (not heads_of(args, facts.heads).layers, "the model has no MTP layers")
    never = (not args.lmbda, "--lmbda is 0")
    stored = (args.rollouts_from is not None, "--rollouts_from is given")
    of_engine = never if never[0] else stored
    served = (bool(args.rollout_server), "--rollout_server is given")
    idle = {
        "mtp_lr": no_heads,
        "speculative": no_heads if no_heads[0] else of_engine,
        "num_speculative_tokens": no_heads if no_heads[0] else of_engine,
        "draft_schedule": no_heads if no_heads[0] else of_engine,
        "infer_backend": of_engine if of_engine[0] else served,
        "rollout_server": of_engine,
        "max_batch_size": of_engine,
        "temperature": never,
        "max_completion_length": never,
        "rollouts_from": never,
        **dict.fromkeys(("loss_scale", "eval_steps", "eval_iters"), (args.lmbda == 1, "--lmbda is 1")),
    }
    yield from common.without_effect(args, idle)


RULES = (
    *common.without_options(sft.RULES, UNSUPPORTED),
    options_of_sft_are_left_out,
    teacher_is_a_model,
    teacher_fits_the_layout,
    completions_fit_the_batches,
    grpo.heads_can_follow,
    completions_can_be_drawn,
)
NOTES = (*sft.NOTES, settings_have_an_effect)
