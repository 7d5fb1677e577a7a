"""Compare every parallel layout with one process: losses, gradients and weights of the same few steps.

`run` computes many jobs with one start of processes; `compare` compares the result of a job with that of one process.
scripts/parity.py prints the table, and test_parity.py tests a part of it.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.distributed.param_and_grad_buffer import shard_buffer
from safetensors.torch import load_file, save_file

from swiftlite import families
from swiftlite.args.commands import SftArgs
from swiftlite.args.fields import IndexerArgs, MoeArgs, RecomputeArgs
from swiftlite.base.heads import Heads
from swiftlite.base.lora import Lora
from swiftlite.bridge.hf_config import read_config
from swiftlite.bridge.saving import save_hf
from swiftlite.bridge.transfer import load_hf
from swiftlite.data.batch import Extra
from swiftlite.data.packing.sampler import Sampler
from swiftlite.data.sample import Sample, make_sample
from swiftlite.model.build import build_model
from swiftlite.model.gpt import GPTModel
from swiftlite.model.layers.lora import add_adapters, gather_adapters
from swiftlite.model.trunk import COMPUTED
from swiftlite.plan.cost.flops import training_flops
from swiftlite.plan.kernels import Kernels
from swiftlite.plan.layout import group_of, layout_of, layout_problems, process_problems
from swiftlite.plan.megatron_config import settings_of
from swiftlite.plan.run import make_plan, make_schedule, row_multiple_of
from swiftlite.plan.trainable import trainable_of
from swiftlite.runtime.distributed import session
from swiftlite.train.batches.micro_batches import Batches
from swiftlite.train.batches.train_batches import TrainBatches
from swiftlite.train.checkpoint.checkpointer import Checkpointer, load_checkpoint
from swiftlite.train.checkpoint.state import CheckpointState
from swiftlite.train.hidden_state_cache import HiddenStateCache
from swiftlite.train.methods.next_token import NextTokenObjective
from swiftlite.train.optim import make_optimizer, wrap_model
from swiftlite.train.trainer import Trainer, whole_parameters
from tests.kinds import LAYOUTS, Layout
from tests.parallel.launch import launch, open_store, prepare_session
from tests.tiny import HYBRID, make_tiny_hf, per_expert
from tests.untimed import untimed

Key = TypeVar("Key", bound=Hashable)
STEPS = 5
FEW_STEPS = (1, 2)
"""First and last step of a job in tests. The steps test gradients, the first update, and an update with moments."""
# Adam divides each gradient by its own size: where a gradient is nothing but rounding (1e-9), so would be the step,
# with any sign. An epsilon far above that noise and below true gradients (1e-3) keeps weights comparable.
OPTIONS: dict[str, Any] = {
    "torch_dtype": "float32",
    "micro_batch_size": 1,
    "global_batch_size": 8,
    "train_iters": STEPS,
    "lr": 1e-3,
    "adam_eps": 1e-5,
    "lr_decay_style": "constant",
    "lr_warmup_fraction": 0.0,
    "mtp_loss_scaling_factor": 0.3,
    "dataset_shuffle": False,
}
SMALL: dict[str, Any] = {"global_batch_size": 4}
"""Options of a job of the tests: half of the time, and still as many micro-batches as any pipeline has stages."""
# A tiny model with linear attention blows roundings up: one of every weight moves the gradient norm by 9e-4 to 8e-3 in
# five steps of 1e-3, by 4e-6 to 2e-4 in five of this size, unless a token finds another expert. The noise of its
# gradients is larger too: with an epsilon of 1e-5 one number among 8,192 of an embedding went 4e-2 of the largest
# change another way, with this one 2e-3.
HYBRID_OPTIONS: dict[str, Any] = {"lr": 1e-4, "adam_eps": 1e-4}
SIZES: dict[str, Any] = {"num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}


# Recomputation of whole layers, by method and number.
FULL = {
    f"{method} {number}": {
        "recompute_granularity": "full",
        "recompute_method": method,
        "recompute_num_layers": number,
    }
    for method in ("uniform", "block")
    for number in (1, 2, 4)
}
RECOMPUTED = {f"full {name}": Layout(1, FULL[name]) for name in ("uniform 1", "uniform 2", "block 1")}
CASES = LAYOUTS | RECOMPUTED | {"selective": Layout(1, {"recompute_granularity": "selective"})}
"""The rows of the table. ONE_PROCESS is the case with other kernels than the process with which all are compared."""
TP2_SP = LAYOUTS["TP2+SP"].options


@dataclass(frozen=True)
class Job:
    """Some training steps of a model with a layout.

    Attributes:
        out_dir: directory of this job. Gradients of the first step and weights after the last step are written there as
            HF files.
        options: options of `swiftlite megatron sft` in addition to OPTIONS. MTP in a layout string stands for all MTP
            layers.
        steps: the first and the last step. If the last is before the first, no step runs.
        resume: checkpoint to resume from, of any layout.
        kernels: kernels of the layers.
        save: whether `checkpoint-N` is written to out_dir after the last step.
        samples: training samples with images; without them, the result of `make_samples`.
        extras: tensors that batches of `samples` contain.
    """

    hf_dir: Path
    out_dir: Path
    options: dict[str, Any] = field(default_factory=dict)
    steps: tuple[int, int] = (1, STEPS)
    resume: Path | None = None
    save: bool = False
    kernels: Kernels = Kernels()
    samples: Sequence[Sample] = ()
    extras: Sequence[Extra] = ()

    def args(self, depth: int) -> SftArgs:
        """Return the options of the job as the command would receive them."""
        family = families.get(read_config(self.hf_dir)).name
        options = OPTIONS | (HYBRID_OPTIONS if family in HYBRID else {}) | self.options
        if stages := options.get("pipeline_model_parallel_layout"):
            options["pipeline_model_parallel_layout"] = stages.replace("MTP", "m" * depth)
        return SftArgs(model=str(self.hf_dir), **options)


@dataclass(frozen=True)
class Result:
    """The result of a job."""

    metrics: list[dict[str, float]]
    """Metrics of each step."""
    gradients: dict[str, torch.Tensor]
    """Gradients of the first step after clipping, by HF name; empty if no step ran."""
    weights: dict[str, torch.Tensor]
    """Weights after the last step, by HF name."""
    first_changes: dict[str, torch.Tensor] = field(default_factory=dict)
    """What Adam makes of `gradients` in a first step, without weight decay, by HF name."""


def make_model(directory: Path, family: str, depth: int = 1, tied: bool = False, **config: Any) -> Path:
    """Write a tiny model of the family with 4 layers."""
    return make_tiny_hf(directory, family, depth=depth, tied=tied, **SIZES, **config)


def make_samples(vocab_size: int) -> list[Sample]:
    """Return rows of 6 to 24 tokens whose first third is a prompt."""
    random = np.random.RandomState(0)
    samples = []
    for _ in range(STEPS * OPTIONS["global_batch_size"]):
        length = random.randint(6, 25)
        weights = np.ones(length, np.float32)
        weights[: length // 3] = 0
        samples.append(make_sample(random.randint(0, vocab_size, length), weights))
    return samples


def refusal(job: Job, num_processes: int) -> str:
    """Return the rules' reason why a model does not support a job's layout; empty if it does."""
    hf_config = read_config(job.hf_dir)
    depth = Heads.from_config(hf_config).layers
    layout = layout_of(job.args(depth))
    architecture = families.get(hf_config).architecture(hf_config)
    problems = layout_problems(layout, architecture, depth) or process_problems(layout, num_processes)
    return "; ".join(problem for problem, _ in problems)


def run(num_processes: int, jobs: Sequence[Job], launch: Callable[..., list[Any]] = launch) -> list[Result]:
    """Compute the jobs in order, with one start of processes."""
    if not jobs:
        return []  # of a layout that no selected test has
    # One each: the next session would read the addresses that this one left.
    stores = [open_store() for _ in jobs]
    ranks = launch(num_processes, compute_all, jobs, [store.port for store in stores])
    results = []
    for job, *metrics in zip(jobs, *ranks, strict=True):
        first, *others = map(_without_speed, metrics)
        assert all(other == first for other in others), f"{job.out_dir}: ranks report different metrics"
        files = [job.out_dir / part / "model.safetensors" for part in _PARTS]
        gradients, weights = (load_file(file) if file.exists() else {} for file in files)
        results.append(Result(first, gradients, weights, first_changes(job, gradients)))
    return results


def run_each(jobs: Mapping[int, Mapping[Key, Job]], launch: Callable[..., list[Any]] = launch) -> dict[Key, Result]:
    """Compute jobs by their numbers of processes; return the results by the names of the jobs."""
    results: dict[Key, Result] = {}
    for num_processes, queue in jobs.items():
        results |= zip(queue, run(num_processes, list(queue.values()), launch), strict=True)
    return results


def first_changes(job: Job, gradients: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the changes that the first step of Adam makes in the weights, without weight decay; empty for a resumed
    run, whose moments are not 0."""
    if job.resume:
        return {}
    args = job.args(0)
    assert args.lr is not None  # OPTIONS contain it
    return {key: -args.lr * tensor / (tensor.abs() + args.adam_eps) for key, tensor in gradients.items()}


