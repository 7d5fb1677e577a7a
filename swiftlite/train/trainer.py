"""Implement the training loop: `fit` calls `step`, and `step` updates the weights with the optimizer."""

import math
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from itertools import chain

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from swiftlite.base.errors import UserError
from swiftlite.base.log import logger
from swiftlite.bridge.tensors import some
from swiftlite.data.batch import Batch
from swiftlite.model.attention.indexer import take_indexer_loss
from swiftlite.model.forward import between_groups, run_batches
from swiftlite.model.layers.router import take_load_balancing_loss
from swiftlite.model.ranks import all_reduce_max, all_reduce_sum, broadcast_from_last_stage
from swiftlite.plan.cost.flops import Flops
from swiftlite.plan.run import Plan, Schedule
from swiftlite.runtime.decisions import record_decision
from swiftlite.runtime.device import on_device, start_copy_to_host
from swiftlite.runtime.mesh import Mesh
from swiftlite.train.bad_steps import FLAG, SUGGESTED_SIGMA, BadSteps, restoring_router_biases
from swiftlite.train.batches.train_batches import TrainBatches
from swiftlite.train.best_model import BestModel
from swiftlite.train.checkpoint.checkpointer import Checkpointer
from swiftlite.train.checkpoint.state import Consumed
from swiftlite.train.clipping import ClippedOptimizer
from swiftlite.train.metrics.loggers import MetricLogger
from swiftlite.train.metrics.step_clock import StepClock
from swiftlite.train.metrics.stragglers import Stragglers
from swiftlite.train.metrics.trackers import TableLogger
from swiftlite.train.objective import Objective, PreparedObjective
from swiftlite.train.profiling import Profiler
from swiftlite.train.restarts import RestartClock
from swiftlite.train.stopping import Stopped, StopSignals


@dataclass(frozen=True)
class Figures:
    """Results of a step on the host.

    Attributes:
        sums: statistics of the objective, summed over all ranks.
        sizes: the sum of `Trainer._sizes_of` over data-parallel ranks.
        norms: norms of the gradients before they were clipped, by name as in the metrics.
        others: further metrics of the passes.
    """

    sums: torch.Tensor
    sizes: Sequence[int]
    norms: Mapping[str, float]
    others: Mapping[str, float]


