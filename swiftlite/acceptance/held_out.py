"""Held-out prompts of a run: what would be accepted of the drafts on them, before training and after it."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist

from swiftlite.acceptance.generated import measure_acceptance
from swiftlite.acceptance.report import add_run_acceptance
from swiftlite.log import logger
from swiftlite.runtime.mesh import Mesh


@dataclass(frozen=True)
class HeldOut:
    """Prompts, how they are continued, and the file that takes the figures.

    Attributes:
        path: acceptance.json of the run.
        num_drafts: tokens that an engine would draft in each step; 0 measures nothing.
        prompts: token ids; none measures nothing.
        max_length: longest row, the model's own limit.
        batch_size: prompts that each data-parallel rank continues at once.
    """

    path: Path
    mesh: Mesh
    num_drafts: int
    prompts: Sequence[Sequence[int]]
    eos_token_ids: Collection[int | None]
    max_new_tokens: int
    max_length: int
    batch_size: int

    def measure(
        self, when: Literal["before", "after"], model: Sequence[torch.nn.Module], evaluation: Mapping[str, float]
    ) -> None:
        """Add the figures of `when` to the file; collective.

        Args:
            model: the chunks of this rank, in evaluation mode.
            evaluation: its metrics over the held-out rows.
        """
        if not (self.num_drafts and self.prompts):
            return
        counts = measure_acceptance(
            model,
            self.prompts,
            mesh=self.mesh,
            num_drafts=self.num_drafts,
            eos_token_ids=self.eos_token_ids,
            max_new_tokens=self.max_new_tokens,
            max_length=self.max_length,
            batch_size=self.batch_size,
        )
        if dist.get_rank():
            return
        per_depth = [evaluation[f"eval_mtp_{depth}_acceptance"] for depth in range(1, self.num_drafts + 1)]
        add_run_acceptance(self.path, when, per_depth, len(self.prompts), counts)
        logger.info(
            "acceptance %s training: %d of %d drafted tokens on %d held-out prompts (%.1f %%)",
            when,
            counts.accepted,
            counts.drafted,
            len(self.prompts),
            100 * counts.accepted / max(counts.drafted, 1),
        )
