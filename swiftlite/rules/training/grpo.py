"""Rules of `megatron grpo`: the rules of `megatron sft`, and rules for rewards, completions and the policy loss."""

import difflib
import math
from collections.abc import Iterator
from pathlib import Path

from swiftlite.args.bounds import out_of_bounds
from swiftlite.args.command_line import shell_line
from swiftlite.args.commands import GkdArgs, GrpoArgs
from swiftlite.args.config import Problem
from swiftlite.args.docs import options
from swiftlite.args.rl_fields import CompletionArgs
from swiftlite.args.serving_fields import FILTERS, SamplingArgs
from swiftlite.base.errors import UserError
from swiftlite.engines.draft_schedule import read_schedule
from swiftlite.engines.index import ENGINES, names_with
from swiftlite.families.index import known_architecture
from swiftlite.families.reward_model import is_reward_model, num_labels
from swiftlite.methods.index import method_of
from swiftlite.methods.reward_names import name_of, name_of_server, reward_names_of
from swiftlite.plan.facts import Facts, read_hf_config
from swiftlite.plan.heads import heads_of, lora_of, mtp_init_of
from swiftlite.plan.layout import choices
from swiftlite.plan.policy import is_base_of_adapters, reference_layout, reward_layout, reward_models_on_ranks
from swiftlite.plan.run import packing_of
from swiftlite.rewards.index import REWARDS, check_reward
from swiftlite.rewards.models import TRAIN_ONE, check_directory
from swiftlite.rewards.settings import reward_settings_of
from swiftlite.rules import common, engine_options
from swiftlite.rules.training import dpo, sft, teacher

KWARGS_OF_ENGINES = tuple(
    ENGINES[name].kwargs_option for name in names_with("draws_rollouts") if ENGINES[name].options_class
)
KEYWORDS_WITH_OPTIONS = {
    **dict.fromkeys(("max_model_len", "context_length"), "max_length"),
    **dict.fromkeys(("max_num_seqs", "max_running_requests"), "max_batch_size"),
    **dict.fromkeys(("model", "model_path"), "model"),
    "dtype": "torch_dtype",
}
"""Keyword arguments of engines, and the options that determine them."""


def prompts_stay_whole(args: GrpoArgs | GkdArgs, facts: Facts) -> Iterator[Problem]:
    if args.truncation_strategy not in ("delete", "error"):
        yield f"--truncation_strategy {args.truncation_strategy} would cut prompts", "use delete or error"


def rewards_are_given(args: GrpoArgs, facts: Facts) -> Iterator[Problem]:
    names = reward_names_of(args)
    if not names and not args.rollouts_from and not args.teacher_model:
        yield (
            "--reward_funcs is missing",
            "for example --reward_funcs accuracy, or a function of --external_plugins FILE.py; or give --reward_model, "
            "--reward_server or --teacher_model",
        )
    if args.reward_weights and len(args.reward_weights) != len(names):
        yield (
            f"--reward_weights has {len(args.reward_weights)} numbers for {len(names)} rewards: {', '.join(names)}",
            "give one weight for each function, then one for each reward model and server",
        )
    if not args.rollouts_from:
        yield from reward_models_are_here(args)
    if args.reward_weights and not (all(map(math.isfinite, args.reward_weights)) and any(args.reward_weights)):
        yield f"--reward_weights {shell_line(args.reward_weights)} give no reward", "use finite numbers, not all 0"
    for name in args.external_plugins:
        if not Path(name).is_file():
            yield f"--external_plugins {name} is not a file", "give a Python file with reward functions"


def reward_models_are_here(args: GrpoArgs) -> Iterator[Problem]:
    names = reward_names_of(args)
    for directory in args.reward_model:
        if names.count(name := name_of(directory)) > 1:
            yield f"--reward_model {directory}: another reward is also called {name}", "rename the directory"
        try:
            check_directory(directory)
        except UserError as error:
            yield error.problem, error.hint
    for url in args.reward_server:
        if not common.is_address(url):
            yield f"--reward_server {url} is not an address", "give http://HOST:PORT, such as http://127.0.0.1:8001"
        elif names.count(name_of_server(url)) > 1:
            yield f"--reward_server {url} is given twice", "give each server once"


