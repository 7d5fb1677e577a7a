"""Held-out prompts of a run: what would be accepted of the drafts on them, before training and after it.

Measured on greedy continuations by the heads as they are now, and an engine's walk over them. Experts are shared by
data-parallel ranks, so all of them make the same number of passes, with nothing when their own prompts are done.
"""

import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist

from swiftlite.acceptance.counts import DraftCounts, walk
from swiftlite.acceptance.greedy import Chunks, GreedyRows, Row
from swiftlite.acceptance.report import add_run_acceptance
from swiftlite.log import logger
from swiftlite.runtime.mesh import Mesh

MAX_CACHED_TOKENS = 8192
"""Most tokens whose keys and values a rank keeps at once: rows that are continued together, or one that is longer."""
PROGRESS_SECONDS = 5
"""Time between two lines of progress."""
When = Literal["before", "after"]


@dataclass(frozen=True)
class HeldOut:
    """Prompts, how they are continued, and the file that takes the figures.

    Attributes:
        path: acceptance.json of the run.
        num_drafts: tokens that an engine would draft in each step; 0 measures nothing.
        prompts: token ids; none measures nothing.
        max_length: longest row, the model's own limit.
    """

    path: Path
    mesh: Mesh
    num_drafts: int
    prompts: Sequence[Sequence[int]]
    eos_token_ids: Collection[int | None]
    max_new_tokens: int
    max_length: int

    def measure(self, when: When, model: Chunks, evaluation: Mapping[str, float]) -> None:
        """Add the figures of `when` to the file; collective.

        Args:
            model: in evaluation mode.
            evaluation: its metrics over the held-out rows.
        """
        if not (self.num_drafts and self.prompts):
            return
        counts = self._count(when, model)
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

    @torch.no_grad()
    def _count(self, when: When, model: Chunks) -> DraftCounts:
        """What an engine that drafts `num_drafts` tokens per step would count on the prompts.

        They are spread over data- and context-parallel ranks and the counts summed.
        """
        ranks = self.mesh.dp_cp
        counts = DraftCounts(0, 0, (0,) * self.num_drafts)
        progress = _Progress(when, len(self.prompts))
        for prompts in self._batches():
            mine = prompts[ranks.rank() :: ranks.size()]
            rows = [Row.of(prompt, self.max_new_tokens, self.max_length) for prompt in mine]
            batch = GreedyRows(model, self.mesh, rows, self.eos_token_ids)
            unfinished, new_tokens = self._sum(batch.num_unfinished, 0)
            while unfinished:
                batch.step()
                unfinished, new_tokens = self._sum(batch.num_unfinished, batch.num_new_tokens)
                progress.show(len(prompts) - unfinished, new_tokens)
            progress.add(len(prompts), new_tokens)
            if not new_tokens:  # prompts that fill the longest row
                continue
            for row, drafts_KS in batch.drafts(self.num_drafts):
                # As if the row began with the last token of the prompt: no draft is made before.
                counts += walk(drafts_KS, torch.tensor(row.tokens[row.first - 1 :]), 1)
        drafts, drafted, *accepted = self._sum(counts.drafts, counts.drafted, *counts.accepted_per_position)
        return DraftCounts(drafts, drafted, tuple(accepted))

    def _batches(self) -> Iterator[Sequence[Sequence[int]]]:
        """The prompts that all ranks continue together, the longest first."""
        prompts = sorted(self.prompts, key=len, reverse=True)
        while prompts:
            longest = min(len(prompts[0]) + self.max_new_tokens, self.max_length)
            num_rows = max(MAX_CACHED_TOKENS // longest, 1) * self.mesh.dp_cp.size()
            yield prompts[:num_rows]
            prompts = prompts[num_rows:]

    def _sum(self, *numbers: int) -> list[int]:
        """Over the ranks that have prompts of their own."""
        sums = torch.tensor(numbers, device=self.mesh.device.torch_device)
        dist.all_reduce(sums, group=self.mesh.dp_cp)
        return sums.tolist()


class _Progress:
    """A line at the beginning, and one whenever some time has passed."""

    def __init__(self, when: When, num_prompts: int):
        self.when = when
        self.num_prompts = num_prompts
        self.num_done = 0
        self.num_tokens = 0
        self.begun = self.shown = time.perf_counter()
        self._log(0, 0.0)

    def show(self, num_done: int, num_tokens: int) -> None:
        """Prompts and new tokens of the present batch."""
        now = time.perf_counter()
        if now - self.shown >= PROGRESS_SECONDS:
            self.shown = now
            self._log(self.num_done + num_done, (self.num_tokens + num_tokens) / (now - self.begun))

    def add(self, num_done: int, num_tokens: int) -> None:
        """Those of a batch that is finished."""
        self.num_done += num_done
        self.num_tokens += num_tokens

    def _log(self, num_done: int, speed: float) -> None:
        if not dist.get_rank():
            prompts = f"{num_done} of {self.num_prompts} held-out prompts continued"
            logger.info("acceptance %s training: %s, %.0f tokens/s", self.when, prompts, speed)
