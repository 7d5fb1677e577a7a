"""Describe `megatron grpo`, which learns from rewards of completions that the model generates."""

from swiftlite.args.commands import GrpoArgs
from swiftlite.args.rl_fields import CompletionArgs
from swiftlite.methods.method import Lines, Method


def describe(args: GrpoArgs) -> Lines:
    """Return the plan's lines about completions, rewards and the loss."""
    prompts = args.global_batch_size * args.steps_per_generation // args.num_generations
    lines = [
        ("learns from", f"{args.num_generations} completions of each prompt, {args.loss_type}"),
        ("generation", f"{prompts} prompts by {generator_of(args)}, for {_steps_of(args)} steps"),
    ]
    if args.rollouts_from:
        lines[1:] = [("completions", f"stored in {args.rollouts_from}")]
    elif rewards := [*args.reward_funcs, *args.reward_model, *args.reward_server]:
        lines.insert(1, ("rewards", " + ".join(rewards)))
    if args.tools or args.rollout_func:
        lines.append(("conversations", f"{args.tools or args.rollout_func}, at most {args.max_turns} answers"))
    if args.teacher_model:
        lines.append(("teacher", f"{args.teacher_model}, with the coefficient {args.teacher_kl_coef:g}"))
    if args.beta:
        lines.append(("reference", args.ref_model or "the model as it is before the first step"))
    return lines


def describe_files(args: GrpoArgs) -> Lines:
    """Return the plan's line about stored completions."""
    if args.rollouts_from:
        return []
    return [("rollouts/", "the completions of each generation with their rewards; a resumed run reads them")]


def generator_of(args: CompletionArgs) -> str:
    """Return what generates completions, for the plan."""
    return " ".join(args.rollout_server) or args.infer_backend


def _steps_of(args: GrpoArgs) -> int:
    return args.steps_per_generation * args.num_iterations


def evaluated(args: GrpoArgs) -> list[str]:
    """Return the names of the metrics of an evaluation, see `rollouts/held_out.py`."""
    names = [f"completions/{each}_length" for each in ("mean", "min", "max")]
    names += [f"completions/{each}_terminated_length" for each in ("mean", "min", "max")]
    names.append("completions/clipped_ratio")
    if args.reward_funcs or args.reward_model or args.reward_server:
        names = ["reward", "reward_std", "rewards/failures", "rewards/unscored", *names]
    for function in args.reward_funcs:
        names += [f"rewards/{function}/mean", f"rewards/{function}/std"]
    if args.teacher_model:
        names.append("teacher_kl")
    return names


GRPO = Method(
    name="grpo",
    words="megatron grpo",
    args_class=GrpoArgs,
    line="train on rewards of generated completions (GRPO and others)",
    training="swiftlite.rollouts.training:GRPO",
    rules="swiftlite.rules.training.grpo",
    describe=describe,
    describe_files=describe_files,
    lr=1e-6,  # as in TRL
    evaluates=lambda args: not args.rollouts_from,
    evaluates_rows=False,
    evaluated=evaluated,
    imitates_rows=False,
    detaches_heads=True,
    temperature=lambda args: args.temperature,
    rows_per_prompt=lambda args: args.num_generations * args.num_iterations,
)
