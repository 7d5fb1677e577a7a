"""Which micro-batches a rank computes at a step: a pure function of the step, so resuming needs no data state."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain

import numpy as np

from swiftlite.data.batch import NO_SAMPLE, Batch, collate, collate_packed, compare, pair_up, rate
from swiftlite.data.packing import Rows, pack, padded
from swiftlite.data.sample import Sample
from swiftlite.data.sampler import NO_INDEX, Sampler, evaluation_batches, micro_batches
from swiftlite.data.schedule import Schedule, schedule
from swiftlite.model.context_parallel import shard_sequence
from swiftlite.plan.flops import Flops
from swiftlite.plan.layout import num_virtual_stages, sequence_multiple
from swiftlite.plan.run import Plan
from swiftlite.runtime.device import on_device
from swiftlite.runtime.mesh import Mesh


def shard(batch: Batch, rank: int, size: int) -> Batch:
    """The part of a batch that context-parallel rank `rank` of `size` computes: the zigzag of each sequence."""
    return batch.map(partial(shard_sequence, dim=-1, rank=rank, size=size, cu_seqlens=batch.cu_seqlens))


def on_this_rank(batches: Iterable[Batch], mesh: Mesh) -> Iterator[Batch]:
    """The batches on the device, and of each row the part that this context-parallel rank computes.

    Labels stay on the host: how many there are decides how large the loss is (`loss.select`).
    """
    move = partial(on_device, device=mesh.device.torch_device)
    for batch in batches:
        part = shard(batch, mesh.cp.rank(), mesh.cp.size())
        yield replace(part.map(move), labels_KBS=part.labels_KBS, on_host=part)


@dataclass(frozen=True)
class SampleRows(Sequence[list[Sample]]):
    """What batch sizes count: rows of samples that stay together."""

    samples: Sequence[Sample]
    rows: Rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, row: int) -> list[Sample]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return [self.samples[index] for index in self.rows[row].tolist()]


@dataclass(frozen=True)
class Collated(Sequence[Batch]):
    """Micro-batches that are collated each time they are read: of thousands, only the one in use takes memory.

    Attributes:
        samples: of each micro-batch.
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
        mismatched: micro-batches of mismatched answers (`data/rated.py`), of which it has as many as any rank; none
            where samples have none.
    """

    batches: Sequence[Batch]
    mismatched: Sequence[Batch] = ()

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, number: int) -> Batch:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self.batches[number]


@dataclass(frozen=True)
class Batches:
    """Cuts global batches into the micro-batches of one data-parallel rank.

    Args:
        data_parallel_rank: the rank, `mesh.dp.rank()`.
        pad_token_id: any token of the vocabulary; what follows a sample is never seen.
        flops: operations of a step, by which ranks are levelled where each step is packed anew.
    """

    plan: Plan
    data_parallel_rank: int
    pad_token_id: int
    flops: Flops

    def rows(self, samples: Sequence[Sample]) -> SampleRows:
        """Packed rows if the run packs all samples into rows, else a row for each sample."""
        if self.plan.packing != "rows":
            return SampleRows(samples, Rows(np.arange(len(samples)), np.arange(len(samples) + 1)))
        multiple = sequence_multiple(self.plan.layout)
        lengths = [_length_of(sample, multiple) for sample in samples]
        return SampleRows(samples, pack(lengths, self.plan.packing_length, multiple=multiple))

    def length_of(self, row: Sequence[Sample]) -> int:
        """Return the tokens of one row as a micro-batch, its padding counted; without samples it is padding alone."""
        multiple = sequence_multiple(self.plan.layout)
        num_tokens = sum(_length_of(sample, multiple) for sample in row)
        return -(-max(1, num_tokens) // self.plan.row_multiple) * self.plan.row_multiple

    def train(self, rows: SampleRows, sampler: Sampler, step: int) -> MicroBatches:
        """Return the micro-batches of a step; steps count from 0."""
        indices = sampler.global_batch(step)
        batches = [self.collate(samples) for samples in self._cut(rows, indices)]
        return MicroBatches(batches, Collated(self.collate_mismatched, self._cut_mismatched(rows, indices)))

    def evaluation(self, samples: Sequence[Sample], max_global_batches: int | None = None) -> MicroBatches:
        """Return this rank's share of the held-out samples, each once.

        Every rank gets the same number of micro-batches, if need be of padding alone: ranks that share experts compute
        together.

        Args:
            max_global_batches: global batches after which the rest is left out; None takes all.
        """
        rows = self.rows(samples)
        cut: list[list[Sample]] = []
        mismatched: list[list[Sample]] = []
        for indices in evaluation_batches(len(rows), self.plan.global_batch_size)[:max_global_batches]:
            cut += self._cut(rows, indices)
            mismatched += self._cut_mismatched(rows, indices)
        return MicroBatches(Collated(self.collate, cut), Collated(self.collate_mismatched, mismatched))

    def collate(self, samples: Sequence[Sample]) -> Batch:
        """Return one micro-batch; of pairs, both answers of each."""
        answers = list(chain.from_iterable(sample.answers for sample in samples))
        batch = self._lay_out(answers)
        if samples and samples[0].desirable is not None:
            return rate(batch, samples)
        return pair_up(batch, samples) if len(answers) > len(samples) else batch

    def collate_mismatched(self, samples: Sequence[Sample]) -> Batch:
        """Return one micro-batch of the mismatched answers of these samples."""
        return compare(self._lay_out([sample.mismatched for sample in samples if sample.mismatched]), samples)

    def _lay_out(self, samples: Sequence[Sample]) -> Batch:
        plan = self.plan
        if plan.packing == "none":
            return collate(
                samples or [NO_SAMPLE],
                self.pad_token_id,
                num_drafts=plan.heads.drafts,
                pad_to_multiple_of=plan.row_multiple,
            )
        return collate_packed(
            samples,
            self.pad_token_id,
            num_drafts=plan.heads.drafts,
            pad_each_to_multiple_of=sequence_multiple(plan.layout),
            pad_to_multiple_of=plan.row_multiple,
        )

    def _cut(self, rows: SampleRows, indices: np.ndarray) -> list[list[Sample]]:
        """The samples of each of this rank's micro-batches.

        Args:
            indices: the rows of a global batch, NO_INDEX among them where rows have run out.
        """
        plan = self.plan
        if plan.packing == "step":
            samples = _samples(rows, indices)
            groups = self._share([len(sample) for sample in samples])
            return [[samples[index] for index in group.tolist()] for group in groups]
        mine = micro_batches(indices, plan.micro_batch_size, self.data_parallel_rank, plan.data_parallel_size)
        return [_samples(rows, chosen) for chosen in mine]

    def _cut_mismatched(self, rows: SampleRows, indices: np.ndarray) -> list[list[Sample]]:
        """Return the samples whose mismatched answers this rank scores, by micro-batch; `indices` as for `_cut`.

        Where rows are packed to a length, they are packed again: a mismatched answer has another length than its
        sample, and a row of short questions may get the long answers of others.
        """
        samples = _samples(rows, indices)
        if not any(sample.mismatched for sample in samples):
            return []
        if self.plan.packing in ("none", "micro_batch"):
            return self._cut(rows, indices)
        lengths = [len(sample.mismatched or sample) for sample in samples]
        return [[samples[index] for index in group.tolist()] for group in self._share(lengths)]

    def _share(self, lengths: Sequence[int]) -> list[np.ndarray]:
        """Return which samples of a step, by their lengths, this rank computes in each of its micro-batches."""
        return self.schedule(lengths).rank(self.data_parallel_rank)

    def schedule(self, lengths: Sequence[int]) -> Schedule:
        """Which samples of a step each rank computes, where its work is levelled over ranks; see `data.schedule`."""
        layout = self.plan.layout
        return schedule(
            lengths,
            self.plan.packing_length,
            self.plan.data_parallel_size,
            linear=self.flops.per_token,
            square=self.flops.square,
            multiple=sequence_multiple(layout),
            num_multiple_of=layout.pipeline_model_parallel_size if num_virtual_stages(layout) else 1,
        )


def _length_of(sample: Sample, multiple: int) -> int:
    """Tokens that a sample, or both answers of a pair, take in a packed row."""
    if sample.rejected is None:
        return len(sample)
    return int(padded(np.array([len(answer) for answer in sample.answers]), multiple).sum())


def _samples(rows: SampleRows, indices: np.ndarray) -> list[Sample]:
    """The samples of some rows, one row after the other."""
    samples = []
    for row in indices:
        if row != NO_INDEX:
            samples += rows[row]
    return samples
