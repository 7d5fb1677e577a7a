"""Implement `megatron rm`: a reward model, trained on pairs of answers with the loss of Bradley and Terry.

Shapes: P pairs of a micro-batch, 2 the answers of a pair (the preferred one first), N all sequences of the micro-batch,
B rows, S tokens of a row on this context-parallel rank.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from megatron.core.tensor_parallel import reduce_from_tensor_model_parallel_region
from torch.nn.functional import logsigmoid

from swiftlite.args.commands import RmArgs
from swiftlite.data.batch import Batch, Extra
from swiftlite.data.changed_samples import ChangedSamples
from swiftlite.data.dataset import Data
from swiftlite.data.encoder import ConversationEncoder, Encoder
from swiftlite.data.rows.conversation import Conversation, RowError
from swiftlite.data.rows.pair import parse_pair
from swiftlite.data.sample import Sample
from swiftlite.data.template import pad_token_of
from swiftlite.model.forward_step import ForwardStep
from swiftlite.model.inputs import ModelInputs
from swiftlite.model.loss.balance import Balance
from swiftlite.runtime.mesh import Mesh
from swiftlite.train.methods.conversations import load_data, make_conversation_encoder
from swiftlite.train.methods.mtp_loss import mean_of
from swiftlite.train.methods.training import Training
from swiftlite.train.phases import Run

LAST = Extra("last", torch.int64)
"""Position of the token of a sequence whose score is the reward."""
MARGIN = Extra("margin")
"""By how much the reward of the preferred answer should exceed that of the rejected one."""
FIGURES = ("loss", "accuracy", "margin", "mean_reward")
"""Metrics that are means over pairs, by TRL's names."""


def parse_pair_with_margin(row: object, **context: Any) -> Conversation:
    """Parse a pair of answers, whose row can have TRL's field `margin`.

    Raises:
        RowError: the pair is invalid (`parse_pair`), or its margin is not a number.
    """
    pair = parse_pair(row, **context)
    margin = row.get("margin") if isinstance(row, dict) else None
    if margin is None:
        return pair
    if isinstance(margin, bool) or not isinstance(margin, int | float) or not math.isfinite(margin):
        raise RowError("margin", "is not a finite number")
    return replace(pair, extras={**pair.extras, MARGIN.name: float(margin)})


def load_pairs(args: RmArgs, encoder: Encoder, vocab_size: int) -> Data:
    """Read training and held-out pairs, and find the last token of each answer.

    Raises:
        UserError: a file or a row is invalid, or the tokenizer has no token for padding.
    """
    assert isinstance(encoder, ConversationEncoder)
    pad = pad_token_of(encoder.template.tokenizer)
    data = load_data(args, encoder, vocab_size)
    train, val = (ChangedSamples(samples, partial(_with_last, pad)) for samples in (data.train, data.val))
    return replace(data, train=train, val=val)


def _with_last(pad: int, number: int, sample: Sample) -> Sample:
    """Return a pair with the position of the last token of each answer that is not `pad`, as transformers finds it."""
    found = [last_token(answer.input_ids, pad) for answer in sample.sequences]
    others = tuple(other.with_extras(last=last) for other, last in zip(sample.others, found[1:], strict=True))
    return replace(sample.with_extras(last=found[0]), others=others)


def last_token(input_ids: np.ndarray, pad: int) -> int:
    """Return the position of the last token that is not `pad`; 0 without one."""
    others = np.flatnonzero(input_ids != pad)
    return int(others[-1]) if len(others) else 0