def named_rewards_are_known(args: GrpoArgs, facts: Facts) -> Iterator[Problem]:
    """Check named reward functions before the model is read. Those of the user are only known in their process."""
    if args.external_plugins or args.rollouts_from:
        return
    settings = reward_settings_of(args)
    for name in args.reward_funcs:
        if name not in REWARDS:
            close = difflib.get_close_matches(name, REWARDS, n=1)
            meant = f" (did you mean {close[0]}?)" if close else ""
            yield (
                f"--reward_funcs {name} is not a function of the library{meant}",
                f"use {', '.join(REWARDS)}, or give the file of your function with --external_plugins",
            )
            continue
        try:
            check_reward(name, settings)
        except UserError as error:
            yield error.problem, error.hint


def conversations_have_code(args: GrpoArgs, facts: Facts) -> Iterator[Problem]:
    if args.tools and args.rollout_func:
        yield "--tools and --rollout_func both conduct the conversation", "remove one of the two"
    if args.tools and not (args.tools.endswith(".py") and Path(args.tools).is_file()):
        yield f"--tools {args.tools} is not a Python file", "give a file with functions that the model can call"
    if args.rollout_func and not args.external_plugins and not args.rollouts_from:
        yield f"--rollout_func {args.rollout_func} requires --external_plugins", "give the file that defines it"


def groups_fit_the_batch(args: GrpoArgs, facts: Facts) -> Iterator[Problem]:
    """Require that all completions of a prompt are in the same step."""
    if out_of_bounds(args):
        return
    number, size = args.num_generations, args.global_batch_size
    if size % number:
        yield (
            f"--global_batch_size {size} counts completions and must be a multiple of --num_generations {number}",
            f"use --global_batch_size {-(-size // number) * number}",
        )


def rewards_can_be_compared(args: GrpoArgs, facts: Facts) -> Iterator[Problem]:
    names = reward_names_of(args)
    if args.num_generations == 1 and names:
        yield "--num_generations 1 leaves no completions to compare rewards with", "use --num_generations 2 or more"
    if args.dynamic_sample and not names and not args.rollouts_from:
        yield "--dynamic_sample compares rewards, but --reward_funcs is not given", "remove --dynamic_sample"


def completions_leave_room(args: GrpoArgs | GkdArgs, facts: Facts) -> Iterator[Problem]:
    if args.max_completion_length >= args.max_length:
        yield (
            f"--max_completion_length {args.max_completion_length} leaves no room for a prompt within --max_length "
            f"{args.max_length}",
            f"use --max_length {2 * args.max_completion_length}",
        )


def batches_count_completions(args: GrpoArgs | GkdArgs, facts: Facts) -> Iterator[Problem]:
    if packing_of(args) == "rows":
        yield (
            f"--packing true is not supported by {method_of(args).words} without a scheduler: batch sizes count "
            "completions",
            "use --padding_free true, or add --sequence_packing_scheduler dp_balanced",
        )


def clipping_has_a_range(args: GrpoArgs, facts: Facts) -> Iterator[Problem]:
    if args.loss_type == "cispo" and args.epsilon_high is None:
        yield "--loss_type cispo requires --epsilon_high, the upper bound of the ratio", "use --epsilon_high 5"
    high = args.epsilon if args.epsilon_high is None else args.epsilon_high
    if args.delta is not None and args.delta <= 1 + high:
        yield f"--delta {args.delta} must be above 1 + --epsilon_high = {1 + high:g}", f"use --delta {1 + 2 * high:g}"
    if args.delta is not None and args.loss_type in ("cispo", "sapo"):
        yield f"--delta does not apply to --loss_type {args.loss_type}", "remove --delta"