_PARTS = ("gradients", "weights")


def _without_speed(metrics: list[dict[str, float]]) -> list[dict[str, float]]:
    return [untimed(step) for step in metrics]


def compute_all(jobs: Sequence[Job], ports: Sequence[int]) -> list[list[dict[str, float]]]:
    """Compute all jobs in this process, each in a separate session; return the metrics of all steps."""
    metrics = []
    for job, port in zip(jobs, ports, strict=True):
        prepare_session(port)
        metrics.append(compute(job))
    return metrics


def compute(job: Job) -> list[dict[str, float]]:
    """Compute one job in the process groups of its layout."""
    hf_config = read_config(job.hf_dir)
    family = families.get(hf_config)
    if job.samples:
        family = family.with_images(hf_config)
    depth = Heads.from_config(hf_config).layers
    args = job.args(depth)
    with session(
        layout_of(args),
        tied_embeddings=bool(hf_config.get("tie_word_embeddings")),
        num_distributed_optimizer_instances=args.num_distributed_optimizer_instances,
        timeout_minutes=2,
    ) as mesh:
        dtype = getattr(torch, args.torch_dtype)
        plan = make_plan(args, torch.distributed.get_world_size(), Heads.from_config(hf_config))
        multiple = row_multiple_of(plan.layout, plan.packing, False, job.kernels.low_precision)
        plan = replace(plan, kernels=job.kernels, row_multiple=multiple)
        samples = job.samples or make_samples(hf_config["vocab_size"])
        trainable = trainable_of(args, plan.heads, has_tower=bool(job.samples))
        model = build_model(
            family.architecture(hf_config),
            hf_config,
            mesh=mesh,
            dtype=dtype,
            heads=plan.heads,
            recompute=group_of(args, RecomputeArgs),
            moe=group_of(args, MoeArgs),
            indexer=group_of(args, IndexerArgs),
            freeze_trunk=trainable.freezes_trunk,
            drafting=family.drafting_of(hf_config, plan.heads),
            mtp_loss=plan.mtp_loss,
            kernels=job.kernels,
            mcore_config=settings_of(args.megatron_config, "TransformerConfig"),
        )
        trainable.apply(model)
        load_hf(model, job.hf_dir, family, hf_config)
        if plan.lora:
            add_adapters(model, plan.lora, family.rows(hf_config, depth))
            trainable_of(args, plan.heads, plan.lora).apply(model)
        ddp_settings = settings_of(args.megatron_config, "DistributedDataParallelConfig")
        wrapped = wrap_model(model, mesh, dtype, args, ddp_settings)
        schedule = make_schedule(args, len(samples))
        optimizer, scheduler = make_optimizer(args, plan, schedule, wrapped, mesh)
        flops = training_flops(hf_config, plan.heads)
        batches = Batches(plan, mesh.dp.rank(), 0, flops, job.extras)
        rows = batches.rows(samples)
        states = args.cache_trunk_states
        trunk = HiddenStateCache(Path(states), mesh, COMPUTED) if states else COMPUTED
        checkpointer = Checkpointer(
            job.out_dir,
            mesh,
            model,
            optimizer,
            CheckpointState(step=0, mtp_num_layers=plan.heads.layers, torch_dtype=args.torch_dtype),
            is_async=args.async_save,
        )
        trainer = Trainer(
            mesh=mesh,
            model=wrapped,
            objective=NextTokenObjective(plan.heads, args.mtp_loss_scaling_factor, trunk),
            optimizer=optimizer,
            scheduler=scheduler,
            plan=plan,
            schedule=schedule,
            batches=TrainBatches(
                partial(batches.train, rows, Sampler(len(rows), plan.global_batch_size, args.seed, False))
            ),
            eval_batches=[],
            flops=flops,
            metric_loggers=[],
            logging_steps=1,
            checkpointer=checkpointer,
        )
        first, last = job.steps
        if job.resume:
            load_checkpoint(job.resume, mesh, model, optimizer)
            trainer.consumed = CheckpointState.read(job.resume).consumed
            scheduler.step(increment=first - 1)
            check_embeddings(model)
        metrics = []
        for step in range(first, last + 1):
            metrics.append(trainer.step(step))
            if step == first:
                save_gradients(wrapped, model, job.out_dir / "gradients", family, hf_config, plan.lora)
        with whole_parameters(wrapped):
            if job.save:
                checkpointer.save(last, {"consumed": trainer.consumed})
                trainer.close()
            check_embeddings(model)
            _save(model, job.out_dir / "weights", family, hf_config, plan.lora)
    return metrics


