"""Generate completions with an engine, and score them. This is the work of the first rank."""

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from swiftlite.acceptance.counts import DraftCounts
from swiftlite.base.errors import UserError
from swiftlite.base.log import logger
from swiftlite.data.rows.prompt import COLUMNS, OMITTED, TURNS
from swiftlite.data.sample import Sample
from swiftlite.engines.engine import Completion, Engine, Sampling
from swiftlite.engines.prompts import prompt_of
from swiftlite.rewards.advantages import Advantages, AdvantageSettings, compute_advantages
from swiftlite.rewards.process import RewardProcess
from swiftlite.rollouts.conversations import Conversations, Drawn, acceptance_figures
from swiftlite.rollouts.generation import Generation, image_files
from swiftlite.rollouts.reward_models import RewardsWithModels
from swiftlite.rollouts.servers import RolloutServers

SCORING = "scoring"
"""Name of the settings of a generation that scores depend on; it has none before it is scored."""


@dataclass(frozen=True)
class Drawing:
    """Draws and scores generations.

    Attributes:
        engine: engine with the current weights.
        rewards: the reward functions and models.
        advantages: how rewards become advantages.
        sampling: sampling settings without `numbers`.
        tokenizer: decodes completions for reward functions.
        columns: names of the columns that reward functions and the rollout function receive.
        conversations: continues completions with tools or a rollout function; None without.
    """

    engine: Engine
    rewards: RewardProcess | RewardsWithModels
    advantages: AdvantageSettings
    sampling: Sampling
    tokenizer: PreTrainedTokenizerBase
    columns: Sequence[str]
    conversations: Conversations | None = None

    def draw(self, prompts: Sequence[Sample], first_number: int, settings: Mapping[str, Any]) -> Generation:
        """Return completions of these prompts without scores.

        Args:
            prompts: one prompt per completion; those of a group are adjacent.
            first_number: number of the first completion in the run, from which its random numbers are derived.
            settings: settings that are stored with the completions.

        Raises:
            UserError: the engine fails, or all conversations failed three times in a row.
        """
        if self.conversations is None:
            generation = draw(self.engine, self.sampling, prompts, first_number, settings)
        else:
            columns = columns_of(prompts, self.columns)
            drawn = self.conversations.draw(self.engine, self.sampling, prompts, columns, first_number)
            generation = generation_of(self.engine, prompts, drawn, settings)
        return replace(generation, scores=np.full((len(prompts), len(self.rewards.names)), np.nan, np.float32))

    @property
    def settings(self) -> dict[str, Any]:
        """Everything that scores depend on, except the code that reward functions import."""
        settings = {"rewards": self.rewards.identity, "advantages": asdict(self.advantages)}
        return json.loads(json.dumps(settings))  # as stored: with lists instead of tuples

    def score(self, generation: Generation, prompts: Sequence[Sample], step: int) -> Generation:
        """Return the generation with scores, advantages and their metrics.

        Args:
            step: number of the optimizer step that follows, for reward functions.

        Raises:
            UserError: a reward function failed three times in a row.
        """
        if not self.rewards.names:
            return self.rated(generation, 0)
        scored = self.rewards.score(
            [json.loads(prompt.extras[TURNS]) for prompt in prompts],
            [str(self.tokenizer.decode(ids, skip_special_tokens=True)) for ids in generation.completions()],
            generation.generated(),
            columns_of(prompts, self.columns),
            step,
            [str(self.tokenizer.decode(prompt.input_ids)) for prompt in prompts],
        )
        for failure in scored.failures:
            logger.warning("step %d: %s; its completions are not scored by this function", step, failure)
        scores = np.array(scored.rewards, np.float32).T  # None becomes NaN
        generation = replace(generation, figures={**generation.figures, **scored.metrics})
        # Of conversations that failed: they are not trained on, but their scores would change their group's mean.
        scores[generation.generated_lengths == 0] = np.nan
        return self.rated(replace(generation, scores=scores), len(scored.failures))

    def rated(self, generation: Generation, num_failures: int) -> Generation:
        """Return the generation with the advantages and the metrics of its scores.

        Args:
            num_failures: number of failed calls of reward functions.
        """
        found = compute_advantages(generation.scores, self.advantages)
        # Rewards are finite, but their sum with large weights can overflow.
        if not np.isfinite(found.advantages).all():
            weights = " ".join(map(str, self.advantages.weights))
            raise UserError(f"--reward_weights {weights}: advantages are not finite", "use smaller weights")
        figures = reward_figures(found, self.rewards.names, num_failures)
        # `needs_scores` compares these with the settings of a resumed run.
        settings = {**generation.settings, "has_failures": bool(num_failures), SCORING: self.settings}
        return replace(
            generation,
            advantages=found.advantages,
            figures={**generation.figures, **figures},
            settings=settings,
        )

    def flat_groups(self, generation: Generation) -> np.ndarray:
        """Return the numbers of the groups in which all advantages are 0."""
        return np.flatnonzero(compute_advantages(generation.scores, self.advantages).is_flat)

    def needs_scores(self, generation: Generation) -> bool:
        """Return whether a stored generation must be scored again: a function failed, or the functions changed."""
        return generation.settings.get("has_failures", False) or generation.settings.get(SCORING) != self.settings


