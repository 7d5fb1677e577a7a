"""Select the samples of each step as a function of the step number. A resumed run therefore needs only this number."""

from dataclasses import dataclass, field

import numpy as np

NO_INDEX = -1
"""Placeholder that fills up the last evaluation batch if there are no further samples."""


@dataclass(frozen=True)
class Sampler:
    """Splits consecutive epochs, each with a different order, into global batches.

    A batch may contain the end of one epoch and the start of the next. Every sample occurs exactly once per epoch.

    Attributes:
        num_samples: at least 1.
        global_batch_size: number of samples per step over all ranks.
        seed: at least 0.
        shuffle: False keeps the order of the files.
    """

    num_samples: int
    global_batch_size: int
    seed: int
    shuffle: bool = True
    _orders: dict[int, np.ndarray] = field(default_factory=dict, repr=False, compare=False)

    def global_batch(self, step: int) -> np.ndarray:
        """Return the indices of a step's samples, int64 `[global_batch_size]`; steps count from 0."""
        positions = np.arange(self.global_batch_size, dtype=np.int64) + step * self.global_batch_size
        epochs, places = np.divmod(positions, self.num_samples)
        batch = np.empty_like(positions)
        for epoch in np.unique(epochs):
            chosen = epochs == epoch
            batch[chosen] = self._order(int(epoch))[places[chosen]]
        return batch

    def _order(self, epoch: int) -> np.ndarray:
        order = self._orders.get(epoch)
        if order is None:
            # Only the newest epoch is cached, because 10 million samples take 80 MB.
            self._orders.clear()
            # RandomState, because numpy guarantees its stream across versions, unlike that of Generator. A run that
            # resumes with another numpy must use the same order.
            order = np.arange(self.num_samples)
            if self.shuffle:
                order = np.random.RandomState([self.seed, epoch]).permutation(self.num_samples)
            self._orders[epoch] = order
        return order  # a thread that collates the next step may have replaced the cached one


def micro_batches(
    global_batch: np.ndarray, micro_batch_size: int, data_parallel_rank: int, data_parallel_size: int
) -> np.ndarray:
    """Return the micro-batches of one data-parallel rank, `[num_micro_batches, micro_batch_size]`.

    As in Megatron's samplers, the m-th micro-batches of all ranks together are a contiguous part of the global batch.
    """
    together = micro_batch_size * data_parallel_size
    if len(global_batch) % together:
        raise ValueError(f"{len(global_batch)} samples do not divide into {micro_batch_size} x {data_parallel_size}")
    # For example, 8 samples, 2 ranks and micro-batches of 2: rank 0 has 0 1 and 4 5, rank 1 has 2 3 and 6 7.
    return global_batch.reshape(-1, data_parallel_size, micro_batch_size)[:, data_parallel_rank]


def evaluation_batches(num_samples: int, global_batch_size: int) -> np.ndarray:
    """Return all indices in order, `[num_batches, global_batch_size]`; `NO_INDEX` fills the last batch."""
    num_batches = -(-num_samples // global_batch_size)
    indices = np.full(num_batches * global_batch_size, NO_INDEX, np.int64)
    indices[:num_samples] = np.arange(num_samples)
    return indices.reshape(num_batches, global_batch_size)
