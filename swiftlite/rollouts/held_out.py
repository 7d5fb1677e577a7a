"""Generate and score completions of held-out prompts, for evaluations during training."""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

from swiftlite.data.sample import Sample
from swiftlite.rewards.advantages import AdvantageSettings
from swiftlite.rollouts.draw import Drawing
from swiftlite.rollouts.generation import Generation

FIGURES = ("reward", "completions/", "rollout/acceptance_", "tools/")
"""Starts of the names of the metrics of an evaluation."""


@dataclass(frozen=True)
class HeldOutPrompts:
    """Prompts that are not trained on.

    Attributes:
        samples: the prompts. One completion is generated for each.
        seed: seed of the run.
    """

    samples: Sequence[Sample]
    seed: int

    def draw(self, drawing: Drawing, step: int) -> Generation:
        """Return completions with scores. This is the work of the first rank.

        The random numbers depend only on the seed and the step. Training draws with other ones, so that its completions
        do not depend on evaluations.

        Args:
            drawing: draws the completions of training.
            step: number of completed steps.

        Raises:
            UserError: the engine fails, or a reward function failed three times in a row.
        """
        # Not Python's hash, which differs between processes: a resumed run draws the same completions.
        seed = zlib.crc32(f"{self.seed}/evaluation/{step}".encode())
        single = AdvantageSettings(1, weights=drawing.advantages.weights)  # rewards are not compared
        drawing = replace(drawing, sampling=replace(drawing.sampling, seed=seed), advantages=single)
        return drawing.score(drawing.draw(self.samples, 0, {}), self.samples, step)


def evaluation_figures(generation: Generation) -> dict[str, float]:
    """Return the metrics of an evaluation."""
    return {name: value for name, value in generation.figures.items() if name.startswith(FIGURES)}