def draw(
    engine: Engine, sampling: Sampling, prompts: Sequence[Sample], first_number: int, settings: Mapping[str, Any]
) -> Generation:
    """Return completions of these prompts, of no reward function. The arguments are those of `Drawing.draw`.

    Raises:
        UserError: the engine fails.
    """
    numbers = tuple(range(first_number, first_number + len(prompts)))
    before = engine.draft_counts()
    # Without the time to read counters from servers.
    start = time.perf_counter()
    completions = engine.generate(list(map(prompt_of, prompts)), replace(sampling, numbers=numbers))
    seconds = time.perf_counter() - start
    drawn = Drawn(completions, engine.draft_counts().since(before), seconds)
    return generation_of(engine, prompts, drawn, settings)


def generation_of(engine: Engine, prompts: Sequence[Sample], drawn: Drawn, settings: Mapping[str, Any]) -> Generation:
    """Return the completions of these prompts as a generation, without scores."""
    completions = drawn.completions
    lengths = np.array([len(each.token_ids) for each in completions], np.int32)
    is_truncated = np.array([each.finish_reason == "length" for each in completions])
    # NaN is a value that a token does not have; the loss then takes the weight 1.
    unknown = np.full(lengths.sum(), np.nan, np.float32)
    is_generated = np.concatenate(drawn.is_generated) if drawn.is_generated else np.ones(len(unknown), bool)
    generation = Generation(
        prompt_ids=np.concatenate([prompt.input_ids for prompt in prompts]),
        prompt_lengths=np.array(list(map(len, prompts)), np.int32),
        completion_ids=np.concatenate([np.array(each.token_ids, np.int32) for each in completions]),
        completion_lengths=lengths,
        is_truncated=is_truncated,
        scores=np.zeros((len(prompts), 0), np.float32),
        advantages=np.zeros(len(prompts), np.float32),
        engine_log_p=np.where(is_generated, _engine_log_p(completions), unknown),
        old_log_p=unknown,
        reference_log_p=unknown,
        teacher_log_p=unknown,
        draft_depths=_draft_depths(completions, engine.num_speculative_tokens),
        is_generated=is_generated,
        settings=settings,
        images=image_files(prompts),
    )
    figures = {
        **completion_figures(generation.generated_lengths, is_truncated, drawn.counts),
        "rollout/tokens_per_second": float(generation.is_generated.sum() / drawn.seconds),
        **server_figures(engine),
        **drawn.figures,
    }
    return replace(generation, figures=figures)


