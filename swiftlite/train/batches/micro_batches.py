"""Select the micro-batches of a rank as a function of the step. A checkpoint therefore stores no state of the data."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np

from swiftlite.data.batch import Batch, Extra, collate, collate_packed, count_items
from swiftlite.data.changed_samples import lengths_of
from swiftlite.data.packing.packing import PackedRows, SingleRows, pack, padded
from swiftlite.data.packing.sampler import NO_INDEX, Sampler, evaluation_batches, micro_batches
from swiftlite.data.packing.schedule import MicroBatchSchedule, schedule
from swiftlite.data.sample import Sample
from swiftlite.plan.cost.flops import Flops
from swiftlite.plan.layout import num_virtual_stages, sequence_multiple
from swiftlite.plan.run import Plan


@dataclass(frozen=True)
class SampleRows(Sequence[list[Sample]]):
    """Rows, each of which is a list of samples that stay in one micro-batch. Batch sizes count rows."""

    samples: Sequence[Sample]
    rows: PackedRows | SingleRows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, row: int) -> list[Sample]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return [self.samples[index] for index in self.rows[row].tolist()]

    def sources(self, indices: np.ndarray) -> list[str]:
        """Return `file:line` of each sample of some rows."""
        return [sample.source for sample in _samples(self, indices)]


@dataclass(frozen=True)
class Collated(Sequence[Batch]):
    """Micro-batches that are collated each time they are read, so that only the micro-batch in use occupies memory.

    Attributes:
        samples: the samples of each micro-batch.
    """

    collate: Callable[[Sequence[Sample]], Batch]
    samples: Sequence[Sequence[Sample]]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, number: int) -> Batch:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self.collate(self.samples[number])


@dataclass(frozen=True)
class MicroBatches(Sequence[Batch]):
    """A rank's micro-batches of one or several global batches.

    Attributes:
        companions: micro-batches of the samples' companions (for KTO, each prompt with an answer to another question).
            Every rank has the same number of them; empty without companions.
    """

    batches: Sequence[Batch]
    companions: Sequence[Batch] = ()

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, number: int) -> Batch:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self.batches[number]


@dataclass(frozen=True)
class Batches:
    """Divides global batches into micro-batches, and returns those of one data-parallel rank.

    Args:
        data_parallel_rank: the rank, `mesh.dp.rank()`.
        pad_token_id: token of padding. It can be any token of the vocabulary, because padding is masked.
        flops: operations per token and per squared sequence length. They are used to balance the work of ranks if each
            step is packed separately.
        extras: tensors that the training method adds to batches.
    """

    plan: Plan
    data_parallel_rank: int
    pad_token_id: int
    flops: Flops
    extras: Sequence[Extra] = ()

    def rows(self, samples: Sequence[Sample]) -> SampleRows:
        """Return packed rows if the run packs samples into rows; otherwise one row per sample."""
        # Other kinds of packing pack the samples of a step or of a micro-batch, not those of the dataset.
        if self.plan.packing != "rows":
            return SampleRows(samples, SingleRows(len(samples)))
        multiple = sequence_multiple(self.plan.layout)
        return SampleRows(samples, pack(_sizes_of(samples, multiple), self.plan.packing_length, multiple=multiple))

    def lengths_of_rows(self, rows: SampleRows) -> np.ndarray:
        """Return the number of tokens of a micro-batch for each row, including padding, as int32."""
        multiple = sequence_multiple(self.plan.layout)
        sizes = np.empty(len(rows.samples), np.int32)
        for first in range(0, len(sizes), CHUNK_SAMPLES):
            here = slice(first, first + CHUNK_SAMPLES)
            sizes[here] = _sizes_of(rows.samples[here], multiple)
        if isinstance(rows.rows, PackedRows) and len(rows):
            sizes = np.add.reduceat(padded(sizes, multiple)[rows.rows.order], rows.rows.offsets[:-1])
        # `collate` gives rows without tokens one token of padding.
        return padded(np.maximum(sizes, 1), self.plan.row_multiple).astype(np.int32)

    def train(self, rows: SampleRows, sampler: Sampler, step: int) -> MicroBatches:
        """Return this rank's micro-batches of a step (counted from 0)."""
        return self.global_batch(rows, sampler.global_batch(step))

    def global_batch(self, rows: SampleRows, indices: np.ndarray) -> MicroBatches:
        """Return this rank's micro-batches of a global batch.

        Args:
            indices: the rows of the global batch.
        """
        batches = [self.collate(samples) for samples in self._cut(rows, indices)]
        # Batches are collated here, in the thread of `Prefetched`; companions when `prepare` reads them.
        return MicroBatches(batches, Collated(self.collate_companions, self._cut_companions(rows, indices)))

    def evaluation(self, samples: Sequence[Sample], max_global_batches: int | None = None) -> MicroBatches:
        """Return this data-parallel rank's micro-batches of the held-out samples. Each sample is on one data-parallel
        rank.

        Every rank has the same number of micro-batches, because ranks that share experts must compute at the same time.
        If there are too few samples, the last micro-batches are padding only.

        Args:
            max_global_batches: maximum number of global batches; None: all samples.
        """
        rows = self.rows(samples)
        cut: list[list[Sample]] = []
        companions: list[list[Sample]] = []
        for indices in evaluation_batches(len(rows), self.plan.global_batch_size)[:max_global_batches]:
            cut += self._cut(rows, indices)
            companions += self._cut_companions(rows, indices)
        return MicroBatches(Collated(self.collate, cut), Collated(self.collate_companions, companions))

    def collate(self, samples: Sequence[Sample]) -> Batch:
        """Return one micro-batch with all sequences of `samples`."""
        return self._lay_out(list(chain.from_iterable(sample.sequences for sample in samples)))

    def collate_companions(self, samples: Sequence[Sample]) -> Batch:
        """Return one micro-batch with the companions of `samples` (for KTO, each prompt with an answer to another
        question).
        """
        return self._lay_out([sample.companion for sample in samples if sample.companion])

    def _lay_out(self, sequences: Sequence[Sample]) -> Batch:
        plan = self.plan
        if plan.packing == "none":
            return collate(
                sequences,
                self.pad_token_id,
                num_drafts=plan.heads.drafts,
                pad_to_multiple_of=plan.row_multiple,
                extras=self.extras,
            )
        return collate_packed(
            sequences,
            self.pad_token_id,
            num_drafts=plan.heads.drafts,
            pad_each_to_multiple_of=sequence_multiple(plan.layout),
            pad_to_multiple_of=plan.row_multiple,
            extras=self.extras,
        )

    def _cut(self, rows: SampleRows, indices: np.ndarray) -> list[list[Sample]]:
        """Divide a global batch into micro-batches, and return the samples of each micro-batch of this rank.

        Args:
            indices: the rows of a global batch; NO_INDEX for rows that are missing at the end of the data.
        """
        plan = self.plan
        if plan.packing == "step":
            samples = _samples(rows, indices)
            groups = self._share([len(sample) for sample in samples], [self._work_of_items(each) for each in samples])
            return [[samples[index] for index in group.tolist()] for group in groups]
        mine = micro_batches(indices, plan.micro_batch_size, self.data_parallel_rank, plan.data_parallel_size)
        return [_samples(rows, chosen) for chosen in mine]

    def _cut_companions(self, rows: SampleRows, indices: np.ndarray) -> list[list[Sample]]:
        """Return, by micro-batch, the samples whose companions this rank scores (for KTO, prompts with answers to other
        questions).

        If rows are packed to a fixed length, companions are packed separately, because they have other lengths than
        their samples: the companions of one row might not fit into one row.

        Args:
            indices: the rows of a global batch, as for `_cut`.
        """
        samples = _samples(rows, indices)
        if not any(sample.companion for sample in samples):
            return []
        if self.plan.packing in ("none", "micro_batch"):
            return self._cut(rows, indices)
        lengths = [len(sample.companion or sample) for sample in samples]
        return [[samples[index] for index in group.tolist()] for group in self._share(lengths)]

    def _share(self, lengths: Sequence[int], more_work: Sequence[float] = ()) -> list[np.ndarray]:
        """Return, for each of this rank's micro-batches of a step, the indices of its samples.

        Args:
            lengths: number of tokens of each sample of the step.
            more_work: further operations of each sample, such as those of its images.
        """
        return self.schedule(lengths, more_work).rank(self.data_parallel_rank)

    def _work_of_items(self, sample: Sample) -> float:
        """Return the operations of a tower for the images of a sample."""
        num_items, item_squares = count_items(sample.sequences, self.extras)
        return self.flops.item * num_items + self.flops.item_square * item_squares

    def schedule(self, lengths: Sequence[int], more_work: Sequence[float] = ()) -> MicroBatchSchedule:
        """Distribute the samples of a step over ranks and micro-batches with equal work (`data.packing.schedule`)."""
        layout = self.plan.layout
        num_multiple_of = 1
        # megatron-core's interleaved schedule refuses a remainder that is smaller than the pipeline.
        if num_virtual_stages(layout):
            num_multiple_of = layout.pipeline_model_parallel_size
        # `square` counts all pairs of a sequence; those outside of windows are not computed.
        if self.flops.windows or self.flops.indexers:
            more_work = more_work or [0.0] * len(lengths)
            pairs = zip(more_work, lengths, strict=True)
            more_work = [more - self.flops.outside_windows(length) for more, length in pairs]
        return schedule(
            lengths,
            self.plan.packing_length,
            self.plan.data_parallel_size,
            linear=self.flops.per_token,
            square=self.flops.square,
            more_work=more_work,
            multiple=sequence_multiple(layout),
            num_multiple_of=num_multiple_of,
        )


CHUNK_SAMPLES = 1 << 16
"""Number of samples whose lengths are in memory at the same time where only their sizes are needed."""


def _sizes_of(samples: Sequence[Sample], multiple: int) -> np.ndarray:
    """Return the number of tokens of each sample in a packed row, int64. Several sequences of a sample are padded;
    `pack` pads a single one, and names its length in errors.
    """
    lengths, starts = lengths_of(samples)
    sizes = np.add.reduceat(padded(lengths, multiple), starts)
    is_alone = np.diff(starts, append=len(lengths)) == 1
    sizes[is_alone] = lengths[starts[is_alone]]
    return sizes


def _samples(rows: SampleRows, indices: np.ndarray) -> list[Sample]:
    """Return the samples of the rows at these indices, in order."""
    samples = []
    for row in indices:
        if row != NO_INDEX:
            samples += rows[row]
    return samples