@dataclass
class Trainer:
    """Everything that optimizer steps need.

    Attributes:
        mesh: the ranks that hold the model.
        model: the chunks of this rank, one per virtual pipeline stage.
        objective: the loss to minimize.
        batches: the source of the micro-batches of all steps.
        eval_batches: this rank's share of the held-out rows.
        flops: the FLOPs of a step over all ranks of a replica, for the metrics.
        metric_loggers: destinations of the metrics.
        checkpointer: writes the checkpoints. None: no checkpoints are written.
        bad_steps: decides which steps are applied. Default: all.
        consumed: tokens and samples of all steps so far, those of earlier processes included.
        lacks_evaluation: on the first rank, whether the step that the run resumes from must still be evaluated.
        after_step: called on every rank with the number of each step, after it is completed and logged.
        seed: seed of random numbers in training, such as dropout of adapters.
        profiler: records the steps of --profile_steps.
        restart_clock: measures the time that failures cost.
        best: the evaluations so far, which can end training early. None: without --metric_for_best_model.
        last_step: number of the last step. It becomes smaller when training ends early.
        clock: the times of this rank.
        stragglers: compares the times of all ranks.
    """

    mesh: Mesh
    model: Sequence[DistributedDataParallel]
    objective: Objective
    optimizer: ClippedOptimizer
    scheduler: OptimizerParamScheduler
    plan: Plan
    schedule: Schedule
    batches: TrainBatches
    eval_batches: Sequence[Batch]
    flops: Flops
    metric_loggers: Sequence[MetricLogger]
    logging_steps: int
    checkpointer: Checkpointer | None
    bad_steps: BadSteps = field(default=None)  # pyright: ignore[reportAssignmentType]: `__post_init__` sets it
    consumed: Consumed = field(default_factory=Consumed)
    lacks_evaluation: bool = False
    after_step: Callable[[int], None] | None = None
    seed: int = 42
    profiler: Profiler = field(default_factory=Profiler)
    restart_clock: RestartClock = field(default_factory=RestartClock)
    best: BestModel | None = None
    last_step: int = field(init=False)
    clock: StepClock = field(init=False)
    stragglers: Stragglers = field(init=False)
    _last_saved: int = 0
    _evaluation: tuple[int, dict[str, float]] = (-1, {})  # step and metrics of the last evaluation during training

    def __post_init__(self):
        self.clock = StepClock(self.mesh.device.is_cuda)
        self.stragglers = Stragglers(self.mesh)
        self.bad_steps = self.bad_steps or BadSteps(self.mesh)
        self.last_step = self.schedule.steps

    def fit(self, first: int) -> int:
        """Run all steps after step `first`, with periodic checkpoints and evaluations. There is no evaluation after the
        last step. A run without steps saves the weights as they were initialized. A run that ended early has no step.

        Returns:
            The number of the signal that stopped training, in which case a checkpoint was saved; otherwise 0.
        """
        # The profile of a run that stops is written after the checkpoint, while signals are deferred.
        with self.mesh.active(), StopSignals() as stop, closing(self.profiler):
            self.restart_clock.start(first)
            if all_reduce_max(int(self.lacks_evaluation), self.mesh) and (stopping := self._evaluate(first, stop)):
                return stopping
            # Checkpoints do not store an early end: a resumed run derives it from its earlier evaluations.
            self._end_early(first)
            if not self.schedule.steps:
                self._save(0)
            for step in range(first + 1, self.schedule.steps + 1):
                if step > self.last_step:
                    break
                self.log(step - 1, self.restart_clock.before(step))
                self.profiler.before(step)
                try:
                    metrics = self.step(step)
                except Stopped:
                    return self._stop_before(step, first, stop)
                if step % self.logging_steps == 0 or step == self.schedule.steps:
                    ranks = self.stragglers.compare(step, self.clock.own_work)
                    self.log(step, metrics | self.clock.metrics() | ranks)
                self._log_table(step)
                self.restart_clock.after(step)
                # Before evaluation and save, which read the reference model that `TrainBatches.after_step` changes.
                if self.after_step:
                    self.after_step(step)
                stopping = all_reduce_max(stop.received, self.mesh)  # all ranks stop at the same step
                # Before the save: a run that resumes from this checkpoint looks for the evaluation in metrics.jsonl.
                if step % self.plan.eval_steps == 0 and step < self.schedule.steps and not stopping:
                    stopping = self._evaluate(step, stop)
                if step % self.plan.save_steps == 0 or step == self.last_step or stopping:
                    self._save(step)
                elif self.plan.ephemeral_save_steps and step % self.plan.ephemeral_save_steps == 0:
                    self._save(step, is_ephemeral=True)
                if stopping:
                    self._finish_checkpoint()
                    return stopping
                if self.checkpointer and self.checkpointer.is_async:
                    with self.clock.between_steps("checkpoint"):
                        self.checkpointer.poll()
                self.profiler.after(step)
            self._finish_checkpoint()
            self.log(self.last_step, self.restart_clock.before(self.last_step + 1))
        return 0

    def _evaluate(self, step: int, stop: StopSignals) -> int:
        """Evaluate and log, unless a signal arrives; return the number of the signal, otherwise 0. Collective."""

        def check() -> None:
            if all_reduce_max(stop.received, self.mesh):  # all ranks stop after the same group of micro-batches
                raise Stopped

        try:
            with between_groups(check):
                metrics = self.evaluate(step)
        except Stopped:
            return all_reduce_max(stop.received, self.mesh)
        self._evaluation = step, metrics
        self._record(step, metrics)
        self._end_early(step)
        return 0

    def _record(self, step: int, metrics: Mapping[str, float]) -> None:
        if self.best:
            self.best.record(step, metrics)
        self.log(step, metrics)  # last: a resumed run evaluates a step again that has no line in metrics.jsonl

    def _end_early(self, step: int) -> None:
        """Make a step the last one if the metric has not improved for too long; collective."""
        if self.best and self.last_step > step and all_reduce_max(int(self.best.ends_training), self.mesh):
            self.last_step = step
            metric, patience = self.best.evaluations.metric, self.best.patience
            logger.info("training ends at step %d: %s has not improved in %d evaluations", step, metric, patience)

    def evaluate_last(self) -> dict[str, float]:
        """Return the metrics of the last step. It is evaluated and logged now, unless training ended early after its
        evaluation.
        """
        step, metrics = self._evaluation
        if step != self.last_step:
            metrics = self.evaluate(self.last_step)
        if self.last_step == self.schedule.steps:
            self._record(self.last_step, metrics)
            if self.best and self.checkpointer:
                self.checkpointer.clean_up()  # an earlier checkpoint may not be the best one any more
        return metrics

    def _stop_before(self, step: int, first: int, stop: StopSignals) -> int:
        """Save the last step unless it is saved already; return the number of the signal."""
        # Without a completed step, the newest checkpoint is the one that the run resumed from.
        last = step - 1
        if last > first and last != self._last_saved:
            self._save(last)
        self._finish_checkpoint()
        return all_reduce_max(stop.received, self.mesh)

    def _save(self, step: int, *, is_ephemeral: bool = False) -> None:
        self._last_saved = step
        if self.checkpointer:
            # With --overlap_param_gather, a rank has only its own shard of the update until the next forward pass.
            with self.clock.between_steps("checkpoint"), whole_parameters(self.model):
                self._refuse_broken_weights(step)
                state = {**self.batches.get_state(), **self.bad_steps.state(), "consumed": self.consumed}
                self.checkpointer.save(step, state, is_ephemeral=is_ephemeral)

    def _refuse_broken_weights(self, step: int) -> None:
        """Reject non-finite weights, because a checkpoint with such weights would replace a usable checkpoint.

        Raises:
            UserError: the norm of a parameter is not finite in float32 on some rank; raised on every rank.
        """
        parameters = chain.from_iterable(chunk.parameters() for chunk in self.model)
        norms = torch.stack([_norm(each.detach()) for each in parameters])
        # All ranks raise together; otherwise the others would wait in the collectives of the save.
        if all_reduce_max(int(not norms.isfinite().all()), self.mesh):
            raise UserError(
                f"step {step}: the update produced weights that are not finite or close to overflow; it was not saved",
                f"{self.objective.nonfinite_hint}; --resume continues from the last checkpoint",
            )

    def _finish_checkpoint(self) -> None:
        """Wait until the last checkpoint is written. `fit` calls this method while signals are deferred."""
        if self.checkpointer:
            with self.clock.between_steps("checkpoint"):
                self.checkpointer.finish()

    def close(self) -> None:
        """Wait until the last checkpoint is written, and close all metric loggers."""
        self._finish_checkpoint()
        for metric_logger in self.metric_loggers:
            metric_logger.close()

    def step(self, step: int) -> dict[str, float]:
        """Run optimizer step `step` (counted from 1) on one global batch and return its metrics.

        Raises:
            Stopped: `TrainBatches.get` was stopped by a signal; raised on every rank.
        """
        start = time.perf_counter()
        with self.clock.part("data"):
            batches = self.batches.get(step - 1)
        with self.clock.part("forward"):  # of a teacher or a reference model
            objective = self._objective_for(batches)
        for chunk in self.model:
            chunk.train()
            chunk.zero_grad_buffer()  # of DDP, in which the gradients of all micro-batches add up
        self.optimizer.zero_grad()
        # Dropout depends on the step alone, so a resumed run repeats it although checkpoints have no random state.
        torch.manual_seed(seed_of_step(self.seed, step))
        # Before the first backward pass, because each micro-batch is divided by the targets of the whole global batch.
        counts = self._count_targets(batches)
        with restoring_router_biases(self.model, self.bad_steps):
            with self.clock.passes(self.model[0].config):
                sums = self._run(batches, objective, counts, forward_only=False)
            self.scheduler.step(increment=1)  # before the update, so that the first update has a learning rate above 0
            with self.clock.part("optimizer"):
                wait = self._update(objective, sums, self._over_data_parallel(*self._sizes_of(batches)))
        # In most steps of one rank, the host waits for a GPU only here. The GPU still has the update to compute, while
        # the host prepares the next step.
        figures = wait()
        seconds = time.perf_counter() - start
        self.clock.finish_step(seconds)
        num_samples, *sizes = figures.sizes
        metrics = {**objective.means(figures.sums), **figures.others}
        metrics |= {**figures.norms, "learning_rate": self.optimizer.param_groups[0]["lr"]}
        metrics |= self._speed(sizes, counts, seconds)
        self.consumed = self.consumed.and_also(tokens=sizes[0], samples=num_samples)
        metrics |= self.consumed.metrics()
        return self._checked(step, metrics)

    def _update(self, objective: Objective, sums: torch.Tensor, sizes: torch.Tensor) -> Callable[[], "Figures"]:
        """Update the weights, unless the step is bad.

        Args:
            sums: statistics of the objective in this step.
            sizes: the sum of `_sizes_of` over data-parallel ranks.

        Returns:
            A function that waits for the figures of this step, but not for the update.
        """
        waits: list[Callable[[], Figures]] = []
        others: dict[str, torch.Tensor] = {}
        if self.model[0].config.moe_aux_loss_coeff:
            # In every step, logged or not: the routers add up losses until they are taken.
            others["load_balancing_loss"] = take_load_balancing_loss(self.model, self.mesh)
        if getattr(self.model[0].config, "indexer_loss_coeff", 0):
            others["indexer_loss"] = take_indexer_loss(self.model, self.mesh)

        def is_good(norms: Mapping[str, torch.Tensor]) -> bool:
            # `ClippedOptimizer.step` calls this before the update, so the copy does not wait for the update's kernels.
            copy = start_copy_to_host([sums, sizes, *norms.values(), *others.values()])

            def wait() -> Figures:
                sums, sizes, *values = copy()
                named = dict(zip([*norms, *others], map(float, values), strict=True))
                parts = [{name: named[name] for name in names} for names in (norms, others)]
                return Figures(sums, list(map(int, sizes.tolist())), *parts)

            waits.append(wait)
            if not self.bad_steps.sigma:  # reading the loss would wait for the GPU before the update is launched
                return True
            figures = wait()
            metrics = objective.means(figures.sums)
            loss = {name: metrics[name] for name in ("loss",) if name in metrics}
            return self.bad_steps.is_good({**loss, **figures.norms})

        self.optimizer.check = is_good
        self.optimizer.step()
        return waits[0]

    def _sizes_of(self, batches: Sequence[Batch]) -> Iterator[int]:
        """Yield the number of samples of this rank's micro-batches, then their arguments of `Flops.step` without the
        counts of the objective.
        """
        lengths = [length for batch in batches for length in batch.lengths]
        yield len(lengths)
        yield sum(batch.num_tokens for batch in batches)
        # Of sequences, not of packed rows: attention computes each sequence separately.
        yield sum(length**2 for length in lengths)
        yield sum(batch.num_items for batch in batches)
        yield sum(batch.item_squares for batch in batches)
        yield sum(map(self.flops.outside_windows, lengths))

    def _speed(self, sizes: Sequence[int], counts: torch.Tensor, seconds: float) -> dict[str, float]:
        """Return the metrics of speed and memory of a step.

        Args:
            sizes: `_sizes_of` all micro-batches, without the number of samples.
            counts: counts of the objective.
        """
        num_tokens, squares, *others = sizes
        flops = self.flops.step(num_tokens, squares, counts[0].tolist(), *others)
        flops_per_second = flops / seconds / self.plan.world_size
        metrics = {
            "tokens_per_second": num_tokens / seconds,
            "tflops_per_second": flops_per_second / 1e12,
            "peak_memory_gb": self.mesh.device.peak_memory / 1e9,
        }
        # Data sheets state the peak of bfloat16; float32 has another one.
        peak, is_bfloat16 = self.mesh.device.peak_flops, self.model[0].config.params_dtype is torch.bfloat16
        if peak and is_bfloat16:
            metrics["mfu"] = flops_per_second / peak
        return metrics

    def _checked(self, step: int, metrics: dict[str, float]) -> dict[str, float]:
        """Return the metrics of a step; only finite ones if it was skipped, which is recorded.

        Raises:
            UserError: metrics are not finite, or too many steps were skipped.
        """
        bad_steps = self.bad_steps
        is_finite = all(map(math.isfinite, metrics.values()))
        if bad_steps.problem and not bad_steps.must_end:
            self._record_skipped(step, metrics)
            return {name: value for name, value in metrics.items() if math.isfinite(value)}
        if is_finite and not bad_steps.problem:
            return metrics
        problem, hint = f"step {step}: {_render(metrics)}", self.objective.nonfinite_hint
        if bad_steps.problem:
            problem += f"; {bad_steps.problem}, and the {bad_steps.in_a_row - 1} steps before it were skipped"
        else:
            hint += f", or check this step's rows, or skip such steps: --resume {FLAG} {SUGGESTED_SIGMA}"
        if sources := self.batches.sources_of(step - 1):
            problem += f"; rows: {', '.join(some(sources, 5))}"
        # Only now, because without the option the norm of the gradients is known after the update. The last checkpoint
        # is intact.
        raise UserError(f"{problem}; no further step was taken", f"{hint}; --resume starts before this step")

    def _record_skipped(self, step: int, metrics: Mapping[str, float]) -> None:
        if dist.get_rank() or self.checkpointer is None:
            return
        values = {name: metrics[name] for name in ("loss", "grad_norm", "mtp_grad_norm") if name in metrics}
        record_decision(
            self.checkpointer.output_dir,
            step,
            "bad_step",
            f"step {step} was skipped: {self.bad_steps.problem}",
            # JSON has no numbers that are not finite.
            values={name: value if math.isfinite(value) else str(value) for name, value in values.items()},
            limits=self.bad_steps.limits,
            rows=list(self.batches.sources_of(step - 1)),
        )

    def evaluate(self, step: int) -> dict[str, float]:
        """Return all metrics over the held-out rows, named `eval_...`; empty without held-out rows.

        Args:
            step: number of completed steps.

        Raises:
            Stopped: `TrainBatches.evaluate` was stopped by a signal; raised on every rank.
        """
        metrics = self._evaluate_batches()
        if self.batches.evaluate is None:
            return metrics
        with self.clock.between_steps("evaluation"), self.mesh.active():
            return {**metrics, **self.batches.evaluate(step)}

    def _evaluate_batches(self) -> dict[str, float]:
        """Return the objective's metrics over the held-out rows."""
        if not sum(self._sum_over_data_parallel(len(self.eval_batches))):
            return {}
        objective = self._objective_for(self.eval_batches)
        with self.clock.between_steps("evaluation"), self.evaluating():
            counts = self._count_targets(self.eval_batches)
            sums = self._run(self.eval_batches, objective, counts, forward_only=True).cpu()
        return {f"eval_{name}": value for name, value in objective.means(sums).items()}

    def _objective_for(self, batches: Sequence[Batch]) -> Objective:
        """Return the objective, prepared for this global batch if it is a `PreparedObjective`."""
        if not isinstance(self.objective, PreparedObjective):
            return self.objective
        with self.evaluating():
            return self.objective.prepare(self.model, self.mesh, batches)

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Switch to evaluation mode without gradients in this context, with gathered parameters."""
        with self.mesh.active(), whole_parameters(self.model), torch.no_grad():
            for chunk in self.model:
                chunk.eval()
            try:
                yield
            finally:
                for chunk in self.model:
                    chunk.train()

    def _count_targets(self, batches: Sequence[Batch]) -> torch.Tensor:
        """Count the targets of the whole global batch, the same on every rank, on the host."""
        counts = self.objective.count_targets(batches)
        if self.mesh.dp.size() == self.mesh.pp.size() == 1:
            return counts  # without waiting for the device
        counts = on_device(counts, self.mesh.device.torch_device)
        # Not over context-parallel ranks: they have counted the same whole rows, which `on_this_rank` splits later.
        dist.all_reduce(counts, group=self.mesh.dp)
        # With --streaming only the last stage has labels (`exchange.stage_fields`); the other stages count none.
        return broadcast_from_last_stage(counts, self.mesh).cpu()

    def _run(
        self, batches: Sequence[Batch], objective: Objective, counts: torch.Tensor, *, forward_only: bool
    ) -> torch.Tensor:
        """Run all micro-batches of a global batch through the model; return statistics summed over all ranks, on the
        device.
        """
        parts = []
        if batches:
            forward_step = objective.make_forward_step(counts, self.mesh)
            parts = run_batches(self.model, self.mesh, batches, forward_step, forward_only=forward_only)
        # Also without parts, as on all stages but the last: the sum is collective.
        return all_reduce_sum(parts, objective.sums_shape, self.mesh, getattr(objective, "num_maxima", 0))

    def _sum_over_data_parallel(self, *values: int) -> list[int]:
        return list(map(int, self._over_data_parallel(*values).tolist()))

    def _over_data_parallel(self, *values: int) -> torch.Tensor:
        """Return the sums of integers over data-parallel ranks, float64, on the device."""
        # The FLOPs of a step can exceed int64. Integers up to 2^53 are exact in float64.
        total = on_device(torch.tensor(values, dtype=torch.float64), self.mesh.device.torch_device)
        dist.all_reduce(total, group=self.mesh.dp)
        return total

    def summarize(self, figures: Mapping[str, float]) -> None:
        """Send the summary of the run to all metric loggers."""
        for metric_logger in self.metric_loggers:
            metric_logger.summarize(figures)

    def _log_table(self, step: int) -> None:
        """Send the table of a step to the metric loggers that show tables; only the first rank has metric loggers."""
        loggers = [each for each in self.metric_loggers if isinstance(each, TableLogger)]
        if loggers and (table := self.batches.table(step - 1)):
            for metric_logger in loggers:
                metric_logger.log_table(step, table)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Send metrics to all metric loggers."""
        if metrics:
            for metric_logger in self.metric_loggers:
                metric_logger.log(step, metrics)


