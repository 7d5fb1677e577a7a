"""Define models for stages to train: shapes of published models, with random weights that are drawn on the device."""

import gc
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.autograd import DeviceType  # pyright: ignore[reportPrivateImportUsage]
from torch.profiler import ProfilerActivity

from swiftlite.args.commands import SftArgs
from swiftlite.args.fields import MoeArgs, RecomputeArgs
from swiftlite.base.heads import Heads
from swiftlite.bridge.transfer import load_hf
from swiftlite.data.packing.sampler import Sampler
from swiftlite.data.sample import Sample, make_sample
from swiftlite.families import index
from swiftlite.model.build import build_model
from swiftlite.model.layers.lora import add_adapters
from swiftlite.plan.cost.flops import training_flops
from swiftlite.plan.kernels import largest_head, this_machine
from swiftlite.plan.layout import group_of, layout_of
from swiftlite.plan.run import make_plan, make_schedule
from swiftlite.plan.trainable import trainable_of
from swiftlite.runtime.distributed import session
from swiftlite.train.batches.micro_batches import Batches
from swiftlite.train.batches.train_batches import TrainBatches
from swiftlite.train.methods.next_token import NextTokenObjective
from swiftlite.train.optim import make_optimizer, wrap_model
from swiftlite.train.trainer import Trainer

WAITS = ("aten::_local_scalar_dense", "aten::nonzero", "cudaStreamSynchronize", "cudaDeviceSynchronize")
"""Operations for which the host waits."""

_QWEN3 = {
    "model_type": "qwen3",
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "max_position_embeddings": 40960,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
}


def _qwen3(hidden: int, width: int, layers: int, heads: int, **others: Any) -> dict[str, Any]:
    sizes = {"hidden_size": hidden, "intermediate_size": width, "num_hidden_layers": layers}
    return _QWEN3 | sizes | {"num_attention_heads": heads} | others


SHAPES: dict[str, dict[str, Any]] = {
    "0.6B": _qwen3(1024, 3072, 28, 16),
    "1.7B": _qwen3(2048, 6144, 28, 16),
    "4B": _qwen3(2560, 9728, 36, 32),
    "8B": _qwen3(4096, 12288, 36, 32, tie_word_embeddings=False),
    # Hidden size of Qwen3-30B-A3B, with 8 of its 128 experts and 4 of its 48 layers.
    "experts": _qwen3(
        *(2048, 6144, 4, 32),
        model_type="qwen3_moe",
        num_key_value_heads=4,
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=768,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        tie_word_embeddings=False,
    ),
    # DeepSeek-V3's attention with a hidden size of 2048; one of four layers has experts.
    "latent": {
        "model_type": "deepseek_v3",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "q_lora_rank": 768,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
        "first_k_dense_replace": 3,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "n_group": 2,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.5,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e4,
        "max_position_embeddings": 4096,
        "vocab_size": 129280,
        "num_nextn_predict_layers": 0,
    },
    # Qwen3-Next's layers, three of four with gated delta nets; few experts.
    "gdn": {
        "model_type": "qwen3_next",
        "hidden_size": 2048,
        "intermediate_size": 5120,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "full_attention_interval": 4,
        "partial_rotary_factor": 0.25,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e7,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
        "vocab_size": 151936,
    },
}
_TINY = {
    "hidden_size": 128,
    "intermediate_size": 192,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
    "num_hidden_layers": 4,
    "vocab_size": 499,
    "head_dim": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
}


def shape(name: str, tiny: bool) -> dict[str, Any]:
    """Return the config.json of a shape. If `tiny`, return the same kind of model with the smallest sizes."""
    config = SHAPES[name]
    if not tiny:
        return config
    smaller = {key: value for key, value in _TINY.items() if key in config}
    if config["model_type"] == "deepseek_v3":
        smaller["num_key_value_heads"] = smaller["num_attention_heads"]
    return config | smaller


def random_rows(number: int, length: int, vocab_size: int) -> list[Sample]:
    """Return rows of the same length in which every token is trained."""
    random = np.random.RandomState(0)
    return [make_sample(random.randint(0, vocab_size, length), np.ones(length)) for _ in range(number)]


def lognormal_rows(tokens: int, longest: int, vocab_size: int) -> list[Sample]:
    """Return rows with `tokens` tokens in total. Half of the rows are shorter than a fifth of `longest`."""
    random = np.random.RandomState(0)
    samples: list[Sample] = []
    while tokens > 0:
        length = int(np.clip(random.lognormal(np.log(longest / 5), 1.0), 16, longest))
        samples.append(make_sample(random.randint(0, vocab_size, length), np.ones(length)))
        tokens -= length
    return samples


