"""Held-out prompts of a run: what would be accepted of the drafts on them, before training and after it.

Measured on greedy continuations by the heads as they are now, and an engine's walk over them. Every rank of a layout
takes part in every forward pass: experts are shared by data-parallel ranks, so all of them make the same number of
passes, with a row of nothing when their own prompts are done.

Shapes: K the trunk and each MTP depth, B batch, S sequence.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist

from swiftlite.acceptance.counts import DraftCounts, walk
from swiftlite.acceptance.report import add_run_acceptance
from swiftlite.data.batch import ahead
from swiftlite.log import logger
from swiftlite.model.context_parallel import shard_sequence
from swiftlite.model.gpt import Logits
from swiftlite.model.loss import vocab_parallel_argmax
from swiftlite.model.pipeline import run_pipeline
from swiftlite.model.ranks import from_last_stage, largest, whole_rows
from swiftlite.plan.layout import length_multiple
from swiftlite.runtime.mesh import Mesh

NO_ROW = [0]
"""What a rank computes when it has nothing of its own left."""
Chunks = Sequence[torch.nn.Module]
"""The chunks of a model on this rank, wrapped or bare."""


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

    def measure(self, when: Literal["before", "after"], model: Chunks, evaluation: Mapping[str, float]) -> None:
        """Add the figures of `when` to the file; collective.

        Args:
            model: in evaluation mode.
            evaluation: its metrics over the held-out rows.
        """
        if not (self.num_drafts and self.prompts):
            return
        counts = self._count(model)
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
    def _count(self, model: Chunks) -> DraftCounts:
        """What an engine that drafts `num_drafts` tokens per step would count on the prompts.

        They are spread over data-parallel ranks and the counts summed.
        """
        mesh = self.mesh
        counts = DraftCounts(0, 0, (0,) * self.num_drafts)
        at_once = self.batch_size * mesh.dp.size()
        for start in range(0, len(self.prompts), at_once):
            mine = self.prompts[start : start + at_once][mesh.dp.rank() :: mesh.dp.size()]
            rows = self._continue(model, mine)
            drafts = predict(model, [tokens for tokens, _ in rows] or [NO_ROW], mesh, self.num_drafts)[1:]
            for index, (tokens, first) in enumerate(rows):
                counts += walk(drafts[:, index, : len(tokens)], torch.tensor(tokens), first)
        numbers = [counts.drafts, counts.drafted, *counts.accepted_per_position]
        sums = torch.tensor(numbers, device=mesh.device.torch_device)
        dist.all_reduce(sums, group=mesh.dp)
        drafts, drafted, *accepted = sums.tolist()
        return DraftCounts(drafts, drafted, tuple(accepted))

    def _continue(self, model: Chunks, prompts: Sequence[Sequence[int]]) -> list[tuple[list[int], int]]:
        """Each prompt with its greedy continuation, and where that begins.

        Every new token costs a pass over the whole batch: the trainer has no key-value cache, and needs none for a few
        dozen tokens of a few prompts.
        """
        rows = [(list(prompt), len(prompt)) for prompt in prompts]
        unfinished = [tokens for tokens, _ in rows if len(tokens) < self.max_length]
        for _ in range(self.max_new_tokens):
            if not largest(bool(unfinished), self.mesh, self.mesh.dp):
                break
            predictions_KBS = predict(model, unfinished or [NO_ROW], self.mesh, self.num_drafts)
            for index, tokens in enumerate(unfinished):
                tokens.append(int(predictions_KBS[0, index, len(tokens) - 1]))
            goes_on = [row for row in unfinished if row[-1] not in self.eos_token_ids]
            unfinished = [row for row in goes_on if len(row) < self.max_length]
        return rows


def predict(model: Chunks, rows: Sequence[Sequence[int]], mesh: Mesh, num_drafts: int) -> torch.Tensor:
    """The most likely token of the trunk and of each depth at every position, int64 [K, B, S], on every rank."""
    tokens_BS, position_ids_BS = pad(rows, length_multiple(mesh.layout))
    # A head's input at the end of a row, beyond what is known, is never looked at: no rule needed for it there.
    tokens_KBS = ahead(tokens_BS, num_drafts, fill=0)

    def here(tensor: torch.Tensor) -> torch.Tensor:
        return shard_sequence(tensor, -1, mesh.cp.rank(), mesh.cp.size()).to(mesh.device.torch_device)

    def most_likely(logits_BSV: torch.Tensor) -> torch.Tensor:
        token_N = vocab_parallel_argmax(logits_BSV.flatten(0, 1), mesh.tp)
        return whole_rows(token_N.view(logits_BSV.shape[:2]), mesh)

    input_ids_BS, *mtp_input_ids = here(tokens_KBS)
    positions_BS = here(position_ids_BS)

    def forward_step(_, chunk: torch.nn.Module):
        output = chunk(input_ids_BS, positions_BS, mtp_input_ids=mtp_input_ids)
        if isinstance(output, Logits):  # the last stage; others hand on their states
            output = torch.stack([most_likely(logits_BSV) for logits_BSV in (output.main, *output.mtp)])
        return output, lambda predictions_KBS, non_loss_data: predictions_KBS

    result = run_pipeline(
        model,
        mesh,
        forward_step,
        [iter(()) for _ in model],
        num_micro_batches=1 if len(model) == 1 else mesh.pp.size(),
        micro_batch_size=len(rows),
        length=input_ids_BS.size(1),
        forward_only=True,
        collect_non_loss_data=True,
    )
    predictions_KBS = result[0] if result else torch.empty_like(tokens_KBS, device=mesh.device.torch_device)
    return from_last_stage(predictions_KBS, mesh).cpu()


def pad(rows: Sequence[Sequence[int]], multiple: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Token and position ids [B, S], rows padded at the end with token 0, S a multiple."""
    longest = -(-max(len(row) for row in rows) // multiple) * multiple
    tokens_BS = torch.zeros(len(rows), longest, dtype=torch.int64)
    for index, row in enumerate(rows):
        tokens_BS[index, : len(row)] = torch.tensor(row)
    return tokens_BS, torch.arange(longest).repeat(len(rows), 1)
