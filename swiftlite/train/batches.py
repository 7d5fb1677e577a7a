"""Which micro-batches this rank computes at a step: a pure function of the step, so resuming needs no data state."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from swiftlite.args.layout import length_multiple
from swiftlite.args.plan import Plan
from swiftlite.data.batch import NO_SAMPLE, Batch, collate
from swiftlite.data.sample import Sample
from swiftlite.data.sampler import NO_INDEX, Sampler, evaluation_batches, micro_batches
from swiftlite.model.context_parallel import shard_sequence


def shard(batch: Batch, rank: int, size: int) -> Batch:
    """The part of a batch that context-parallel rank `rank` of `size` computes: the zigzag of each sequence."""
    return batch.map(partial(shard_sequence, dim=-1, rank=rank, size=size, cu_seqlens=batch.cu_seqlens))


@dataclass(frozen=True)
class Batches:
    """Cuts global batches of samples into this data-parallel rank's micro-batches.

    Args:
        pad_token_id: any token of the vocabulary; what follows a row is never seen.
    """

    plan: Plan
    data_parallel_rank: int
    pad_token_id: int

    def train(self, samples: Sequence[Sample], sampler: Sampler, step: int) -> list[Batch]:
        """The micro-batches of a step; steps count from 0."""
        return list(self._cut(samples, sampler.global_batch(step)))

    def evaluation(self, samples: Sequence[Sample], max_global_batches: int | None) -> list[Batch]:
        """This rank's share of the held-out samples, each once, in order.

        Every rank gets as many micro-batches, if need be of padding alone: ranks that share experts compute together.
        """
        global_batches = evaluation_batches(len(samples), self.plan.global_batch_size)[:max_global_batches]
        return [batch for indices in global_batches for batch in self._cut(samples, indices)]

    def _cut(self, samples: Sequence[Sample], indices: np.ndarray) -> Iterable[Batch]:
        rows = micro_batches(indices, self.plan.micro_batch_size, self.data_parallel_rank, self.plan.data_parallel_size)
        for row in rows:
            chosen = [samples[i] if i != NO_INDEX else NO_SAMPLE for i in row]
            yield collate(
                chosen,
                self.pad_token_id,
                mtp_num_layers=self.plan.mtp_num_layers,
                pad_to_multiple_of=length_multiple(self.plan.layout),
            )
