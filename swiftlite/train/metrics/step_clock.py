"""Measure how long the parts of a training step take on this rank, without waiting for the device."""

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.model_parallel_config import ModelParallelConfig
from torch.profiler import record_function

PARTS = ("data", "forward", "backward", "optimizer")
"""Measured parts of a step. The rest is `other`: above all communication, and waiting for other ranks."""
_TIMERS = {"forward-compute": "forward", "backward-compute": "backward"}
"""megatron-core's timers of the work on one micro-batch, and the parts that they measure."""


class StepClock:
    """The times of the parts of the current step, and the sums over all steps.

    Each part is a named range in profiles. On a CPU, the times are those of the host. On a GPU, they are the times
    between CUDA events in the current stream, which are read after the step. The device is still working on the update
    then, so the time of `optimizer` is that of the step before.

    Attributes:
        times: seconds of the last step, and of each part in `PARTS`, by name.
        totals: seconds of each part over all steps, of `other`, and of work between steps (`between_steps`), by name.
    """

    def __init__(self, is_cuda: bool = False):
        self.is_cuda = is_cuda
        self.times: dict[str, float] = {}
        self.totals: defaultdict[str, float] = defaultdict(float)
        self._new: defaultdict[str, float] = defaultdict(float)
        self._started: dict[str, tuple[Any, record_function]] = {}
        self._intervals: list[tuple[str, Any, Any]] = []

    @property
    def own_work(self) -> float:
        """Seconds of the last step before communication at its end. A KeyError before the first `finish_step`."""
        return sum(self.times[part] for part in ("data", "forward", "backward"))

    def start(self, part: str) -> None:
        label = record_function(part)
        label.__enter__()
        self._started[part] = (self._now(), label)

    def stop(self, part: str) -> None:
        start, label = self._started.pop(part)
        self._intervals.append((part, start, self._now()))
        label.__exit__(None, None, None)

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Measure the work in this context as a part of the step."""
        self.start(name)
        try:
            yield
        finally:
            self.stop(name)

    @contextmanager
    def passes(self, config: ModelParallelConfig) -> Iterator[None]:
        """Measure the forward and backward passes of megatron-core's schedules in this context.

        Args:
            config: the config of the model's first chunk, from which the schedules take their timers.
        """
        config.timers = self._timer
        try:
            yield
        finally:
            config.timers = None

    def finish_step(self, seconds: float) -> None:
        """Compute the times of a step. Work that is still running on the device counts for the next step.

        Args:
            seconds: time of the whole step.
        """
        self.times = {"step": seconds, **dict.fromkeys(PARTS, 0.0)}
        unfinished = []
        for part, start, end in self._intervals:
            if isinstance(end, float) or end.query():
                self.times[part] += _seconds(start, end)
            else:
                unfinished.append((part, start, end))
        self._intervals = unfinished
        for part in PARTS:
            self.totals[part] += self.times[part]
        self.totals["other"] += seconds - sum(self.times[part] for part in PARTS)

    @contextmanager
    def between_steps(self, name: str) -> Iterator[None]:
        """Measure work between steps, such as a checkpoint, by the time of the host."""
        start = time.perf_counter()
        try:
            with record_function(name):
                yield
        finally:
            seconds = time.perf_counter() - start
            self.totals[name] += seconds
            self._new[name] += seconds

    def metrics(self) -> dict[str, float]:
        """Return the times of the last step, and of the work between steps since the previous call, for the log."""
        between, self._new = self._new, defaultdict(float)
        return {f"time/{name}": seconds for name, seconds in (self.times | between).items()}

    def _now(self) -> Any:
        if not self.is_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _timer(self, name: str, log_level: int | None = None) -> "_Timer":
        """Return one of megatron-core's timers. megatron-core's own class waits for the GPU at each start and stop."""
        return _Timer(self, _TIMERS.get(name))


class _Timer:
    """A timer with megatron-core's methods, which measures a part of a step, or nothing."""

    def __init__(self, clock: StepClock, part: str | None):
        self.clock, self.part = clock, part

    def start(self, barrier: bool = False) -> None:
        if self.part:
            self.clock.start(self.part)

    def stop(self, barrier: bool = False) -> None:
        if self.part:
            self.clock.stop(self.part)


def _seconds(start: Any, end: Any) -> float:
    if isinstance(start, float):
        return end - start
    return start.elapsed_time(end) / 1000
