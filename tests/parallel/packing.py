"""Compute samples one by one on one process, and the same samples in packed rows with a layout, for `test_packing.py`.

`run` computes many jobs with one start of processes.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from safetensors.torch import load_file

from swiftlite import families
from swiftlite.args.fields import ParallelLayout, RecomputeArgs
from swiftlite.base.heads import Heads
from swiftlite.bridge.hf_config import read_config
from swiftlite.bridge.transfer import load_hf
from swiftlite.data.batch import Batch, collate, collate_packed
from swiftlite.data.sample import Sample, make_sample
from swiftlite.model.build import build_model
from swiftlite.model.forward import shard
from swiftlite.model.gpt import Losses
from swiftlite.model.pipeline import run_pipeline
from swiftlite.model.ranks import all_gather_rows, all_reduce_sum, broadcast_from_last_stage
from swiftlite.plan.layout import length_multiple, sequence_multiple
from swiftlite.runtime.distributed import session
from swiftlite.runtime.mesh import Mesh
from swiftlite.train.batches.exchange import broadcast, stage_fields
from swiftlite.train.methods.next_token import NextTokenObjective
from swiftlite.train.optim import wrap_model
from tests.parallel.launch import launch, open_store, prepare_session
from tests.parallel.parity import save_gradients

LONGEST = 64
"""Maximum length of a sequence, the tiny models' max_position_embeddings."""
# Rows of different lengths, an even number: two stages with two virtual ones each need that.
ROWS = [[1, 13, 24], [7], [LONGEST, 2, 1, 5, 9], [3, 3]]


@dataclass(frozen=True)
class Job:
    """A forward and backward pass over all samples.

    Attributes:
        rows: what a micro-batch is: a packed row of ROWS, the same samples as padded rows, or one sample.
        changed: number of the sample whose tokens and labels are replaced; None changes nothing.
        one_reader: whether only the first rank has the samples, and sends the other ranks what they use.
        layout, recompute: options by name.
    """

    hf_dir: Path
    out_dir: Path
    rows: Literal["packed", "padded", "one by one"] = "packed"
    changed: int | None = None
    one_reader: bool = False
    layout: dict[str, Any] = field(default_factory=dict)
    recompute: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Result:
    """The result of a job.

    Attributes:
        losses: losses of each sample, float32 [K, length]: the trunk's loss per token, then the loss of each depth.
        metrics: metrics over all samples, as a training step reports them.
        gradients: gradients by HF name.
    """

    losses: list[torch.Tensor]
    metrics: dict[str, float]
    gradients: dict[str, torch.Tensor]


def make_rows(vocab_size: int, changed: int | None = None) -> list[list[Sample]]:
    """Return samples in which most tokens are trained, with different loss weights."""
    random, number, rows = np.random.RandomState(0), 0, []
    for lengths in ROWS:
        rows.append([])
        for length in lengths:
            ids = random.randint(0, vocab_size, length)
            weights = random.choice([0.0, 0.5, 1.0, 1.0], length)
            rows[-1].append(make_sample((ids + (number == changed)) % vocab_size, weights))
            number += 1
    return rows


def run(num_processes: int, jobs: Sequence[Job]) -> list[Result]:
    """Compute the jobs with one start of processes. Jobs with the same layout share a session."""
    order = sorted(range(len(jobs)), key=lambda number: _layout(jobs[number]))
    sessions = [list(same) for _, same in groupby([jobs[number] for number in order], _layout)]
    stores = [open_store() for _ in sessions]
    ranks = launch(num_processes, compute_all, sessions, [store.port for store in stores])
    results: dict[int, Result] = {}
    for number, *parts in zip(order, *ranks, strict=True):
        losses = next(losses for losses, _ in parts if losses)  # of the last stage
        metrics = parts[0][1]
        assert all(other == metrics for _, other in parts), f"{jobs[number].out_dir}: ranks report different metrics"
        results[number] = Result(losses, metrics, load_file(jobs[number].out_dir / "model.safetensors"))
    return [results[number] for number in range(len(jobs))]


def _layout(job: Job) -> list[tuple[str, Any]]:
    return sorted(job.layout.items())


def compute_all(
    sessions: Sequence[Sequence[Job]], ports: Sequence[int]
) -> list[tuple[list[torch.Tensor], dict[str, float]]]:
    """Compute all jobs in this process."""
    results = []
    for jobs, port in zip(sessions, ports, strict=True):
        prepare_session(port)
        with session(ParallelLayout(**jobs[0].layout), timeout_minutes=2) as mesh:
            results += [compute(job, mesh) for job in jobs]
    return results