@contextmanager
def trainee(
    hf_config: dict[str, Any], args: SftArgs, samples: Sequence[Sample], model: Path | None = None
) -> Iterator[Trainer]:
    """Yield a trainer for a model with this config.json, as `megatron sft` creates it.

    Its mesh is active in the context.

    Args:
        samples: samples of all steps, in order.
        model: directory with the weights; None for random weights.
    """
    with session(layout_of(args), tied_embeddings=bool(hf_config.get("tie_word_embeddings"))) as mesh:
        family = index.get(hf_config)
        architecture = family.architecture(hf_config)
        plan = make_plan(
            args, 1, Heads(0), this_machine(mesh.device.is_cuda, mesh.device.capability), largest_head(architecture)
        )
        drafting = family.mtp.drafting
        plan = replace(plan, heads=replace(plan.heads, drafting=drafting))
        trainable = trainable_of(args, plan.heads, plan.lora)
        dtype = getattr(torch, args.torch_dtype)
        chunks = build_model(
            architecture,
            hf_config,
            mesh=mesh,
            dtype=dtype,
            heads=plan.heads,
            recompute=group_of(args, RecomputeArgs),
            moe=group_of(args, MoeArgs),
            freeze_trunk=trainable.freezes_trunk,
            drafting=drafting,
            mtp_loss=plan.mtp_loss,
            kernels=plan.kernels,
        )
        with torch.no_grad():
            for chunk in chunks:
                for parameter in chunk.parameters():
                    parameter.normal_(std=0.02)
        if model is not None:
            load_hf(chunks, model, family, hf_config)
        if plan.lora:
            add_adapters(chunks, plan.lora, family.rows(hf_config, plan.heads.layers))
        trainable.apply(chunks)
        wrapped = wrap_model(chunks, mesh, dtype, plan.distributed)
        flops = training_flops(hf_config, plan.heads, heads_only=trainable.freezes_trunk, lora=plan.lora)
        batches = Batches(plan, mesh.dp.rank(), 0, flops)
        rows = batches.rows(samples)
        schedule = make_schedule(args, len(rows))
        optimizer, scheduler = make_optimizer(args, plan, schedule, wrapped, mesh)
        sampler = Sampler(len(rows), plan.global_batch_size, args.seed, shuffle=False)
        with mesh.active():
            yield Trainer(
                mesh=mesh,
                model=wrapped,
                objective=NextTokenObjective(plan.heads, args.mtp_loss_scaling_factor),
                optimizer=optimizer,
                scheduler=scheduler,
                plan=plan,
                schedule=schedule,
                batches=TrainBatches(partial(batches.train, rows, sampler)),
                eval_batches=[],
                flops=flops,
                metric_loggers=[],
                logging_steps=1,
                checkpointer=None,
            )


def free_memory() -> None:
    """Free the memory of the previous model before the next model is created in this process."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def medians(steps: Sequence[dict[str, float]]) -> dict[str, float]:
    return {name: statistics.median(step[name] for step in steps) for name in steps[0]}


def profiled(step: Callable[[], object], is_cuda: bool) -> Any:
    """Run a step under torch's profiler, and return the profiler's averages by operation."""
    activities = [ProfilerActivity.CPU]
    if is_cuda:
        activities.append(ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as profile:
        step()
    return profile.key_averages()


def slowest(events: Any, is_cuda: bool, number: int = 8) -> list[tuple[str, float, int]]:
    """Return name, share of the time and number of calls of the slowest kernels; on a CPU, of the slowest operations.

    On a GPU, operations are not counted, because their time on the device is the time of their kernels.
    """
    if is_cuda:
        kernels = [event for event in events if event.device_type == DeviceType.CUDA]
        times = [(event.self_device_time_total, event) for event in kernels]
    else:
        times = [(event.self_cpu_time_total, event) for event in events]
    total = sum(seconds for seconds, _ in times) or 1
    times.sort(key=lambda pair: -pair[0])
    return [(event.key[:60], seconds / total, event.count) for seconds, event in times[:number]]


def waits(events: Any) -> dict[str, int]:
    """Return how often the host waited, by operation."""
    return {event.key: event.count for event in events if event.key in WAITS}