def columns_of(prompts: Sequence[Sample], names: Sequence[str]) -> dict[str, list[Any]]:
    """Return fields of the rows by name, with one value per prompt; None where a row has no such field."""
    rows = [json.loads(prompt.extras[COLUMNS]) for prompt in prompts]
    return {name: [row.get(name) for row in rows] for name in names}


def columns_in(prompts: Sequence[Sample]) -> list[str]:
    """Return the names of the other fields that at least one of the rows has."""
    return sorted({name for prompt in prompts for name in json.loads(prompt.extras[COLUMNS])})


def omitted_in(prompts: Sequence[Sample]) -> dict[str, str]:
    """Return the names of fields that reward functions cannot receive, with the type of their values."""
    omitted: dict[str, str] = {}
    for prompt in prompts:
        omitted |= json.loads(prompt.extras[OMITTED])
    return omitted


def reward_figures(found: Advantages, names: Sequence[str], num_failures: int) -> dict[str, float]:
    """Return the metrics of rewards, with TRL's names. A mean over nothing is omitted."""
    if not names:
        return {}
    statistics = found.statistics
    figures = {
        "frac_reward_zero_std": statistics.frac_reward_zero_std,
        "rewards/failures": float(num_failures),
        "rewards/unscored": float(statistics.num_unscored),
    }
    num_completions = len(found.rewards)
    if statistics.num_unscored < num_completions:
        figures |= {"reward": statistics.mean, "reward_std": statistics.std}
    of_functions = (statistics.function_means, statistics.function_stds, statistics.function_unscored)
    for name, mean, std, unscored in zip(names, *of_functions, strict=True):
        if unscored < num_completions:
            figures |= {f"rewards/{name}/mean": mean, f"rewards/{name}/std": std}
    return figures


def completion_figures(lengths: np.ndarray, is_truncated: np.ndarray, counts: DraftCounts) -> dict[str, float]:
    """Return the metrics of completions, with TRL's names, and of drafts.

    Args:
        lengths: numbers of generated tokens.
    """
    figures = {"completions/clipped_ratio": float(np.mean(is_truncated))}
    # As in TRL: 0 if all are truncated, because a mean over nothing is not a number.
    terminated = lengths[~is_truncated] if not is_truncated.all() else np.zeros(1)
    for suffix, of in (("length", lengths), ("terminated_length", terminated)):
        figures[f"completions/mean_{suffix}"] = float(np.mean(of))
        figures[f"completions/min_{suffix}"] = float(np.min(of))
        figures[f"completions/max_{suffix}"] = float(np.max(of))
    return figures | acceptance_figures(counts)


def server_figures(engine: Engine) -> dict[str, float]:
    """Return the metrics of rollout servers; empty for an engine of this process."""
    return engine.figures() if isinstance(engine, RolloutServers) else {}


def _draft_depths(completions: Sequence[Completion], num_speculative_tokens: int) -> np.ndarray:
    """Return the `Generation.draft_depths` of all completions."""
    parts = []
    for completion in completions:
        depths = completion.draft_depths
        if depths is None:
            depths = [-1 if num_speculative_tokens else 0] * len(completion.token_ids)
        parts.append(np.array(depths, np.int8))
    return np.concatenate(parts)


def _engine_log_p(completions: Sequence[Completion]) -> np.ndarray:
    """Return the log-probabilities of the tokens of all completions; NaN where the engine reports none."""
    parts = []
    for completion in completions:
        log_p = np.full(len(completion.token_ids), np.nan, np.float32)
        if completion.log_p is not None:
            log_p = np.array(completion.log_p, np.float32)
            # As a number, it would make the importance weight of the token infinite.
            log_p[log_p < LEAST] = np.nan
        parts.append(log_p)
    return np.concatenate(parts)


LEAST = -9000.0
"""Engines report -9999 for a token without a log-probability."""
