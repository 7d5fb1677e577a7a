"""Return the micro-batches of `megatron grpo`: generations of completions, drawn or read, cut into optimizer steps.

Before a generation, all ranks send their weights to the engine of the first rank. The first rank draws completions and
scores them, all ranks compute their log-probabilities, and the first rank writes the generation to
`OUTPUT_DIR/rollouts`. A generation that is already there, because the run was stopped after it was drawn, is read.
Completions of held-out prompts are drawn in the same way, and only their metrics are kept.

With `--async_rollouts 1`, the next generation is drawn while the trainer trains, with the weights before this training:

    train on generation              0    1    2    3
    in parallel, draw generation     1    2    3    4

So generation 2 has the policy that was trained on generation 0, and the importance weights of the loss correct for the
difference. A checkpoint is written after the generation that is being drawn, so that a resumed run trains on the same
completions.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np

from swiftlite.args.commands import GrpoArgs
from swiftlite.base.errors import UserError
from swiftlite.base.log import logger
from swiftlite.data.packing.sampler import Sampler
from swiftlite.data.sample import Sample
from swiftlite.methods.reward_names import reward_names_of
from swiftlite.rollouts.ahead import DrawingAhead
from swiftlite.rollouts.draw import SCORING, Drawing
from swiftlite.rollouts.engine import drafts, rest, send_weights
from swiftlite.rollouts.frozen import FrozenPolicy
from swiftlite.rollouts.generation import Generation
from swiftlite.rollouts.held_out import HeldOutPrompts, evaluation_figures
from swiftlite.rollouts.log_probabilities import token_log_probabilities
from swiftlite.rollouts.policy_identity import NAME
from swiftlite.rollouts.prompts import Prompts
from swiftlite.rollouts.resample import Resampling
from swiftlite.rollouts.reward_models import RewardModel, all_scores
from swiftlite.rollouts.stored import GenerationFiles, on_first_rank
from swiftlite.train.batches.micro_batches import MicroBatches
from swiftlite.train.live_weights import LiveWeights
from swiftlite.train.metrics.trackers import Table
from swiftlite.train.phases import Run
from swiftlite.train.stopping import EarlyStop
from swiftlite.train.trainer import whole_parameters


@dataclass(frozen=True)
class RolloutBatches(MicroBatches):
    """The micro-batches of a step, with the metrics of the generation that they belong to."""

    figures: Mapping[str, float] = field(default_factory=dict)


@dataclass
class Rollouts:
    """The completions of a run.

    Attributes:
        weights: the current weights of the run.
        drawing: draws completions on the first rank; None on other ranks, and if all generations are read.
        frozen: the frozen models of the loss by name, see `open_frozen_policies`.
        reward_models: the reward models on the ranks of the run.
        held_out: prompts of evaluations; None without evaluations.
        files: the stored generations.
    """

    run: Run
    weights: LiveWeights
    drawing: Drawing | None
    frozen: Mapping[str, FrozenPolicy]
    reward_models: Sequence[RewardModel]
    held_out: HeldOutPrompts | None
    files: GenerationFiles
    resources: ExitStack = field(default_factory=ExitStack)

    def __post_init__(self) -> None:
        self._ahead = DrawingAhead()
        self._number = -1
        self._generation: Generation | None = None
        self._samples: list[Sample] = []

    @property
    def args(self) -> GrpoArgs:
        assert isinstance(self.run.args, GrpoArgs)
        return self.run.args

    @cached_property
    def prompts(self) -> Prompts:
        """The prompts of all generations."""
        args, samples = self.args, self.run.data.train
        number = args.global_batch_size * args.steps_per_generation // args.num_generations
        return Prompts(samples, args.num_generations, Sampler(len(samples), number, args.seed, args.dataset_shuffle))

    def train(self, step: int) -> RolloutBatches:
        """Return this rank's micro-batches of a step (counted from 0). Collective.

        Raises:
            UserError: the engine or a reward function fails, or a stored generation cannot be used; raised on every
                rank.
        """
        args = self.args
        number, within = divmod(step, self.files.steps)
        # Once per generation; a resumed run can begin in the middle of one.
        if number != self._number:
            self._generation = self._open(number, step)
            self._samples = self._samples_of(number, self._generation)
            if args.overlong_filter:
                self._samples = self._generation.without_truncated(self._samples)
            self._number = number
        assert self._generation is not None
        part = within % args.steps_per_generation  # the parts are used again in each iteration
        first = part * args.global_batch_size
        # Every rank has the whole generation, so that batches divide it like the rows of a dataset, in any layout.
        rows = self.run.batches.rows(self._samples[first : first + args.global_batch_size])
        batches = self.run.batches.global_batch(rows, np.arange(len(rows)))
        return RolloutBatches(batches.batches, batches.companions, self._generation.figures)

    def sources_of(self, step: int) -> list[str]:
        """Return the rows of the prompts of the step (counted from 0) that `train` was called for last, each once."""
        assert self._generation is not None
        args = self.args
        first = step % args.steps_per_generation * args.global_batch_size
        prompts = self._prompts_of(self._number, self._generation)[first : first + args.global_batch_size]
        return list(dict.fromkeys(prompt.source for prompt in prompts))

    def table(self, step: int) -> Table | None:
        """Return the completions of a generation at its first step (counted from 0); None at other steps, and without
        --log_completions.
        """
        args, generation = self.args, self._generation
        if not args.log_completions or generation is None or step % self.files.steps:
            return None
        decode, num_scores = self.run.tokenizer.decode, generation.scores.shape[1]
        names = reward_names_of(args)
        if len(names) != num_scores:  # stored rollouts of another run
            names = [f"reward {number}" for number in range(1, num_scores + 1)]
        rows = []
        for number, (prompt, completion) in enumerate(zip(generation.prompts(), generation.completions(), strict=True)):
            scores = map(float, generation.scores[number])
            rows.append([decode(prompt), decode(completion), *scores, float(generation.advantages[number])])
        return Table("completions", ["prompt", "completion", *names, "advantage"], rows)

    def evaluate(self, step: int) -> dict[str, float]:
        """Return metrics of completions of the held-out prompts, named `eval_...`, under the current weights; empty
        without evaluations. Collective.

        Args:
            step: number of completed steps.

        Raises:
            UserError: the engine or a reward function fails; raised on every rank.
            Stopped: the run received a signal; raised on every rank.
        """
        held_out = self.held_out
        if held_out is None:
            return {}
        with EarlyStop() as stop:
            # New weights would change the policy in the middle of the generation that is drawn ahead.
            on_first_rank(lambda: self._wait(stop))
            self._send_weights(stop)

            def draw() -> Generation:
                assert self.drawing is not None
                with stop.raising():
                    drawn = held_out.draw(self.drawing, step)
                    rest(self.drawing.engine)
                return drawn

            generation = self._scoring(draw)
        figures = evaluation_figures(generation)
        if teacher := self.frozen.get("teacher"):
            log_p = generation.per_token(teacher.log_probabilities(generation.samples(held_out.samples)))
            differences = generation.engine_log_p - log_p
            # NaN at tokens that the model did not generate, and where the engine reports no probability.
            figures["teacher_kl"] = float(np.mean(differences[~np.isnan(differences)]))
        return {f"eval_{name}": value for name, value in figures.items()}

    def state(self) -> dict[str, Any]:
        """Write the generation that is being drawn, before a checkpoint is written. Collective."""
        self._scoring(self._keep_ahead)
        return {}

    def follow(self, step: int) -> None:
        """Move the reference model towards the policy, at the steps of --sync_ref_model; collective.

        Args:
            step: number of completed steps.
        """
        args = self.args
        if args.sync_ref_model and step % args.ref_model_sync_steps == 0:
            state = self.run.train_state
            with whole_parameters(state.wrapped):
                self.frozen["reference"].mix(state.chunks, args.ref_model_mixup_alpha)

    def close(self) -> None:
        """End the engine and the process of the reward functions."""
        self.resources.close()

    def _open(self, number: int, step: int) -> Generation:
        """Return a generation; the weights are those before `step`. Collective."""
        with EarlyStop() as stop:
            found = self._scoring(lambda: self._find(number, step, stop))
            if found is None:
                self._send_weights(stop)
                found = self._scoring(lambda: self._draw_now(number, step, stop)), True
            generation, is_new = found
            if self.files.lag and not self.files.reads_only:
                self._begin_ahead(number + 1, stop)
        if is_new or (self._is_used_again and np.isnan(generation.old_log_p[generation.is_generated]).any()):
            # The weights that drew it are still the current ones. If it was drawn ahead, the current weights are the
            # policy at its first step, and the engine's probabilities are those of the policy that drew it.
            generation = self._with_log_probabilities(number, generation)
        else:
            generation = self._with_frozen(number, generation)
        # One that was drawn ahead and read again gets its log-probabilities now. Between two steps on it, a further
        # resumed run could not compute those of its policy.
        if is_new or (generation is not found[0] and not self.files.reads_only):
            on_first_rank(lambda: self.files.write_drawn(number, generation))
        return generation

    def _scoring(self, function: Callable[[], Any]) -> Any:
        """Return the result of `on_first_rank` for a function that scores completions."""
        return on_first_rank(function, partial(all_scores, self.reward_models))

    def _find(self, number: int, step: int, stop: EarlyStop) -> tuple[Generation, bool] | None:
        """Return a generation that was drawn ahead or stored, and whether it is new; None if it must be drawn."""
        with stop.raising():
            self._score_ahead()
            generation = self._ahead.take(number)
        if generation is not None:
            return generation, True
        stored = self._read(number, step)
        return None if stored is None else (stored, False)

    def _draw_now(self, number: int, step: int, stop: EarlyStop) -> Generation:
        assert self.drawing is not None
        with stop.raising():
            drawn = self._scored(number, step, self._draw(number, step, self._policy(number)))
            rest(self.drawing.engine)
        return drawn

    def _begin_ahead(self, number: int, stop: EarlyStop) -> None:
        """Send the weights, and begin to draw a generation, unless it is stored. Collective."""
        step = number * self.files.steps
        # One rank decides for all: sending is collective, and file systems can show a new file at different times.
        if step >= self.run.schedule.steps or on_first_rank(lambda: self.files.file(number).exists()):
            return
        self._send_weights(stop)
        if self.drawing is not None:
            policy = self._policy(number)

            def draw() -> Generation:
                drawn = self._draw(number, step, policy)
                # Reward models on all ranks score it when the trainer has ended its steps.
                return drawn if self.reward_models else self._scored(number, step, drawn)

            self._ahead.begin(number, draw)

    def _wait(self, stop: EarlyStop) -> None:
        with stop.raising():
            self._ahead.wait()

    def _keep_ahead(self) -> None:
        if drawn := self._score_ahead():
            self.files.write_drawn(*drawn)

    def _score_ahead(self) -> tuple[int, Generation] | None:
        """Wait for the generation that is drawn, and return its number and the generation, with scores."""
        drawn = self._ahead.wait()
        if drawn is None:
            return None
        number, generation = drawn
        # With reward models on all ranks, the thread that draws cannot score: the ranks are in their training steps.
        scored = self._scored(number, number * self.files.steps, generation)
        # Kept until `take`: `state` scores and writes it before a checkpoint, when no step needs it yet.
        self._ahead.keep(number, scored)
        return number, scored

    def _send_weights(self, stop: EarlyStop) -> None:
        engine = self.drawing.engine if self.drawing else None
        send_weights(self.weights, engine, stop, draft=drafts(self.run, self.args))

    def _prompts_of(self, number: int, generation: Generation) -> list[Sample]:
        """Return the prompt of each completion of a generation."""
        return self.prompts.of(self.prompts.stored_rows(number, generation.settings.get("rows")))

    def _samples_of(self, number: int, generation: Generation) -> list[Sample]:
        """Return the completions of a generation as samples, with the images of their prompts."""
        return generation.samples(self._prompts_of(number, generation))

    def _policy(self, number: int) -> dict[str, str]:
        """Return the identity of the policy that draws a generation. This is the work of the first rank."""
        before = number - 1 - self.files.lag  # the last one that the weights were trained on
        previous = self._generation
        if self._number != before:  # the first generation that a resumed run needs
            previous = self.files.load_if_whole(before)
        policy = self.files.policy_after(previous)
        if self.drawing is not None and self.drawing.conversations is not None:
            policy["the files of tools or the rollout function"] = self.drawing.conversations.process.identity
        return policy

    def _draw(self, number: int, step: int, policy: dict[str, str]) -> Generation:
        """Return a generation, with scores if they decide what is drawn. This is the work of the first rank.

        Args:
            policy: identity of the policy that draws it.
        """
        assert self.drawing is not None
        args, settings = self.args, {**self.files.settings, NAME: policy}
        if args.dynamic_sample:
            resampling = Resampling(self.drawing, self.prompts, args.max_resample_times)
            generation = resampling.draw(number, step + 1, settings)
            warn_of_equal_rewards(generation, step)
            return generation
        prompts = self.prompts.of(self.prompts.rows(number))
        return self.drawing.draw(prompts, number * len(prompts), settings)

    def _scored(self, number: int, step: int, generation: Generation) -> Generation:
        """Return a new generation with scores, which it may have. This is the work of the first rank."""
        assert self.drawing is not None
        if SCORING in generation.settings:
            return generation
        generation = self.drawing.score(generation, self._prompts_of(number, generation), step + 1)
        warn_of_equal_rewards(generation, step)
        return generation

    def _with_log_probabilities(self, number: int, generation: Generation) -> Generation:
        """Add the log-probabilities that the loss needs and that are not those of the current weights. Collective."""
        run = self.run
        if self._is_used_again:
            model = run.train_state.wrapped
            with whole_parameters(model):
                samples = self._samples_of(number, generation)
                log_p = token_log_probabilities(model, run.mesh, run.batches, samples)
            generation = replace(generation, old_log_p=generation.per_token(np.concatenate(log_p)))
        return self._with_frozen(number, generation)

    def _with_frozen(self, number: int, generation: Generation) -> Generation:
        """Add the log-probabilities under the frozen models, unless the generation has them. Collective."""
        for name, policy in self.frozen.items():
            identity, is_moved = policy.name, False
            if name == "reference" and self.args.sync_ref_model:
                # Named with the number of moves: the reference model of a later generation is another one.
                times = number * self.files.steps // self.args.ref_model_sync_steps
                identity, is_moved = f"{identity}, moved {times} times", times > 0
            is_of_another_run = self.files.reads_only and is_moved  # whose reference model followed another policy
            if generation.settings.get(name) != identity or is_of_another_run:
                log_p = generation.per_token(policy.log_probabilities(self._samples_of(number, generation)))
                changed: dict[str, Any] = {f"{name}_log_p": log_p}
                generation = replace(generation, **changed, settings={**generation.settings, name: identity})
        return generation

    @property
    def _is_used_again(self) -> bool:
        """Whether a generation is used for several steps, so that the policy changes in between."""
        return self.files.steps > 1

    def _read(self, number: int, step: int) -> Generation | None:
        """Return a stored generation, with scores by the reward functions of this run; None if it must be drawn.

        Raises:
            UserError: the file is damaged, or belongs to other prompts or options.
        """
        # Within a generation, the weights are no longer those that drew it. It was drawn by this run before the
        # checkpoint, and has the log-probabilities of its policy.
        is_first_step = step % self.files.steps == 0
        generation = self.files.read(number, partial(self._policy, number) if is_first_step else None)
        if generation is None:
            return None
        prompts, path = self._prompts_of(number, generation), self.files.file(number)
        self.files.check(number, generation, prompts)
        if self.files.reads_only:
            return with_policy_of_engine(generation, path)
        assert self.drawing is not None
        if self.drawing.needs_scores(generation):
            logger.info("%s is scored again: a reward function failed or was changed", path)
            generation = self.drawing.score(generation, prompts, step + 1)
            self.files.write(number, generation)
        return generation


def warn_of_equal_rewards(generation: Generation, step: int) -> None:
    """Log a warning if no completion of a new generation has an advantage.

    Args:
        step: its first step, counted from 0.
    """
    if generation.figures.get("frac_reward_zero_std") == 1:
        logger.warning("step %d: rewards do not differ within any group, so all advantages are 0", step + 1)


def with_policy_of_engine(generation: Generation, path: Path) -> Generation:
    """Return the completions of another run with the log-probabilities of the policy that generated them.

    Those of the engine are used if the run did not compute its own. The policy of this run is another one, as soon as
    an option differs.

    Raises:
        UserError: the completions have neither.
    """
    old_log_p = np.where(np.isnan(generation.old_log_p), generation.engine_log_p, generation.old_log_p)
    if np.isnan(old_log_p[generation.is_generated]).any():
        raise UserError(f"{path} has no log-probabilities of its policy", "use the completions of another run")
    return replace(generation, old_log_p=old_log_p)