def compute(job: Job, mesh: Mesh) -> tuple[list[torch.Tensor], dict[str, float]]:
    """Compute one job. Losses are returned only on ranks of the last stage."""
    hf_config = read_config(job.hf_dir)
    family = families.get(hf_config)
    depth = Heads.from_config(hf_config).layers
    rows = make_rows(hf_config["vocab_size"], job.changed)
    if job.one_reader:
        rows = broadcast(
            rows if torch.distributed.get_rank() == 0 else None,
            stage_fields(mesh.layout, depth),
            pipeline_group=mesh.pp,
            stage_group=mesh.tp_cp,
            device=mesh.device.torch_device,
        )
    model = build_model(
        family.architecture(hf_config),
        hf_config,
        mesh=mesh,
        dtype=torch.float32,
        heads=Heads(depth),
        drafting=family.mtp.drafting,
        recompute=RecomputeArgs(**job.recompute),
    )
    load_hf(model, job.hf_dir, family, hf_config)
    wrapped = wrap_model(model, mesh, torch.float32)
    for chunk in wrapped:
        chunk.zero_grad_buffer()
        chunk.config.finalize_model_grads_func = finalize_model_grads
    if job.rows == "one by one":
        rows = [[sample] for row in rows for sample in row]
    lay_out = pack if job.rows == "packed" else pad
    batches = [lay_out(row, mesh.layout, depth) for row in rows]
    objective = NextTokenObjective(Heads(depth), 0.5)
    losses, sums = forward_backward(wrapped, mesh, objective, batches)
    save_gradients(wrapped, model, job.out_dir, family, hf_config)
    if losses:
        losses = [
            part for row, batch, loss in zip(rows, batches, losses, strict=True) for part in split(loss, batch, row)
        ]
    return losses, objective.means(sums)


def split(loss: torch.Tensor, batch: Batch, row: Sequence[Sample]) -> list[torch.Tensor]:
    """Return the part of each sample in a micro-batch's losses, without padding."""
    num_rows, length = batch.position_ids_BS.shape
    starts = range(0, num_rows * length, length) if batch.cu_seqlens is None else batch.cu_seqlens.tolist()
    loss_KT = loss.reshape(-1, num_rows * length)
    return [loss_KT[:, start : start + len(sample)] for start, sample in zip(starts, row, strict=False)]


def pack(row: Sequence[Sample], layout: ParallelLayout, depth: int) -> Batch:
    return collate_packed(
        row,
        3,
        num_drafts=depth,
        pad_each_to_multiple_of=sequence_multiple(layout),
        pad_to_multiple_of=length_multiple(layout),
    )


def pad(row: Sequence[Sample], layout: ParallelLayout, depth: int) -> Batch:
    return collate(row, 0, num_drafts=depth, pad_to_multiple_of=length_multiple(layout))


def forward_backward(
    wrapped: Sequence[DistributedDataParallel],
    mesh: Mesh,
    objective: NextTokenObjective,
    batches: Sequence[Batch],
    **options: Any,
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Run the trainer's forward step with megatron-core's schedule.

    Args:
        options: options of `run_pipeline`.

    Returns:
        On the last stage, the per-token losses [K * B, S] of whole rows for each micro-batch. Also the statistics,
            summed over all micro-batches.
    """
    losses = []
    train_step = objective.make_forward_step(broadcast_from_last_stage(objective.count_targets(batches), mesh), mesh)

    def forward_step(iterator: Iterator[Batch], chunk: torch.nn.Module):
        batch = next(iterator)
        output, loss_func = train_step(iter([batch]), chunk)

        def collect(output: Losses):
            heads = [
                all_gather_rows(head.loss_BS.detach(), mesh, batch.cu_seqlens) for head in (output.main, *output.mtp)
            ]
            losses.append(torch.cat(heads))
            return loss_func(output)

        return output, collect

    parts = run_pipeline(
        wrapped,
        mesh,
        forward_step,
        [iter([shard(batch, mesh.cp.rank(), mesh.cp.size()) for batch in batches]) for _ in wrapped],
        shapes=[batch.position_ids_BS.shape for batch in batches],
        forward_only=False,
        **options,
    )
    return losses, all_reduce_sum(parts, objective.sums_shape, mesh)
