"""The training loop: fit -> step -> optimizer.step()."""

import math
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel import get_forward_backward_func

from swiftlite.args.plan import Plan, Schedule
from swiftlite.data.batch import Batch
from swiftlite.errors import UserError
from swiftlite.runtime.device import Device
from swiftlite.train.objective import Statistics, count_targets, make_forward_step, mtp_coefficients
from swiftlite.train.sinks import Sink

GetBatches = Callable[[int], Sequence[Batch]]


@dataclass
class Trainer:
    """Everything one optimizer step needs.

    Attributes:
        train_batches: step (from 0) -> this rank's micro-batches of it; a pure function, which is what makes a
            resumed run continue with the very same data.
        eval_batches: this rank's share of the held-out rows.
        save: step -> None; writes a checkpoint of all ranks.
    """

    model: DistributedDataParallel
    optimizer: MegatronOptimizer
    scheduler: OptimizerParamScheduler
    plan: Plan
    schedule: Schedule
    mtp_loss_scaling_factor: float
    train_batches: GetBatches
    eval_batches: Sequence[Batch]
    device: Device
    sinks: Sequence[Sink]
    logging_steps: int
    save: Callable[[int], object]

    def fit(self, first: int) -> int:
        """Steps `first` .. the last one of the schedule, saving and evaluating on the way.

        Returns:
            The number of a signal that asked to stop (a checkpoint was saved), or 0.
        """
        with _StopSignals() as stop:
            for step in range(first + 1, self.schedule.steps + 1):
                metrics = self.step(step)
                if step % self.logging_steps == 0 or step == self.schedule.steps:
                    self._log(step, metrics)
                stopping = self._agree(stop.received)
                if step % self.plan.save_steps == 0 or step == self.schedule.steps or stopping:
                    self.save(step)
                if stopping:
                    return stopping
                if step % self.plan.eval_steps == 0 or step == self.schedule.steps:
                    self._log(step, self.evaluate())
        return 0

    def close(self) -> None:
        """Close all sinks."""
        for sink in self.sinks:
            sink.close()

    def step(self, step: int) -> dict[str, float]:
        """One optimizer step (counted from 1) over one global batch; returns its metrics."""
        start = time.perf_counter()
        self.model.train()
        batches = self.train_batches(step - 1)
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        statistics = self._forward_backward(batches, forward_only=False)
        self.scheduler.step(increment=1)  # before the update, so that the first one has a learning rate above 0
        _, grad_norm, _ = self.optimizer.step()  # pyright: ignore[reportGeneralTypeIssues]: annotated as None upstream
        tokens = self._sum_over_data_parallel(sum(batch.num_tokens for batch in batches))
        self.device.synchronize()
        seconds = time.perf_counter() - start
        metrics = statistics.means()
        metrics |= {
            "grad_norm": float(grad_norm or 0.0),
            "learning_rate": self.optimizer.param_groups[0]["lr"],
            "tokens_per_second": tokens / seconds,
        }
        if not all(map(math.isfinite, metrics.values())):
            raise UserError(
                f"step {step}: {_render(metrics)}; no further step was taken",
                "lower --lr or --mtp_loss_scaling_factor, or look at the rows of this step; --resume starts before it",
            )
        return metrics

    def evaluate(self) -> dict[str, float]:
        """Token-weighted means over the held-out rows; empty when there are none."""
        if not self._sum_over_data_parallel(len(self.eval_batches)):
            return {}
        self.model.eval()
        with torch.no_grad():
            return self._forward_backward(self.eval_batches, forward_only=True).means(prefix="eval_")

    def _forward_backward(self, batches: Sequence[Batch], *, forward_only: bool) -> Statistics:
        depth, group = self.plan.mtp_num_layers, parallel_state.get_data_parallel_group(with_context_parallel=True)
        counts = count_targets(batches, depth).to(self.device.torch_device)
        torch.distributed.all_reduce(counts, group=group)
        coefficients = mtp_coefficients(counts, self.mtp_loss_scaling_factor)
        parts: list[Statistics] = []
        if batches:
            parts = get_forward_backward_func()(
                forward_step_func=make_forward_step(coefficients),
                data_iterator=self._on_device(batches),
                model=[self.model],
                num_microbatches=len(batches),
                seq_length=batches[0].tokens_BS.size(1),
                micro_batch_size=batches[0].tokens_BS.size(0),
                forward_only=forward_only,
            )
        return Statistics.total(parts, 1 + depth, self.device.torch_device, group)

    def _on_device(self, batches: Sequence[Batch]) -> Iterator[Batch]:
        return (batch.to(self.device.torch_device) for batch in batches)

    def _sum_over_data_parallel(self, value: int) -> int:
        total = torch.tensor(value, device=self.device.torch_device)
        torch.distributed.all_reduce(total, group=parallel_state.get_data_parallel_group())
        return int(total)

    def _agree(self, received: int) -> int:
        """The largest signal number that any rank received: all stop at the same step."""
        number = torch.tensor(received, device=self.device.torch_device)
        torch.distributed.all_reduce(number, op=torch.distributed.ReduceOp.MAX)
        return int(number)

    def _log(self, step: int, metrics: Mapping[str, float]) -> None:
        if metrics:
            for sink in self.sinks:
                sink.log(step, metrics)


class _StopSignals:
    """Remembers SIGTERM and Ctrl-C until the step is over; a second one ends the process at once."""

    def __init__(self):
        self.received = 0
        self._previous = {}

    def __enter__(self) -> "_StopSignals":
        for number in (signal.SIGTERM, signal.SIGINT):
            self._previous[number] = signal.signal(number, self._remember)
        return self

    def _remember(self, number: int, frame: FrameType | None) -> None:
        self.received = number
        signal.signal(number, self._previous[number])

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)


def _render(metrics: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:.4g}" for name, value in metrics.items())
