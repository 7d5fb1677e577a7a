"""`--streaming`: one rank reads the files; the others are sent what they compute."""

from collections.abc import Iterator
from itertools import accumulate, islice
from typing import Any

import numpy as np
from megatron.core import parallel_state

from swiftlite.data.batch import Batch
from swiftlite.data.sample import Sample
from swiftlite.data.sampler import micro_batches
from swiftlite.data.stream import Stream
from swiftlite.runtime.device import Device
from swiftlite.train.batches import Batches
from swiftlite.train.exchange import broadcast, broadcast_counts, exchange, stage_fields


class StreamedBatches:
    """`--streaming`: the first rank of all reads, data-parallel ranks and the ranks of their replicas are sent theirs.

    Args:
        stream: of packed rows, on the first rank; None elsewhere.
    """

    def __init__(self, batches: Batches, stream: Stream | None, device: Device):
        self.batches, self.stream, self.device = batches, stream, device.torch_device
        self._fields = stage_fields(batches.plan.layout, batches.plan.heads.layers)

    def train(self, step: int) -> list[Batch]:
        """The micro-batches of the next step, whatever its number."""
        # Annotated as lists of groups upstream.
        pipeline_group: Any = parallel_state.get_pipeline_model_parallel_group()
        stage_group: Any = parallel_state.get_tensor_and_context_parallel_group()
        is_first_of_replica = pipeline_group.rank() == stage_group.rank() == 0
        received = broadcast(
            self._own() if is_first_of_replica else None,
            self._fields,
            pipeline_group=pipeline_group,
            stage_group=stage_group,
            device=self.device,
        )
        return [self.batches.collate(samples) for samples in received]

    def state(self) -> dict[str, Any]:
        """What a resumed run needs, on the first rank; empty elsewhere."""
        return {} if self.stream is None else {"stream": self.stream.state()}

    def _own(self) -> list[list[Sample]]:
        """This data-parallel rank's micro-batches of the rows that the first rank reads."""
        plan = self.batches.plan
        group: Any = parallel_state.get_data_parallel_group()
        rows: list[list[Sample]] = []
        if self.stream is not None:
            rows = list(islice(self.stream, plan.global_batch_size))
        counts, lengths = broadcast_counts(
            [len(row) for row in rows], [len(sample) for row in rows for sample in row], group, self.device
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
                self.device,
            )
        )
        return [list(islice(received, len(numbers))) for numbers in cut[group.rank()]]