def heads_can_follow(args: GrpoArgs | GkdArgs, facts: Facts) -> Iterator[Problem]:
    words = method_of(args).words
    heads = heads_of(args, facts.heads)
    if not heads.layers:
        return
    if mtp_init_of(args, facts.heads) != "checkpoint":
        yield (
            f"{words} trains heads that --model already has, because they draft the completions",
            "train them first: swiftlite megatron sft --mtp_mode heads_only; or --mtp_num_layers 0",
        )
    if args.mtp_loss == "ce":
        yield (
            f"--mtp_loss ce is not supported by {words}: labels are sampled tokens",
            "use --mtp_loss kl",
        )
    if args.draft_vocab or heads.draft_vocab:
        yield (
            f"heads with a draft vocabulary are not supported by {words}: engines keep rows of the old trunk",
            "export the heads without --draft_vocab",
        )


def engine_can_generate(args: GrpoArgs | GkdArgs, facts: Facts) -> Iterator[Problem]:
    if args.rollouts_from:
        directory = Path(args.rollouts_from)
        if not directory.is_dir():
            yield f"--rollouts_from {directory} is not a directory", "give OUTPUT_DIR/rollouts of a run"
        elif not any(directory.glob("*.safetensors")):
            inner = directory / "rollouts"
            hint = f"use --rollouts_from {inner}" if inner.is_dir() else "give OUTPUT_DIR/rollouts of a run"
            yield f"--rollouts_from {directory} contains no stored completions", hint
        return
    if args.rollout_server:
        yield from servers_have_addresses(args)
        return
    info = ENGINES.get(args.infer_backend)
    if info is not None:
        yield from engine_options.missing_engine(info, "infer_backend")
    if args.weight_transport and (info is None or not info.can_sleep):
        given = f"--weight_transport {args.weight_transport}"
        yield f"{given} is not supported by --infer_backend {args.infer_backend}", "remove it"
    elif args.weight_transport == "ipc" and info and not info.shares_gpu(args.vllm_engine_kwargs):
        problem = "--weight_transport ipc uses the memory of one GPU, but --vllm_engine_kwargs has several workers"
        yield problem, "use --weight_transport file"
    for name in KWARGS_OF_ENGINES:
        if vars(args)[name] is not None and (info is None or name != info.kwargs_option):
            yield f"--{name} has no effect with --infer_backend {args.infer_backend}", f"remove --{name}"
        for key, own in KEYWORDS_WITH_OPTIONS.items():
            if key in (vars(args)[name] or {}):
                yield f"--{name} contains {key!r}, which has its own option", f"use --{own}"


def servers_have_addresses(args: CompletionArgs) -> Iterator[Problem]:
    urls = [url.rstrip("/") for url in args.rollout_server]
    for url in urls:
        if not common.is_address(url):
            yield f"--rollout_server {url} is not an address", "give http://HOST:PORT, such as http://127.0.0.1:8000"
    for url in sorted({url for url in urls if urls.count(url) > 1}):
        yield f"--rollout_server has {url} more than once", "give each server once"


def engine_has_the_sampling_options(args: GrpoArgs | GkdArgs, facts: Facts) -> Iterator[Problem]:
    if args.rollouts_from:
        return
    drafts = args.speculative == "mtp" and bool(heads_of(args, facts.heads).layers)
    if args.rollout_server:
        yield from engine_options.unsupported_sampling(args, "vllm", drafts=drafts, flag="--rollout_server")
    else:
        yield from engine_options.unsupported_sampling(args, args.infer_backend, drafts=drafts)


def log_probabilities_are_those_of_samples(args: GrpoArgs, facts: Facts) -> Iterator[Problem]:
    """Require an engine whose log-probabilities include the filters, for the weights of tokens in the loss."""
    info = ENGINES.get(args.infer_backend)
    if args.rollouts_from or args.rollout_server or info is None or info.filters_log_p:
        return
    defaults = options(SamplingArgs)
    for name in FILTERS:
        if vars(args)[name] != defaults[name].default:
            yield (
                f"--{name} {vars(args)[name]} is not supported with --infer_backend {info.name}, which reports "
                "log-probabilities of the distribution before it",
                f"use --infer_backend vllm or transformers, or remove --{name}",
            )


