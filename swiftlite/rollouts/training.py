"""Implement `megatron grpo`: a loss over completions that the model generates, weighted by their rewards."""

from collections.abc import Collection, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from transformers import PreTrainedTokenizerBase

from swiftlite.args.commands import GrpoArgs, SftArgs
from swiftlite.base.atomic import check_writable
from swiftlite.data.dataset import Data
from swiftlite.data.encoder import Encoder, PromptEncoder
from swiftlite.data.rows.columns import WithColumns
from swiftlite.data.rows.prompt import parse_prompt
from swiftlite.data.sample import Sample
from swiftlite.data.sandbox import run_templates_unbounded
from swiftlite.data.template import ChatTemplate
from swiftlite.engines.index import ENGINES
from swiftlite.engines.prompts import no_images_in
from swiftlite.families.resolved import HfModel
from swiftlite.methods.reward_names import reward_names_of
from swiftlite.plan.policy import policy_of
from swiftlite.rewards.advantages import SCALES, AdvantageSettings
from swiftlite.rewards.process import RewardProcess
from swiftlite.rollouts.conversations import Conversations, EpisodeProcess
from swiftlite.rollouts.draw import Drawing, columns_in, omitted_in
from swiftlite.rollouts.engine import check_servers, sampling_of, start_rollout_engine
from swiftlite.rollouts.frozen import open_frozen_policies
from swiftlite.rollouts.held_out import HeldOutPrompts
from swiftlite.rollouts.reward_models import RewardModel, RewardsWithModels, open_reward_models, reward_process
from swiftlite.rollouts.rollouts import Rollouts
from swiftlite.rollouts.stored import FOLDER, GenerationFiles, check_stored, on_first_rank
from swiftlite.rollouts.turns import Turns
from swiftlite.train.batches.train_batches import TrainBatches
from swiftlite.train.methods.conversations import load_data, open_image_encoder
from swiftlite.train.methods.policy import ADVANTAGE, ENGINE, OLD, REFERENCE, TEACHER, PolicyObjective
from swiftlite.train.methods.teacher import check_tokenizer
from swiftlite.train.methods.training import Training
from swiftlite.train.phases import Run, live_weights


def make_prompt_encoder(args: GrpoArgs, tokenizer: PreTrainedTokenizerBase, hf_model: HfModel) -> Encoder:
    """Return the encoder of rows, whose prompts leave room for a completion."""
    images, no_images = open_image_encoder(args, tokenizer, hf_model)
    if images is not None and (reason := no_images_of_run(args)):
        images, no_images = None, reason
    template = ChatTemplate(tokenizer, vocab_size=hf_model.config["vocab_size"], images=images and images.sizes)
    return PromptEncoder(
        template,
        args.max_length,
        args.truncation_strategy,
        args.max_completion_length,
        partial(parse_prompt, no_images=no_images),
        images,
    )


def no_images_of_run(args: GrpoArgs) -> str:
    """Return why the options or the engine of a run do not support images, to follow the name of a row's field; "" if
    they do."""
    if args.tools or args.rollout_func:
        return "is not supported with --tools and --rollout_func"
    if args.rollouts_from:
        return ""
    if args.rollout_server:
        return "is not supported with --rollout_server; omit it, and use --infer_backend transformers or vllm"
    return no_images_in(ENGINES[args.infer_backend])


def load_prompts(args: SftArgs, encoder: Encoder, vocab_size: int) -> Data:
    """Load the prompts. Held-out prompts are only continued for acceptance.json."""
    return replace(load_data(args, encoder, vocab_size, _offered(args)), val=[])


def _offered(args: SftArgs) -> Collection[str]:
    """Return the options that errors about rows may suggest."""
    return vars(args).keys() - {"truncation_strategy"}


def load_scored_prompts(args: GrpoArgs, encoder: Encoder, vocab_size: int) -> Data:
    """Load the reward functions and then the prompts, so that an error is found before the model is read. Held-out
    prompts are scored as well. Collective.

    Raises:
        UserError: the prompts or the reward functions cannot be used.
    """
    # First, because loading data can take minutes, and a wrong address would be reported only after that.
    check_servers(args)
    with ExitStack() as stack:
        rewards = reward_process(args)
        if not args.rollouts_from:
            on_first_rank(lambda: _enter(stack, rewards))
        episodes = episode_process(args)
        # Stored completions need the tools as well, because their schemas are a part of the prompts.
        if episodes is not None and (args.tools or not args.rollouts_from):
            on_first_rank(lambda: _enter(stack, episodes))
            # Only the first rank imports the user's file; all ranks tokenize the schemas.
            encoder = with_tools(encoder, on_first_rank(lambda: episodes.schemas))
        data = load_data(args, encoder, vocab_size, _offered(args))

        def check(samples: Sequence[Sample], flag: str) -> None:
            columns, omitted = columns_in(samples), omitted_in(samples)
            rewards.check_columns(columns, flag, omitted)
            if episodes is not None:
                episodes.check_columns(columns, flag, omitted)

        if not args.rollouts_from:
            on_first_rank(lambda: check(data.train, "--dataset"))
        if args.val_dataset and not args.rollouts_from:
            on_first_rank(lambda: check(data.val, "--val_dataset"))
    return data