def _norm(tensor: torch.Tensor) -> torch.Tensor:
    """Return the norm of a tensor in float32, a scalar on its device.

    A CPU would convert the whole tensor to float32; the norms of chunks are combined one by one instead.
    """
    if not tensor.is_cpu:
        return torch.linalg.vector_norm(tensor, dtype=torch.float32)
    norm = torch.zeros((), device=tensor.device)
    for chunk in tensor.flatten().split(2**20):
        norm = torch.hypot(norm, torch.linalg.vector_norm(chunk, dtype=torch.float32))
    return norm


def seed_of_step(seed: int, step: int) -> int:
    """Return the seed of random numbers in a step, such as the dropout of adapters.

    The result depends only on the run's seed and the step, so that a resumed run draws the same numbers. It is the same
    on all ranks; layers derive different seeds per rank where needed (`Adapter.drop`). It is a hash, so that
    neighboring seeds and steps give unrelated numbers.
    """
    return zlib.crc32(f"{seed}/{step}".encode())


@contextmanager
def whole_parameters(model: Sequence[DistributedDataParallel]) -> Iterator[None]:
    """Gather the parameters for use outside of a training step, within this context.

    Outside of this context, with `--overlap_param_gather`, hooks gather them layer by layer in the next forward pass.
    """
    overlapping = [chunk for chunk in model if chunk.ddp_config.overlap_param_gather]
    for chunk in overlapping:
        chunk.disable_forward_pre_hook()
    try:
        yield
    finally:
        for chunk in overlapping:
            chunk.enable_forward_pre_hook()


def _render(metrics: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:.4g}" for name, value in metrics.items())