def draft_schedule_fits_the_engine(args: GrpoArgs | GkdArgs, facts: Facts) -> Iterator[Problem]:
    if args.draft_schedule is None or args.rollouts_from:
        return
    given = f"--draft_schedule {args.draft_schedule}"
    if args.rollout_server:
        yield f"{given} is not supported with --rollout_server", "give it to swiftlite deploy, which starts the server"
        return
    info = ENGINES.get(args.infer_backend)
    if info is None:
        return
    if not info.takes_draft_schedule:
        able = choices([f"--infer_backend {name}" for name in names_with("takes_draft_schedule")])
        yield f"{given} is not supported with --infer_backend {args.infer_backend}", f"use {able}"
        return
    if args.num_speculative_tokens:
        yield f"{given} and --num_speculative_tokens both set the number of draft tokens", "remove one of the two"
    try:
        read_schedule(Path(args.draft_schedule), args.infer_backend)
    except UserError as error:
        yield error.problem, error.hint


def reference_fits_its_layout(args: GrpoArgs, facts: Facts) -> Iterator[Problem]:
    if args.beta and not out_of_bounds(args):
        yield from dpo.reference_problems(reference_layout(args), args, facts)


def reward_models_fit_their_layout(args: GrpoArgs, facts: Facts) -> Iterator[Problem]:
    on_ranks = reward_models_on_ranks(args)
    if not on_ranks or out_of_bounds(args):
        return
    without = f"remove {shell_line([f'--{name}' for name in _OF_MODELS])}"
    if args.async_rollouts and args.dynamic_sample:
        problem = "--async_rollouts 1 with --dynamic_sample: reward models with a layout cannot score during a step"
        yield problem, f"remove one of the two; or {without}"
    for directory in on_ranks:
        config = read_hf_config(Path(directory).expanduser())
        if not config:
            continue  # another rule reports it
        if not is_reward_model(config):
            yield f"--reward_model {directory} has no layout: it is not of a family that megatron rm trains", without
            continue
        if (number := num_labels(config)) != 1:
            yield f"--reward_model {directory} has {number} labels; a reward model has one", TRAIN_ONE
        architecture = known_architecture(config)
        layout = reward_layout(args, architecture)
        for problem, hint in common.problems_beside("reward", layout, architecture, args, facts):
            yield f"--reward_model {directory}: {problem}", hint


def reference_can_follow(args: GrpoArgs, facts: Facts) -> Iterator[Problem]:
    if not args.sync_ref_model:
        return
    for name in common.changed(args, _OF_REFERENCE):
        problem = f"--sync_ref_model requires the layout of the model, but --{name} is {vars(args)[name]}"
        yield problem, f"remove --{name}"
    if not args.beta:
        yield "--sync_ref_model: there is no reference model, because --beta is 0", "use --beta 0.04, or omit it"
    if args.tuner_type == "lora":
        yield "--sync_ref_model is not supported with --tuner_type lora", "omit it, or train the model in full"
    steps = args.steps_per_generation * args.num_iterations
    if args.rollouts_from and args.ref_model_sync_steps % steps:
        yield (
            f"--ref_model_sync_steps {args.ref_model_sync_steps} is not a multiple of the {steps} steps of a "
            "generation, as --rollouts_from requires",
            f"use --ref_model_sync_steps {-(-args.ref_model_sync_steps // steps) * steps}",
        )


def old_completions_are_corrected(args: GrpoArgs, facts: Facts) -> Iterator[Problem]:
    if args.async_rollouts and args.rollout_importance_sampling_mode == "none" and not args.rollouts_from:
        yield (
            "--async_rollouts 1 requires importance weights, but --rollout_importance_sampling_mode is none",
            "use --rollout_importance_sampling_mode token_truncate",
        )


