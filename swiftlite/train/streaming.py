"""`--streaming`: one rank reads the files; the others are sent what they compute."""

from collections.abc import Iterator
from itertools import accumulate, islice
from typing import Any

import numpy as np

from swiftlite.data.batch import Batch
from swiftlite.data.sample import Sample
from swiftlite.data.sampler import micro_batches
from swiftlite.data.stream import Stream
from swiftlite.runtime.mesh import Mesh
from swiftlite.train.batches import Batches
from swiftlite.train.exchange import broadcast, broadcast_counts, exchange, stage_fields


class StreamedBatches:
    """`--streaming`: the first rank of all reads, data-parallel ranks and the ranks of their replicas are sent theirs.

    Args:
        stream: of packed rows, on the first rank; None elsewhere.
    """

    def __init__(self, batches: Batches, stream: Stream | None, mesh: Mesh):
        self.batches = batches
        self.stream = stream
        self.mesh = mesh
        self._fields = stage_fields(batches.plan.layout, batches.plan.heads.layers)

    def train(self, step: int) -> list[Batch]:
        """The micro-batches of the next step, whatever its number."""
        is_first_of_replica = self.mesh.pp.rank() == self.mesh.tp_cp.rank() == 0
        received = broadcast(
            self._own() if is_first_of_replica else None,
            self._fields,
            pipeline_group=self.mesh.pp,
            stage_group=self.mesh.tp_cp,
            device=self.mesh.device.torch_device,
        )
        return [self.batches.collate(samples) for samples in received]

    def state(self) -> dict[str, Any]:
        """What a resumed run needs, on the first rank; empty elsewhere."""
        return {} if self.stream is None else {"stream": self.stream.state()}

    def _own(self) -> list[list[Sample]]:
        """This data-parallel rank's micro-batches of the rows that the first rank reads."""
        plan = self.batches.plan
        group, device = self.mesh.dp, self.mesh.device.torch_device
        rows: list[list[Sample]] = []
        if self.stream is not None:
            rows = list(islice(self.stream, plan.global_batch_size))
        counts, lengths = broadcast_counts(
            [len(row) for row in rows], [len(sample) for row in rows for sample in row], group, device
        )
        starts = [0, *accumulate(counts)]
        cut = [
            [
                [number for row in chosen for number in range(starts[row], starts[row + 1])]
                for chosen in micro_batches(
                    np.arange(len(counts)), plan.micro_batch_size, rank, plan.data_parallel_size
                ).tolist()
            ]
            for rank in range(plan.data_parallel_size)
        ]
        received: Iterator[Sample] = iter(
            exchange(
                [sample for row in rows for sample in row],
                [lengths, *[[]] * (group.size() - 1)],
                [[number for numbers in mine for number in numbers] for mine in cut],
                group,
                device,
            )
        )
        return [list(islice(received, len(numbers))) for numbers in cut[group.rank()]]
