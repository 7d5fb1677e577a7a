"""`--streaming`: one rank reads the files; the others are sent what they compute."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from swiftlite.data.batch import Batch
from swiftlite.data.sample import Sample
from swiftlite.data.sampler import micro_batches
from swiftlite.data.stream import Stream
from swiftlite.runtime.mesh import Mesh
from swiftlite.train.batches import Batches
from swiftlite.train.exchange import broadcast, broadcast_counts, exchange, stage_fields


@dataclass(frozen=True)
class StreamedBatches:
    """`--streaming`: the first rank of all reads, data-parallel ranks and the ranks of their replicas are sent theirs.

    Attributes:
        stream: of packed rows, on the first rank; None elsewhere.
    """

    batches: Batches
    stream: Stream | None
    mesh: Mesh

    def train(self, step: int) -> list[Batch]:
        """The micro-batches of the next step, whatever its number."""
        plan = self.batches.plan
        is_first_of_replica = self.mesh.pp.rank() == 0 and self.mesh.tp_cp.rank() == 0
        received = broadcast(
            self._receive() if is_first_of_replica else None,
            stage_fields(plan.layout, plan.heads.layers),
            pipeline_group=self.mesh.pp,
            stage_group=self.mesh.tp_cp,
            device=self.mesh.device.torch_device,
        )
        return [self.batches.collate(samples) for samples in received]

    def state(self) -> dict[str, Any]:
        """What a resumed run needs, on the first rank; empty elsewhere."""
        return {} if self.stream is None else {"stream": self.stream.state()}

    def _receive(self) -> list[list[Sample]]:
        """This data-parallel rank's micro-batches of the rows that the first rank reads now."""
        plan = self.batches.plan
        group, device = self.mesh.dp, self.mesh.device.torch_device
        rows: list[list[Sample]] = []
        if self.stream is not None:
            rows = list(itertools.islice(self.stream, plan.global_batch_size))
        samples = list(itertools.chain(*rows))
        row_sizes, lengths = broadcast_counts(
            [len(row) for row in rows], [len(sample) for sample in samples], group, device
        )
        numbers_of_rank = [
            number_samples(row_sizes, plan.micro_batch_size, rank, plan.data_parallel_size)
            for rank in range(plan.data_parallel_size)
        ]
        received = exchange(
            samples,
            lengths=[lengths] + [[]] * (group.size() - 1),  # only the first rank has any
            assignment=[list(itertools.chain(*numbers)) for numbers in numbers_of_rank],
            group=group,
            device=device,
        )
        arriving = iter(received)
        return [list(itertools.islice(arriving, len(numbers))) for numbers in numbers_of_rank[group.rank()]]


def number_samples(row_sizes: Sequence[int], micro_batch_size: int, rank: int, size: int) -> list[list[int]]:
    """The samples of each micro-batch of data-parallel rank `rank` of `size`, as they are numbered through all rows.

    Example: four rows of 2, 1, 3 and 1 samples hold samples 0 and 1; 2; 3 to 5; 6. With one row to a micro-batch rank 0
    of 2 computes the first and the third row, `[[0, 1], [3, 4, 5]]`, and rank 1 the others, `[[2], [6]]`.

    Args:
        row_sizes: samples of each row of the global batch.
        micro_batch_size: rows of a micro-batch.
    """
    ends = itertools.accumulate(row_sizes)
    numbers_of_row = [range(end - num_samples, end) for end, num_samples in zip(ends, row_sizes, strict=True)]
    result = []
    for rows in micro_batches(np.arange(len(row_sizes)), micro_batch_size, rank, size).tolist():
        result.append([number for row in rows for number in numbers_of_row[row]])
    return result
