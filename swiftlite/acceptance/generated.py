"""Acceptance of the MTP heads as they are now: greedy continuations of held-out prompts, and an engine's walk over
them.

Every rank of a layout takes part in every forward pass: experts are shared by data-parallel ranks, so all of them make
the same number of passes, with a row of nothing when their own prompts are done.

Shapes: K the trunk and each MTP depth, B batch, S sequence.
"""

from collections.abc import Callable, Collection, Sequence
from functools import partial

import torch
import torch.distributed as dist

from swiftlite.acceptance.counts import DraftCounts, walk
from swiftlite.data.batch import ahead
from swiftlite.model.context_parallel import shard_sequence
from swiftlite.model.gpt import Logits
from swiftlite.model.loss import vocab_parallel_argmax
from swiftlite.model.pipeline import run_pipeline
from swiftlite.model.ranks import from_last_stage, largest, whole_rows
from swiftlite.plan.layout import length_multiple
from swiftlite.runtime.mesh import Mesh

NO_ROW = [0]
"""What a rank computes when it has nothing of its own left."""


@torch.no_grad()
def measure_acceptance(
    model: Sequence[torch.nn.Module],
    prompts: Sequence[Sequence[int]],
    *,
    mesh: Mesh,
    num_drafts: int,
    eos_token_ids: Collection[int | None],
    max_new_tokens: int,
    max_length: int,
    batch_size: int,
) -> DraftCounts:
    """What an engine that drafts `num_drafts` tokens per step would count on these prompts.

    The prompts are spread over data-parallel ranks and the counts summed.

    Args:
        model: the chunks of this rank, wrapped or bare, in evaluation mode.
        max_length: longest row, the model's own limit.
    """
    predict_rows = partial(predict, model, mesh=mesh, num_drafts=num_drafts)

    def any_rank(mine: bool) -> bool:
        return bool(largest(mine, mesh, mesh.dp))

    counts = DraftCounts(0, 0, (0,) * num_drafts)
    at_once = batch_size * mesh.dp.size()
    for start in range(0, len(prompts), at_once):
        mine = list(prompts)[start : start + at_once][mesh.dp.rank() :: mesh.dp.size()]
        rows = greedy(predict_rows, any_rank, mine, eos_token_ids, max_new_tokens, max_length)
        drafts = predict_rows([tokens for tokens, _ in rows] or [NO_ROW])[1:]
        for index, (tokens, first) in enumerate(rows):
            counts += walk(drafts[:, index, : len(tokens)], torch.tensor(tokens), first)
    numbers = [counts.drafts, counts.drafted, *counts.accepted_per_position]
    sums = torch.tensor(numbers, device=mesh.device.torch_device)
    dist.all_reduce(sums, group=mesh.dp)
    drafts, drafted, *accepted = sums.tolist()
    return DraftCounts(drafts, drafted, tuple(accepted))


def greedy(
    predict_rows: Callable[[Sequence[Sequence[int]]], torch.Tensor],
    any_rank: Callable[[bool], bool],
    prompts: Sequence[Sequence[int]],
    eos_token_ids: Collection[int | None],
    max_new_tokens: int,
    max_length: int,
) -> list[tuple[list[int], int]]:
    """Each prompt with its greedy continuation, and where that begins.

    Every new token costs a pass over the whole batch: the trainer has no key-value cache, and needs none for a few
    dozen tokens of a few prompts.

    Args:
        predict_rows: rows of tokens -> `predict`'s result for them.
        any_rank: whether something holds on any data-parallel rank.
    """
    rows = [(list(prompt), len(prompt)) for prompt in prompts]
    unfinished = [row for row in rows if len(row[0]) < max_length]
    for _ in range(max_new_tokens):
        if not any_rank(bool(unfinished)):
            break
        predictions_KBS = predict_rows([tokens for tokens, _ in unfinished] or [NO_ROW])
        for index, (tokens, _) in enumerate(unfinished):
            tokens.append(int(predictions_KBS[0, index, len(tokens) - 1]))
        unfinished = [row for row in unfinished if row[0][-1] not in eos_token_ids and len(row[0]) < max_length]
    return rows


def predict(
    model: Sequence[torch.nn.Module], rows: Sequence[Sequence[int]], *, mesh: Mesh, num_drafts: int
) -> torch.Tensor:
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
