"""Rules of `megatron gkd`: the rules of `megatron sft`, and rules for the teacher and completions."""

from collections.abc import Iterator

from swiftlite.args.commands import GkdArgs
from swiftlite.args.config import Problem
from swiftlite.args.docs import options
from swiftlite.args.serving_fields import SamplingArgs
from swiftlite.plan.facts import Facts
from swiftlite.plan.heads import heads_of
from swiftlite.rules import common
from swiftlite.rules.training import grpo, sft, teacher


def teacher_is_given(args: GkdArgs, facts: Facts) -> Iterator[Problem]:
    if args.teacher_model is None:
        yield "--teacher_model is missing", "give a Hugging Face model, as for --model"


def completions_fit_the_batches(args: GkdArgs, facts: Facts) -> Iterator[Problem]:
    if args.lmbda:
        yield from grpo.completions_leave_room(args, facts)
        yield from grpo.batches_count_completions(args, facts)


def completions_can_be_drawn(args: GkdArgs, facts: Facts) -> Iterator[Problem]:
    if args.lmbda:
        yield from grpo.engine_can_generate(args, facts)
        yield from grpo.engine_has_the_sampling_options(args, facts)
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
        **dict.fromkeys(
            ("infer_backend", "weight_transport", *grpo.KWARGS_OF_ENGINES), of_engine if of_engine[0] else served
        ),
        **dict.fromkeys(("rollout_server", *options(SamplingArgs)), of_engine),
        "max_batch_size": of_engine,
        "temperature": never,
        "max_completion_length": never,
        "rollouts_from": never,
        **dict.fromkeys(("loss_scale", "eval_steps", "eval_iters"), (args.lmbda == 1, "--lmbda is 1")),
    }
    yield from common.without_effect(args, idle)


RULES = (
    *sft.RULES,
    grpo.prompts_stay_whole,
    teacher_is_given,
    teacher.teacher_is_a_model,
    teacher.teacher_fits_the_layout,
    completions_fit_the_batches,
    grpo.heads_can_follow,
    completions_can_be_drawn,
)
NOTES = (*sft.NOTES, settings_have_an_effect)