def _save(model: Sequence[GPTModel], out_dir: Path, family, hf_config, lora: Lora | None) -> None:
    """Write the trained weights: the model, or its adapters."""
    if lora is None:
        save_hf(model, out_dir, family, hf_config, dtypes="float32")
        return
    tensors = gather_adapters(model, lora, family.rows(hf_config))
    if tensors:  # on the first rank
        out_dir.mkdir(parents=True)
        save_file(tensors, out_dir / "model.safetensors")


def check_embeddings(model: Sequence[GPTModel]) -> None:
    """Check that all copies of the embedding in a pipeline (first stage, MTP layers, tied output layer) are bitwise
    identical.
    """
    groups = model[0].pg_collection
    group: Any = groups.embd
    if groups.pp.size() == 1 or group is None:
        return
    ours = [
        parameter.detach()
        for chunk in model
        for name, parameter in chunk.named_parameters()
        if name == "embedding.word_embeddings.weight"
        or (name == "output_layer.weight" and chunk.share_embeddings_and_output_weights)
    ]
    assert len(ours) == 1, "a rank of the embedding group holds one copy"
    copies = [torch.empty_like(ours[0]) for _ in range(group.size())]
    torch.distributed.all_gather(copies, ours[0], group=group)
    assert all(torch.equal(copy, ours[0]) for copy in copies), "copies of the embedding differ"


