"""Implement `--streaming`: each model replica reads some of the rows, and receives the samples that it computes."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist

from swiftlite.data.batch import Batch
from swiftlite.data.packing.packing import RowStream, StreamSample
from swiftlite.data.packing.sampler import micro_batches
from swiftlite.data.packing.stream import Stream
from swiftlite.data.sample import Sample
from swiftlite.plan.layout import sequence_multiple
from swiftlite.runtime.decisions import record_decision
from swiftlite.runtime.mesh import Mesh
from swiftlite.train.batches.exchange import broadcast, exchange, stage_fields
from swiftlite.train.batches.micro_batches import Batches

MicroBatches = list[list[int]]
"""For each micro-batch of a rank, the indices of its samples among all samples of the step."""


class StreamedSteps(Iterator[tuple[list[StreamSample], list[MicroBatches]]]):
    """An iterator over steps.

    It yields the samples of a step in stream order, and the samples of each data-parallel rank.

    All ranks that read files yield the same values.

    Args:
        state: result of `state()` of a previous `StreamedSteps`, to continue after its last step.
    """

    def __init__(self, batches: Batches, stream: Stream, buffer_size: int, state: Mapping[str, Any] | None = None):
        state = state or {"waiting": [], "ready": []}
        self._batches = batches
        self._stream = stream
        self._rows = RowStream(
            stream,
            batches.plan.packing_length,
            buffer_size,
            multiple=sequence_multiple(batches.plan.layout),
            waiting=itertools.starmap(StreamSample, state["waiting"]),
            ready=[list(itertools.starmap(StreamSample, row)) for row in state["ready"]],
        )
        # The packing keeps only positions and lengths of samples, so their tokens are read again.
        stream.hold(itertools.chain(self._rows.waiting, *self._rows.ready))

    def __next__(self) -> tuple[list[StreamSample], list[MicroBatches]]:
        plan = self._batches.plan
        if plan.packing == "step":
            entries = list(itertools.islice(self._stream, plan.global_batch_size))
            schedule = self._batches.schedule([entry.length for entry in entries])
            # For all ranks, because senders and receivers must agree on the assignment.
            rank_batches = []
            for rank in range(plan.data_parallel_size):
                rank_batches.append([indices.tolist() for indices in schedule.rank(rank)])
            return entries, rank_batches
        rows = list(itertools.islice(self._rows, plan.global_batch_size))
        row_sizes = [len(row) for row in rows]
        return list(itertools.chain(*rows)), [
            number_samples(row_sizes, plan.micro_batch_size, rank, plan.data_parallel_size)
            for rank in range(plan.data_parallel_size)
        ]

    def state(self) -> dict[str, Any]:
        """Return the state for continuing after the current step, as JSON values.

        It does not include the state of the stream.
        """
        return {"waiting": self._rows.waiting, "ready": list(self._rows.ready)}


@dataclass(frozen=True)
class StreamedBatches:
    """The micro-batches of each step, sent to the ranks that compute them.

    Attributes:
        output_dir: the run's directory, in whose metrics.jsonl bad rows are recorded that are left out.
        stream, steps: the stream of samples, and the steps made from it. Both are None on ranks that do not read files.
            The first rank of each model replica reads files.
    """

    batches: Batches
    stream: Stream | None
    steps: StreamedSteps | None
    mesh: Mesh
    output_dir: Path
    _numbers: list[int] = field(default_factory=list)

    def train(self, step: int) -> list[Batch]:
        """Return this rank's micro-batches of the next step. `step` only dates records, because a stream is read in
        order.
        """
        plan = self.batches.plan
        sent = self._receive() if self.steps else None
        if self.stream:
            left_out = self.stream.take_left_out()  # on every reader, because each of them keeps the messages
            if dist.get_rank() == 0:
                for problem in left_out:
                    record_decision(self.output_dir, step + 1, "bad_row", f"left out: {problem}")
        received = broadcast(
            sent,
            stage_fields(plan.layout, plan.heads.layers),
            pipeline_group=self.mesh.pp,
            stage_group=self.mesh.tp_cp,
            device=self.mesh.device.torch_device,
        )
        return [self.batches.collate(samples) for samples in received]

    def state(self) -> dict[str, Any]:
        """Return the state for a resumed run. It is the same on every rank that reads, and empty on other ranks."""
        if self.stream is None or self.steps is None:
            return {}
        return {"stream": self.stream.state() | self.steps.state()}

    def sources(self) -> list[str]:
        """Return the numbers of the rows of the last step, from 0 in the order in which files are read, through all
        epochs; empty on ranks that do not read files.
        """
        return [f"row {number}" for number in self._numbers]

    def _receive(self) -> list[list[Sample]]:
        """Return this data-parallel rank's micro-batches of the next step."""
        assert self.stream is not None
        assert self.steps is not None
        group = self.mesh.dp
        entries, rank_batches = next(self.steps)
        self._numbers[:] = [entry.row for entry in entries]
        owners = [self.stream.owner(entry) for entry in entries]
        # `exchange` numbers samples by the rank that has read them: all of rank 0, then all of rank 1, ...
        by_owner = sorted(range(len(entries)), key=owners.__getitem__)
        number_of = {index: number for number, index in enumerate(by_owner)}
        lengths: list[list[int]] = [[] for _ in range(group.size())]
        for index in by_owner:
            lengths[owners[index]].append(entries[index].length)
        assignment = []
        for batches in rank_batches:
            assignment.append([number_of[index] for index in itertools.chain(*batches)])
        # In the order in which `exchange` numbers them.
        own = self.stream.take(entries[index] for index in by_owner)
        # In the order of this rank's assignment, which lists micro-batch after micro-batch.
        arriving = iter(exchange(own, lengths, assignment, group, self.mesh.device.torch_device))
        return [list(itertools.islice(arriving, len(indices))) for indices in rank_batches[group.rank()]]


def reads(mesh: Mesh) -> bool:
    """Return whether this rank reads files. The first rank of each model replica does."""
    return mesh.pp.rank() == 0 and mesh.tp_cp.rank() == 0


def number_samples(row_sizes: Sequence[int], micro_batch_size: int, rank: int, size: int) -> MicroBatches:
    """Return the indices of the samples in each micro-batch of data-parallel rank `rank` of `size`.

    The indices count the samples of all rows. Example: four rows of 2, 1, 3 and 1 samples contain the samples 0-1, 2,
    3-5 and 6. With one row per micro-batch, rank 0 of 2 computes the first and the third row, `[[0, 1], [3, 4, 5]]`,
    and rank 1 the second and the fourth, `[[2], [6]]`.

    Args:
        row_sizes: number of samples of each row of the global batch.
        micro_batch_size: number of rows of a micro-batch.
    """
    ends = itertools.accumulate(row_sizes)
    numbers_of_row = [range(end - num_samples, end) for end, num_samples in zip(ends, row_sizes, strict=True)]
    result = []
    for rows in micro_batches(np.arange(len(row_sizes)), micro_batch_size, rank, size).tolist():
        result.append(list(chain.from_iterable(numbers_of_row[row] for row in rows)))
    return result