@dataclass(frozen=True)
class RewardObjective:
    """TRL's loss of a reward model, a mean over the pairs of a global batch.

    With the rewards c and r of the preferred and of the rejected answer, and the margin m of the row, the loss is

        -log sigmoid(c - r - m) + center_rewards_coefficient * (c + r) ** 2
    """

    center_rewards_coefficient: float
    num_maxima: int = 2  # of the reward, and of the reward times -1

    @property
    def nonfinite_hint(self) -> str:
        return "lower --lr"

    @property
    def sums_shape(self) -> tuple[int]:
        return (1 + len(FIGURES) + self.num_maxima,)

    def count_targets(self, batches: Sequence[Batch]) -> torch.Tensor:
        """Count logits of tokens (0), all tokens, and pairs: int64 [3, 1]."""
        counts = torch.zeros(3, 1, dtype=torch.int64)
        for batch in batches:
            counts[1] += (batch.sequence_KBS[0] >= 0).sum().cpu()
            counts[2] += batch.num_sequences // 2
        return counts

    def make_forward_step(self, counts: torch.Tensor, mesh: Mesh) -> ForwardStep:
        """Return a forward step that gives the loss, the number of pairs and the statistics of each micro-batch."""
        _, tokens, (num_pairs,) = counts.tolist()
        balance = Balance(tokens, divisor=num_pairs)

        def forward_step(batches: Iterator[Batch], model: torch.nn.Module) -> tuple[object, Callable]:
            batch = next(batches)
            return model(ModelInputs.of(batch, balance)), partial(self._loss, batch, mesh)

        return forward_step

    def _loss(
        self, batch: Batch, mesh: Mesh, scores_BS: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        counts_here = mesh.cp.rank() == 0  # context-parallel ranks have the same rewards
        rewards_P2 = rewards_of(scores_BS, batch, mesh).view(-1, 2)
        chosen_P, rejected_P = rewards_P2.unbind(dim=1)
        # The parser stores it in the first sequence of a pair only.
        margin_P = batch.extras[MARGIN.name].view(-1, 2)[:, 0]
        losses_P = -logsigmoid(chosen_P - rejected_P - margin_P)
        losses_P = losses_P + self.center_rewards_coefficient * (chosen_P + rejected_P) ** 2
        pairs = torch.full((), len(losses_P) * counts_here, dtype=torch.int32, device=losses_P.device)
        with torch.no_grad():
            rows = [losses_P, chosen_P > rejected_P, chosen_P - rejected_P, rewards_P2.mean(dim=1)]
            sums = torch.stack([row.double().sum() for row in rows]) * counts_here
            none = rewards_P2.new_full((1,), -torch.inf)  # a micro-batch can be empty
            maxima = [torch.cat([each.flatten(), none]).max().double() for each in (rewards_P2, -rewards_P2)]
        return losses_P.sum(), pairs, torch.cat([pairs.double()[None], sums, torch.stack(maxima)])

    def means(self, sums: torch.Tensor) -> dict[str, float]:
        """Return the metrics of pairs and the extreme rewards, by TRL's names."""
        pairs, *figures, largest, smallest_negated = sums.tolist()
        named = {name: mean_of(figure, pairs) for name, figure in zip(FIGURES, figures, strict=True)}
        return {**named, "min_reward": -smallest_negated, "max_reward": largest}


def rewards_of(scores_BS: torch.Tensor, batch: Batch, mesh: Mesh) -> torch.Tensor:
    """Return the score of the last token of each sequence, float32 [N], the same on every context-parallel rank.

    Args:
        scores_BS: the score of each token.
        batch: this rank's part of the micro-batch.
    """
    numbers_N1 = torch.arange(batch.num_sequences, device=scores_BS.device)[:, None]
    is_last_NT = (batch.sequence_KBS[0].flatten() == numbers_N1) & (
        batch.position_ids_BS.flatten() == batch.extras[LAST.name][:, None]
    )
    # A matrix product instead of indices, because most context-parallel ranks do not have the token.
    scores_N = is_last_NT.float() @ scores_BS.float().flatten()
    # The forward pass sums the ranks' parts; in the backward pass each rank gets the gradient of its part.
    return reduce_from_tensor_model_parallel_region(scores_N, group=mesh.cp)


def reward_objective(run: Run) -> RewardObjective:
    """Return the objective of a run."""
    assert isinstance(run.args, RmArgs)
    return RewardObjective(run.args.center_rewards_coefficient or 0.0)


RM = Training(
    make_encoder=partial(make_conversation_encoder, parse=parse_pair_with_margin),
    load=load_pairs,
    held_out_prompts=lambda run: ((), ()),  # a reward model continues no prompts
    make_objective=reward_objective,
    extras=(LAST, MARGIN),
)