def save_gradients(
    wrapped: Sequence[DistributedDataParallel],
    model: Sequence[GPTModel],
    out_dir: Path,
    family,
    hf_config,
    lora: Lora | None = None,
) -> None:
    """Write the gradients as HF files. They temporarily replace the weights, so that `save_hf` writes them."""
    for chunk in wrapped:
        if chunk.ddp_config.use_distributed_optimizer:
            _gather_gradients(chunk)
    parameters = [parameter for chunk in model for parameter in chunk.parameters()]
    kept = [parameter.data for parameter in parameters]
    for parameter in parameters:
        gradient = getattr(parameter, "main_grad", None)
        parameter.data = torch.zeros_like(parameter.data) if gradient is None else gradient.to(parameter.dtype)
    _save(model, out_dir, family, hf_config, lora)
    for parameter, data in zip(parameters, kept, strict=True):
        parameter.data = data


def _gather_gradients(chunk: DistributedDataParallel) -> None:
    """Gather gradients.

    With the distributed optimizer, each data-parallel rank has the sum of only a part of each bucket.
    """
    gradients: Any = chunk  # `buffers` is taken for torch's method
    for buffer in (*gradients.buffers, *gradients.expert_parallel_buffers):
        group = buffer.data_parallel_group
        for bucket in buffer.buckets:
            parts = shard_buffer(bucket.grad_data, group.size())
            torch.distributed.all_gather_into_tensor(bucket.grad_data, parts[group.rank()].clone(), group=group)


