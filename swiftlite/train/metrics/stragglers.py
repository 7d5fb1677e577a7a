"""Find ranks that are slower than the others."""

import statistics
from collections import Counter
from collections.abc import Sequence

import torch
import torch.distributed as dist

from swiftlite.base.log import logger
from swiftlite.runtime.mesh import Mesh

SLOWER = 1.2
"""Work of a slow rank, as a multiple of the median of the other ranks of its pipeline stage."""
NUM_ENTRIES = 10
"""Number of consecutive entries of metrics.jsonl in which a rank is slow before it is reported."""


class Stragglers:
    """Compares the work of all ranks: the time of a step without communication at its end.

    Ranks wait for each other in each step, so the whole step takes the same time on all of them.
    """

    def __init__(self, mesh: Mesh):
        self.mesh = mesh
        self.entries: Counter[int] = Counter()
        """Number of consecutive entries in which a rank was slow, by rank."""

    def compare(self, step: int, seconds: float) -> dict[str, float]:
        """Return the smallest and the largest work with the rank numbers, as metrics. Collective over the job.

        The first rank logs a warning if a rank is slow in many consecutive entries.

        Args:
            seconds: this rank's work in the step.

        Returns:
            The metrics; empty for a single rank.
        """
        if dist.get_world_size() == 1:
            return {}
        own = torch.tensor([seconds, self.mesh.pp.rank()], dtype=torch.float64, device=self.mesh.device.torch_device)
        gathered = [torch.empty_like(own) for _ in range(dist.get_world_size())]
        dist.all_gather(gathered, own)
        work, stages = torch.stack(gathered).T.tolist()
        for rank, ratio in self.slow_ranks(work, stages):
            if dist.get_rank() == 0:
                logger.warning(
                    "step %d: rank %d is slow: its data, forward and backward took %.3f s, %.1f times the median of "
                    "the other ranks of its pipeline stage, and this in %d entries of metrics.jsonl in a row; look at "
                    "its machine, or profile it with --profile_ranks %d",
                    step,
                    rank,
                    work[rank],
                    ratio,
                    NUM_ENTRIES,
                    rank,
                )
        fastest, slowest = min(work), max(work)
        return {
            "time/fastest": fastest,
            "time/fastest_rank": work.index(fastest),
            "time/slowest": slowest,
            "time/slowest_rank": work.index(slowest),
        }

    def slow_ranks(self, work: Sequence[float], stages: Sequence[float]) -> list[tuple[int, float]]:
        """Count an entry; return the ranks that have been slow in exactly `NUM_ENTRIES` consecutive entries.

        Args:
            work: seconds of each rank.
            stages: pipeline stage of each rank. Stages have different layers, so they are not compared.

        Returns:
            Pairs of rank and its work relative to the median of the other ranks of its stage.
        """
        found = []
        for rank, seconds in enumerate(work):
            others = [work[other] for other in range(len(work)) if stages[other] == stages[rank] and other != rank]
            if not others or seconds <= SLOWER * statistics.median(others):
                self.entries[rank] = 0
                continue
            self.entries[rank] += 1
            if self.entries[rank] == NUM_ENTRIES:
                found.append((rank, seconds / statistics.median(others)))
        return found