def with_tools(encoder: Encoder, schemas: list[dict[str, Any]]) -> Encoder:
    """Return the encoder with the tools of all rows, after a check of the chat template.

    Raises:
        UserError: the template does not support tools or several answers.
    """
    given: Any = encoder
    # Only for its checks: a template without tools should end the run before the model is read.
    Turns(given.template, schemas, ())
    parse = given.parse
    if isinstance(parse, WithColumns):
        of_names: Any = parse.parse
        return replace(given, parse=replace(parse, parse=partial(of_names, tools=schemas)))
    return replace(given, parse=partial(parse, tools=schemas))


def episode_process(args: GrpoArgs) -> EpisodeProcess | None:
    """Return the process of the tools or the rollout function, which is not started; None without."""
    if not args.tools and not args.rollout_func:
        return None
    return EpisodeProcess(args.rollout_func, args.tools, args.external_plugins, args.tool_timeout)


def _enter(stack: ExitStack, process: RewardProcess | EpisodeProcess) -> None:
    """Start the process, without returning it, because results of the first rank are sent to all ranks."""
    stack.enter_context(process)


def open_rollouts(run: Run) -> TrainBatches:
    """Start the engine and the process of the reward functions on the first rank. Collective.

    Raises:
        UserError: the engine, the reward functions, the reference model or the teacher cannot be used.
    """
    args: Any = run.args
    assert isinstance(args, GrpoArgs)
    names = ("temperature", "max_completion_length", "num_generations")
    files = GenerationFiles(run, args, names, args.steps_per_generation * args.num_iterations, args.async_rollouts)
    with ExitStack() as stack:
        opened = _Opened(run, args, stack)
        if files.reads_only:
            # Rounded up: the last generation can be used for fewer steps.
            on_first_rank(lambda: check_stored(files, -(-run.schedule.steps // files.steps)))
        # On the first rank alone, which is the only one that draws; the others get completions as arrays.
        on_first_rank(lambda: opened.open())
        models = open_reward_models(run, args)
        if models and opened.drawing is not None:
            opened.drawing = with_models(opened.drawing, models, args)
        rollouts = Rollouts(
            run=run,
            weights=live_weights(run),
            drawing=opened.drawing,
            frozen=open_frozen_policies(run, args),
            reward_models=models,
            held_out=held_out_prompts(run, args),
            files=files,
            # From here on the run closes them; an error in the lines above closes them at once.
            resources=stack.pop_all(),
        )
    evaluate = rollouts.evaluate if rollouts.held_out else None
    reference = rollouts.frozen["reference"].chunks if args.sync_ref_model else ()
    return TrainBatches(
        rollouts.train,
        get_state=rollouts.state,
        sources_of=rollouts.sources_of,
        evaluate=evaluate,
        release=rollouts.close,
        table=rollouts.table,
        after_step=rollouts.follow,
        reference=reference,
    )


def with_models(drawing: Drawing, models: Sequence[RewardModel], args: GrpoArgs) -> Drawing:
    """Return the drawing, whose rewards are those of a process, with reward models on all ranks."""
    process = drawing.rewards
    assert isinstance(process, RewardProcess)
    rewards = RewardsWithModels(process, models, reward_names_of(args), len(args.reward_funcs))
    return replace(drawing, rewards=rewards)


def held_out_prompts(run: Run, args: GrpoArgs) -> HeldOutPrompts | None:
    """Return the prompts of evaluations; None if there are none, or no engine."""
    samples = run.data.val
    if args.eval_iters is not None:
        samples = samples[: args.eval_iters * args.global_batch_size]
    if args.rollouts_from or not samples:
        return None
    return HeldOutPrompts(samples, args.seed)


@dataclass
class _Opened:
    """Opens what the first rank needs to draw completions."""

    run: Run
    args: GrpoArgs
    stack: ExitStack
    drawing: Drawing | None = None

    def open(self) -> None:
        """Start the reward functions and the engine."""
        args = self.args
        if args.rollouts_from:
            return
        check_writable("--output_dir", self.run.output_dir / FOLDER)
        # Before the engine, so that an error in the user's file is shown in seconds.
        rewards = self.stack.enter_context(reward_process(args))
        episodes = episode_process(args)
        if episodes is not None:
            self.stack.enter_context(episodes)
        engine = start_rollout_engine(self.run, args)
        self.stack.callback(engine.close)
        advantages = AdvantageSettings(
            args.num_generations,
            args.advantage_estimator,
            args.scale_rewards or SCALES[args.advantage_estimator],
            tuple(args.reward_weights),
        )
        columns = columns_in([*self.run.data.train, *self.run.data.val])
        sampling, conversations = sampling_of(self.run, args), None
        if episodes is not None:
            run_templates_unbounded()  # the limit would apply to the whole trainer while it draws
            template = ChatTemplate(self.run.tokenizer, vocab_size=self.run.hf_model.config["vocab_size"])
            turns = Turns(template, episodes.schemas, sampling.stop_token_ids)
            conversations = Conversations(episodes, turns, args.max_turns)
        self.drawing = Drawing(engine, rewards, advantages, sampling, self.run.tokenizer, columns, conversations)


GRPO = Training(
    make_encoder=make_prompt_encoder,
    load=load_scored_prompts,
    prepare=check_tokenizer,
    make_objective=lambda run: PolicyObjective(run.plan.heads, run.args.mtp_loss_scaling_factor, policy_of(run.args)),
    open_batches=open_rollouts,
    extras=(ADVANTAGE, OLD, ENGINE, REFERENCE, TEACHER),
)