# Largest differences from one process in float32, where a sum over ranks or stages has another order than in one
# process. Losses are means over some 80 targets: a few units of the last place (6e-8). A gradient is a sum over
# micro-batches of products through 5 layers, each rounded on the way: a hundred units, seen on its tensor's largest
# number. A weight is seen on the largest change that training made in its tensor, about 3e-3, while its own last place
# is 1e-7: 3e-5 is rounding already. Before that, what Adam makes of the two gradients of the first step is subtracted:
# it enlarges the rounding of gradients that are smaller than its epsilon. What a wrong boundary or a missing sum gives
# is above 1e-2.
BOUNDS = {
    "loss": 1e-6,
    "mtp_loss": 1e-6,
    "grad_norm_1": 1e-6,
    "grad_norm_5": 1e-5,
    "gradients": 2e-5,
    "weights": 1e-3,
}


# Linear attention ends in a norm of each head, and what a sequence's first tokens read is nearly nothing. One rounding
# of every weight moves gradients of a tiny Qwen3-Next by 9e-5 of their largest, those of other mixtures by 3e-6.
# Of gpt-oss, the gradient of a router's bias is a sum that nearly cancels (3e-5 of its largest entry were measured).
def sensitivity(family: str) -> float:
    """Return the factor by which rounding changes this family's results more than those of other families."""
    if family == "gpt_oss":
        return 2.0
    return 30.0 if family in HYBRID else 1.0


def bounds_of(family: str) -> dict[str, float]:
    """Return the differences that rounding can cause for a family, by the names of BOUNDS."""
    return {name: bound * sensitivity(family) for name, bound in BOUNDS.items()}


def compare(one: Result, other: Result, source: dict[str, torch.Tensor]) -> dict[str, float]:
    """Return the largest relative differences between a case and the single process, by the names of BOUNDS.

    Args:
        source: the weights before training.
    """
    steps = range(len(one.metrics))

    def metric(name: str, step: int) -> float:
        mine, its = one.metrics[step][name], other.metrics[step][name]
        return abs(mine - its) / max(abs(mine), 1e-12)

    mtp = [name for name in one.metrics[0] if name.startswith("mtp_") and name.endswith("_loss")]
    if not one.weights.keys() <= source.keys():
        source = per_expert(source)  # files of Qwen3-VL have stacks, exports in one dtype do not
    changes = {key: tensor - source[key].float() for key, tensor in one.weights.items()}
    explained = {key: change - one.first_changes[key] for key, change in other.first_changes.items()}
    return {
        "loss": max(metric("loss", step) for step in steps),
        "mtp_loss": max((metric(name, step) for name in mtp for step in steps), default=0.0),
        "grad_norm_1": metric("grad_norm", steps[0]),
        "grad_norm_5": metric("grad_norm", steps[-1]),
        "gradients": max(_tensor_differences(one.gradients, other.gradients, one.gradients).values(), default=0.0),
        "weights": max(_tensor_differences(one.weights, other.weights, changes, explained).values(), default=0.0),
    }


def beyond(
    one: Result,
    other: Result,
    source: dict[str, torch.Tensor] | None = None,
    bounds: dict[str, float] | None = None,
) -> dict[str, float]:
    """Return the differences that are larger than rounding can cause, by the names of BOUNDS.

    Args:
        source: weights before the first step; none for adapters, whose changes are compared as they are.
        bounds: other bounds than BOUNDS.
    """
    if source is None:
        source = {key: torch.zeros_like(tensor) for key, tensor in one.weights.items()}
    found = compare(one, other, source)
    return {name: found[name] for name, bound in (bounds or BOUNDS).items() if not found[name] <= bound}


def _tensor_differences(
    one: dict[str, torch.Tensor],
    other: dict[str, torch.Tensor],
    unit: dict[str, torch.Tensor],
    explained: dict[str, torch.Tensor] | None = None,
) -> dict[str, float]:
    """Return the largest difference of each tensor, relative to the largest number of the tensor in `unit`.

    Args:
        explained: a part of the difference that is subtracted.
    """
    assert one.keys() == other.keys()
    found = {}
    for key, tensor in one.items():
        difference = other[key] - tensor
        if explained and key in explained:
            difference = difference - explained[key]
        found[key] = float(difference.abs().max() / unit[key].abs().max().clamp(min=1e-12))
    return found
