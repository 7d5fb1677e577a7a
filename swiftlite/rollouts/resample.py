"""Draw a generation for `--dynamic_sample`: groups whose rewards do not differ are replaced, because their advantages
are 0 (DAPO).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from swiftlite.rollouts.draw import Drawing, completion_figures, server_figures
from swiftlite.rollouts.generation import Generation, selected
from swiftlite.rollouts.prompts import Prompts


@dataclass(frozen=True)
class Resampling:
    """Draws generations in several rounds.

    Attributes:
        max_times: maximum number of rounds after the first, each with as many further prompts as there are groups
            without a difference.
    """

    drawing: Drawing
    prompts: Prompts
    max_times: int

    def draw(self, number: int, step: int, settings: Mapping[str, Any]) -> Generation:
        """Return a generation with scores. Its settings have the row of each group.

        Groups without a difference that are left after the last round stay in the generation.

        Args:
            number: number of the generation in the run.
            step: number of the optimizer step that follows.

        Raises:
            UserError: the engine fails, or a reward function failed three times in a row.
        """
        engine, size = self.drawing.engine, self.prompts.num_generations
        before = engine.draft_counts()
        rows = self.prompts.rows(number)
        others = self.prompts.further_rows(number)
        # Completions of all rounds and generations have different numbers, from which their random numbers follow.
        first = number * len(rows) * size * (1 + self.max_times)
        rounds = [self._round(rows, first, step, settings)]
        generation, num_replaced = rounds[0], 0
        for time in range(1, 1 + self.max_times):
            flat = self.drawing.flat_groups(generation)[: len(others)]
            # If a function failed, the rewards of a group may be equal for this reason alone.
            if not len(flat) or generation.settings["has_failures"]:
                break
            tried, others = others[: len(flat)], others[len(flat) :]
            further = self._round(tried, first + time * len(rows) * size, step, settings)
            rounds.append(further)
            groups = replaced(len(rows), flat, len(tried), self.drawing.flat_groups(further))
            num_replaced += int((groups >= len(rows)).sum())
            rows = np.concatenate([rows, tried])[groups]
            completions = groups[:, None] * size + np.arange(size)
            generation = selected([generation, further], completions.flatten())
            # They say whether a function failed in the last round.
            generation = replace(generation, settings=further.settings)
        num_failures = sum(each.figures["rewards/failures"] for each in rounds)
        generation = self.drawing.rated(generation, int(num_failures))
        answered = [each for each in rounds if each.is_generated.any()]  # the others have a speed of 0
        seconds = sum(each.is_generated.sum() / each.figures["rollout/tokens_per_second"] for each in answered)
        num_tokens = sum(each.is_generated.sum() for each in answered)
        figures = {
            **generation.figures,
            **_of_conversations(rounds),
            **completion_figures(
                generation.generated_lengths, generation.is_truncated, engine.draft_counts().since(before)
            ),
            "rollout/tokens_per_second": num_tokens / seconds if answered else 0.0,
            **server_figures(engine),
            "rollout/replaced_groups": float(num_replaced),
            "rollout/further_prompts": float(sum(len(each) for each in rounds[1:]) // size),
        }
        return replace(generation, figures=figures, settings={**generation.settings, "rows": rows.tolist()})

    def _round(self, rows: np.ndarray, first: int, step: int, settings: Mapping[str, Any]) -> Generation:
        prompts = self.prompts.of(rows)
        return self.drawing.score(self.drawing.draw(prompts, first, settings), prompts, step)


def _of_conversations(rounds: Sequence[Generation]) -> dict[str, float]:
    """Return the metrics of tools and turns over all rounds; empty without tools and rollout functions."""
    figures = {}
    numbers = [len(each) for each in rounds]
    for name in rounds[0].figures:
        if name == "rollout/turns" or name.startswith("tools/") or name.endswith("_after_tool"):
            figures[name] = float(np.average([each.figures.get(name, 0.0) for each in rounds], weights=numbers))
    if "rollout/failures" in rounds[0].figures:
        figures["rollout/failures"] = sum(each.figures["rollout/failures"] for each in rounds)
    return figures


def replaced(number: int, flat: np.ndarray, number_of_further: int, flat_of_further: np.ndarray) -> np.ndarray:
    """Return the groups of a generation after some of them were replaced.

    Groups are numbered through the generation and then through the further groups. Example: of 3 groups, 0 and 2 are
    flat, and of 2 further groups (3 and 4), the first is flat as well. The result is 4, 1, 2.

    Args:
        number: number of groups of the generation.
        flat: those without a difference.
        number_of_further: number of groups that can replace them.
        flat_of_further: those of the further groups without a difference, counted from 0.
    """
    # Further groups that are flat as well would replace nothing.
    useful = np.setdiff1d(np.arange(number_of_further), flat_of_further)
    groups = np.arange(number)
    groups[flat[: len(useful)]] = number + useful
    return groups