def settings_have_an_effect(args: GrpoArgs, facts: Facts) -> Iterator[str]:
    """Yield a note for each changed option that has no effect."""
    no_rewards = (not reward_names_of(args), "--reward_funcs is not given")
    no_reference = (not args.beta, "--beta is 0")
    lora = lora_of(args, facts.heads)
    adapters = (is_base_of_adapters(args, lora), "the reference is the model without its adapters")
    no_length = ("length" not in args.reward_funcs, "--reward_funcs does not contain length")
    not_drafted = (args.speculative == "none", "--speculative is none")
    no_heads = (not heads_of(args, facts.heads).layers, "the model has no MTP layers")
    single = (not args.tools and not args.rollout_func, "neither --tools nor --rollout_func is given")
    stored = (args.rollouts_from is not None, "--rollouts_from is given")
    served = (bool(args.rollout_server), "--rollout_server is given")
    idle = {
        "ref_model": no_reference,
        **dict.fromkeys(_OF_REFERENCE, no_reference if no_reference[0] else adapters),
        **dict.fromkeys(_OF_SYNC, (not args.sync_ref_model, "--sync_ref_model is false")),
        **dict.fromkeys(_OF_TEACHER, (args.teacher_model is None, "--teacher_model is not given")),
        "speculative": no_heads,
        "num_speculative_tokens": no_heads if no_heads[0] else not_drafted,
        "draft_schedule": no_heads if no_heads[0] else not_drafted,
        "mtp_lr": no_heads,
        **dict.fromkeys(_OF_SAPO, (args.loss_type != "sapo", "--loss_type is not sapo")),
        **dict.fromkeys(("epsilon", "epsilon_high"), (args.loss_type == "sapo", "--loss_type sapo does not clip")),
        "soft_cache_length": no_length,
        **dict.fromkeys(("max_turns", "tool_timeout"), single),
        "max_resample_times": (not args.dynamic_sample, "--dynamic_sample is false"),
        "log_completions": (not {*_WITH_TABLES} & {*args.report_to}, "--report_to has no tracker with tables"),
        **dict.fromkeys(_OF_REWARDS, stored if stored[0] else no_rewards),
        **dict.fromkeys(_OF_MODELS, stored if stored[0] else (not args.reward_model, "--reward_model is not given")),
        **dict.fromkeys((*_OF_DRAWING, *options(SamplingArgs)), stored),
        **dict.fromkeys(("eval_steps", "eval_iters"), stored),
        **dict.fromkeys(("infer_backend", "weight_transport", *KWARGS_OF_ENGINES), stored if stored[0] else served),
    }
    yield from common.without_effect(args, idle)


_OF_REFERENCE = ("ref_tensor_model_parallel_size", "ref_pipeline_model_parallel_size")
_OF_TEACHER = ("teacher_kl_coef", "teacher_tensor_model_parallel_size", "teacher_pipeline_model_parallel_size")
_OF_SYNC = ("ref_model_mixup_alpha", "ref_model_sync_steps")
_OF_SAPO = ("sapo_temperature_pos", "sapo_temperature_neg")
_WITH_TABLES = ("wandb", "swanlab", "trackio")
_OF_MODELS = ("reward_tensor_model_parallel_size", "reward_pipeline_model_parallel_size")
_OF_REWARDS = ("external_plugins", "advantage_estimator", "scale_rewards")
_OF_DRAWING = ("reward_funcs", "reward_model", "reward_server", "reward_weights", "rollout_server", "max_batch_size")
_OF_DRAWING += ("dynamic_sample", "max_resample_times", "draft_schedule", "async_rollouts")

RULES = (
    *sft.RULES,
    prompts_stay_whole,
    rewards_are_given,
    named_rewards_are_known,
    conversations_have_code,
    old_completions_are_corrected,
    reference_fits_its_layout,
    reward_models_fit_their_layout,
    reference_can_follow,
    groups_fit_the_batch,
    rewards_can_be_compared,
    completions_leave_room,
    batches_count_completions,
    clipping_has_a_range,
    heads_can_follow,
    engine_can_generate,
    engine_has_the_sampling_options,
    log_probabilities_are_those_of_samples,
    draft_schedule_fits_the_engine,
    dpo.reference_is_a_model,
    teacher.teacher_is_a_model,
    teacher.teacher_fits_the_layout,
)
NOTES = (*sft.NOTES, settings_have_an_effect)
