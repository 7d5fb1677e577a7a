"""Every parallel layout against one process: losses, gradients and weights of the same few steps.

`compute` runs in each process of a layout; `compare` looks at what it left behind. scripts/parity.py prints the table.
"""

import dataclasses
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from megatron.core import parallel_state
from safetensors.torch import load_file

from swiftlite import families
from swiftlite.args.commands import SftArgs
from swiftlite.args.fields import MoeArgs, RecomputeArgs
from swiftlite.args.layout import group_of, layout_of
from swiftlite.args.plan import make_plan, make_schedule
from swiftlite.bridge.hf_config import read_config
from swiftlite.bridge.transfer import load_hf, save_hf
from swiftlite.data.sample import Sample, make_sample
from swiftlite.data.sampler import Sampler
from swiftlite.model.build import build_model
from swiftlite.runtime.distributed import session
from swiftlite.train.batches import Batches
from swiftlite.train.checkpoint import Checkpointer, load_checkpoint
from swiftlite.train.optim import make_optimizer, wrap_model
from swiftlite.train.trainer import Trainer, whole_parameters
from tests.parallel.launch import launch
from tests.tiny import make_tiny_hf

STEPS = 5
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
SIZES: dict[str, Any] = {"num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}


@dataclass(frozen=True)
class Case:
    """One column of the table: a layout on so many processes."""

    num_processes: int
    options: dict[str, Any] = field(default_factory=dict)
    needs: str = ""
    """What a model must have for it: experts."""


CASES: dict[str, Case] = {
    "TP2": Case(2, {"tensor_model_parallel_size": 2}),
    "TP2+SP": Case(2, {"tensor_model_parallel_size": 2, "sequence_parallel": True}),
    "PP2": Case(2, {"pipeline_model_parallel_size": 2}),
    "PP4": Case(4, {"pipeline_model_parallel_size": 4}),
    "PP2xVPP2": Case(2, {"pipeline_model_parallel_size": 2, "num_virtual_stages_per_pipeline_rank": 2}),
    "CP2": Case(2, {"context_parallel_size": 2}),
    "DP2": Case(2),
    "DP2+distopt": Case(2, {"use_distributed_optimizer": True}),
    "DP2+overlap": Case(
        2, {"use_distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True}
    ),
    "EP2": Case(2, {"expert_model_parallel_size": 2}, needs="experts"),
    "EP2xTP2": Case(
        2,
        {"expert_model_parallel_size": 2, "tensor_model_parallel_size": 2, "sequence_parallel": True},
        needs="experts",
    ),
    "PP2xTP2": Case(4, {"pipeline_model_parallel_size": 2, "tensor_model_parallel_size": 2, "sequence_parallel": True}),
    "PP2 MTP apart": Case(2, {"pipeline_model_parallel_size": 2, "pipeline_model_parallel_layout": "Et*4|MTP L"}),
    "PP3 MTP middle": Case(3, {"pipeline_model_parallel_size": 3, "pipeline_model_parallel_layout": "Et*4|MTP|L"}),
    "full uniform 1": Case(1, {"recompute_granularity": "full", "recompute_num_layers": 1}),
    "full uniform 2": Case(1, {"recompute_granularity": "full", "recompute_num_layers": 2}),
    "full block 1": Case(1, {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 1}),
    "selective": Case(1, {"recompute_granularity": "selective"}),
}


@dataclass(frozen=True)
class Result:
    """What a case left behind."""

    metrics: list[dict[str, float]]
    """Of each step."""
    gradients: dict[str, torch.Tensor]
    """Of the first step, by HF name."""
    weights: dict[str, torch.Tensor]
    """After all steps, by HF name."""


def make_samples(vocab_size: int) -> list[Sample]:
    """Rows of 6 to 24 tokens whose first third is a prompt."""
    random = np.random.RandomState(0)
    samples = []
    for _ in range(STEPS * OPTIONS["global_batch_size"]):
        length = random.randint(6, 25)
        weights = np.ones(length, np.float32)
        weights[: length // 3] = 0
        samples.append(make_sample(random.randint(0, vocab_size, length), weights))
    return samples


def compute(
    hf_dir: Path,
    out_dir: Path,
    options: dict[str, Any],
    steps: tuple[int, int] = (1, STEPS),
    resume: Path | None = None,
    save: bool = False,
) -> list[dict[str, float]]:
    """What each process does: some steps; gradients of the first and weights after the last are written as HF files.

    Args:
        steps: the first and the last one.
        resume: a checkpoint to go on from, of whatever layout.
        save: write `checkpoint-N` into out_dir after the last step.

    Returns:
        Metrics of each step.
    """
    hf_config = read_config(hf_dir)
    family = families.get(hf_config)
    depth = family.mtp_depth(hf_config)
    stages = options.get("pipeline_model_parallel_layout")
    if stages:
        options = options | {"pipeline_model_parallel_layout": stages.replace("MTP", "m" * depth)}
    args = SftArgs(model=str(hf_dir), **(OPTIONS | options))
    with session(layout_of(args), tied_embeddings=bool(hf_config.get("tie_word_embeddings"))) as device:
        dtype = getattr(torch, args.torch_dtype)
        plan = make_plan(args, torch.distributed.get_world_size(), depth)
        samples = make_samples(hf_config["vocab_size"])
        model = build_model(
            family.transformer_config(hf_config),
            hf_config,
            device=device,
            dtype=dtype,
            mtp_num_layers=depth,
            layout=plan.layout,
            recompute=group_of(args, RecomputeArgs),
            moe=group_of(args, MoeArgs),
            heads_only=args.mtp_mode == "heads_only",
        )
        load_hf(model, hf_dir, family, hf_config)
        wrapped = wrap_model(model, dtype, args)
        schedule = make_schedule(args, len(samples))
        optimizer, scheduler = make_optimizer(args, plan, schedule, wrapped, device)
        sampler = Sampler(len(samples), plan.global_batch_size, args.seed, shuffle=False)
        batches = Batches(plan, parallel_state.get_data_parallel_rank(), pad_token_id=0)
        trainer = Trainer(
            model=wrapped,
            optimizer=optimizer,
            scheduler=scheduler,
            plan=plan,
            schedule=schedule,
            mtp_loss_scaling_factor=args.mtp_loss_scaling_factor,
            train_batches=partial(batches.train, samples, sampler),
            eval_batches=[],
            device=device,
            sinks=[],
            logging_steps=1,
            checkpointer=None,
        )
        first, last = steps
        if resume:
            load_checkpoint(resume, model, optimizer)
            scheduler.step(increment=first - 1)
        metrics = [trainer.step(first)]
        if not args.use_distributed_optimizer:  # there each rank has the sum of a part of the gradients only
            _save_gradients(model, out_dir / "gradients", family, hf_config)
        metrics += [trainer.step(step) for step in range(first + 1, last + 1)]
        with whole_parameters(wrapped):
            if save:
                Checkpointer(out_dir, model, optimizer, {}).save(last)
            save_hf(model, out_dir / "weights", family, hf_config, dtypes="float32")
    return metrics


def _save_gradients(model, out_dir: Path, family, hf_config) -> None:
    """The gradients as the bridge would write the weights: put in their place for a moment."""
    parameters = [parameter for chunk in model for parameter in chunk.parameters()]
    kept = [parameter.data for parameter in parameters]
    for parameter in parameters:
        gradient = getattr(parameter, "main_grad", None)
        parameter.data = torch.zeros_like(parameter.data) if gradient is None else gradient.to(parameter.dtype)
    save_hf(model, out_dir, family, hf_config, dtypes="float32")
    for parameter, data in zip(parameters, kept, strict=True):
        parameter.data = data


def run(hf_dir: Path, out_dir: Path, num_processes: int, options: dict[str, Any], *more: Any) -> Result:
    """Run a case in processes of its own; `more` goes to `compute`."""
    out_dir.mkdir(parents=True)
    metrics = launch(num_processes, compute, hf_dir, out_dir, options, *more)
    read = {
        part: load_file(out_dir / part / "model.safetensors") if (out_dir / part).exists() else {}
        for part in ("gradients", "weights")
    }
    first, *others = map(_without_speed, metrics)
    assert all(other == first for other in others), "ranks report different metrics"
    return Result(first, read["gradients"], read["weights"])


def _without_speed(metrics: list[dict[str, float]]) -> list[dict[str, float]]:
    return [{name: value for name, value in step.items() if name != "tokens_per_second"} for step in metrics]


@dataclass(frozen=True)
class Difference:
    """Largest differences of a case from one process."""

    loss: float
    mtp_loss: float
    grad_norm_1: float
    grad_norm_5: float
    """All relative."""
    gradients: float
    """Of one number, relative to the largest number of its tensor."""
    weights: float
    """Of one number, absolute."""

    @property
    def worst(self) -> float:
        return max(value for value in dataclasses.astuple(self) if value == value)


def compare(one: Result, other: Result) -> Difference:
    """How far a case is from the single process."""

    def relative(name: str, step: int) -> float:
        mine, its = one.metrics[step][name], other.metrics[step][name]
        return abs(mine - its) / max(abs(mine), 1e-12)

    mtp = [name for name in one.metrics[0] if name.startswith("mtp_") and name.endswith("_loss")]
    assert one.weights.keys() == other.weights.keys()
    return Difference(
        loss=max(relative("loss", step) for step in range(STEPS)),
        mtp_loss=max((relative(name, step) for name in mtp for step in range(STEPS)), default=0.0),
        grad_norm_1=relative("grad_norm", 0),
        grad_norm_5=relative("grad_norm", STEPS - 1),
        gradients=max(
            (
                float((one.gradients[key] - tensor).abs().max() / one.gradients[key].abs().max().clamp(min=1e-12))
                for key, tensor in other.gradients.items()
            ),
            default=float("nan"),
        ),
        weights=max(float((one.weights[key] - tensor).abs().max()) for key, tensor in other.weights.items()),
    )


def make_model(directory: Path, family: str, depth: int = 1, tied: bool = False) -> Path:
    """A tiny model of the family with 4 layers."""
    return make_tiny_hf(directory, family, depth=depth, tied=tied, **SIZES)
