"""Acceptance of the MTP heads as they are now: greedy continuations of held-out prompts, and an engine's walk over
them.

Shapes: B batch, S sequence, K MTP depth.
"""

from collections.abc import Collection, Sequence

import torch
from megatron.core import parallel_state

from swiftlite.model.acceptance import DraftCounts, walk
from swiftlite.model.loss import vocab_parallel_argmax
from swiftlite.runtime.device import Device


@torch.no_grad()
def measure_acceptance(
    model: torch.nn.Module,
    prompts: Sequence[Sequence[int]],
    *,
    mtp_num_layers: int,
    eos_token_ids: Collection[int | None],
    max_new_tokens: int,
    max_length: int,
    batch_size: int,
    device: Device,
) -> DraftCounts:
    """What an engine that drafts `mtp_num_layers` tokens per step would count on these prompts.

    The prompts are spread over data-parallel ranks and the counts summed.

    Args:
        model: wrapped or bare; left in the training mode it was in.
        max_length: longest row, the model's own limit.
    """
    rank = parallel_state.get_data_parallel_rank()
    mine = list(prompts)[rank :: parallel_state.get_data_parallel_world_size()]
    was_training = model.training
    model.eval()
    counts = DraftCounts(0, 0, (0,) * mtp_num_layers)
    for start in range(0, len(mine), batch_size):
        rows = greedy(model, mine[start : start + batch_size], eos_token_ids, max_new_tokens, max_length, device)
        for (tokens, first), drafts_KS in zip(rows, draft(model, [tokens for tokens, _ in rows], device), strict=True):
            counts += walk(drafts_KS, torch.tensor(tokens), first)
    model.train(was_training)
    sums = torch.tensor([counts.drafts, counts.drafted, *counts.accepted_per_position], device=device.torch_device)
    torch.distributed.all_reduce(sums, group=parallel_state.get_data_parallel_group())
    drafts, drafted, *accepted = sums.tolist()
    return DraftCounts(drafts, drafted, tuple(accepted))


def greedy(
    model: torch.nn.Module,
    prompts: Sequence[Sequence[int]],
    eos_token_ids: Collection[int | None],
    max_new_tokens: int,
    max_length: int,
    device: Device,
) -> list[tuple[list[int], int]]:
    """Each prompt with its greedy continuation, and where that begins.

    Every new token costs a pass over the whole batch: the trainer has no key-value cache, and needs none for a few
    dozen tokens of a few prompts.
    """
    rows = [(list(prompt), len(prompt)) for prompt in prompts]
    unfinished = [row for row in rows if len(row[0]) < max_length]
    for _ in range(max_new_tokens):
        if not unfinished:
            break
        tokens_BS, position_ids_BS = pad([tokens for tokens, _ in unfinished], device)
        logits_BSV = model(tokens_BS, position_ids_BS).main
        last_B = torch.tensor([len(tokens) - 1 for tokens, _ in unfinished], device=device.torch_device)
        next_B = vocab_parallel_argmax(logits_BSV[torch.arange(len(unfinished)), last_B])
        for (tokens, _), token in zip(unfinished, next_B.tolist(), strict=True):
            tokens.append(token)
        unfinished = [row for row in unfinished if row[0][-1] not in eos_token_ids and len(row[0]) < max_length]
    return rows


def draft(model: torch.nn.Module, rows: Sequence[Sequence[int]], device: Device) -> list[torch.Tensor]:
    """What each depth predicts at every position of each row, [K, S]."""
    tokens_BS, position_ids_BS = pad(rows, device)
    logits = model(tokens_BS, position_ids_BS)
    drafts_KBS = torch.stack([vocab_parallel_argmax(head.flatten(0, 1)).view_as(tokens_BS) for head in logits.mtp])
    return [drafts_KBS[:, index, : len(row)].cpu() for index, row in enumerate(rows)]


def pad(rows: Sequence[Sequence[int]], device: Device) -> tuple[torch.Tensor, torch.Tensor]:
    """Token and position ids [B, S], rows padded at the end with token 0."""
    longest = max(len(row) for row in rows)
    tokens_BS = torch.zeros(len(rows), longest, dtype=torch.int64)
    for index, row in enumerate(rows):
        tokens_BS[index, : len(row)] = torch.tensor(row)
    position_ids_BS = torch.arange(longest).expand_as(tokens_BS)
    return tokens_BS.to(device.torch_device), position_ids_BS.to(device.torch_device)
