"""Define the kinds of training runs and the parallel layouts that tests and scripts execute, without importing torch.

A kind describes a run. Its readers select kinds by their properties, and supply models, rows and further options:

- `tests/cuda_emulated` and `scripts/gpu.sh` run the kinds that are `on_device`, and compare them with a CPU;
- `scripts/guard.py` runs the kinds that are `exported`, and records the plan of every kind;
- `tests/parallel/parity.py` compares all LAYOUTS with one process.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any


@dataclass(frozen=True)
class Layout:
    """A parallel layout: a number of processes and options of `megatron`; MTP stands for all MTP layers of a model."""

    num_processes: int
    options: dict[str, Any] = field(default_factory=dict)

    def words(self) -> list[str]:
        """Return the options as words of a command line, for a model with one MTP layer."""
        words = []
        for name, value in self.options.items():
            words += [f"--{name}", json.dumps(value).strip('"').replace("MTP", "m")]
        return words


ONE_PROCESS = "one process"
_TP2_SP = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
_EP2, _PP2, _CP2 = ({f"{kind}_parallel_size": 2} for kind in ("expert_model", "pipeline_model", "context"))
_SHARED = {"use_distributed_optimizer": True}
_OVERLAP = _SHARED | {"overlap_grad_reduce": True, "overlap_param_gather": True}
_BUCKETS = {"ddp_bucket_size": 2000, "megatron_config": {"pad_buckets_for_high_nccl_busbw": True}}
_INSTANCES = {"num_distributed_optimizer_instances": 2}
_SHARED_EXPERTS = {"moe_shared_expert_overlap": True}
LAYOUTS: dict[str, Layout] = {
    ONE_PROCESS: Layout(1),
    "TP2": Layout(2, {"tensor_model_parallel_size": 2}),
    "TP2+SP": Layout(2, _TP2_SP),
    "PP2": Layout(2, _PP2),
    "PP4": Layout(4, {"pipeline_model_parallel_size": 4}),
    "PP2xVPP2": Layout(2, _PP2 | {"num_virtual_stages_per_pipeline_rank": 2}),
    "CP2": Layout(2, _CP2),
    "CP2xTP2": Layout(4, _TP2_SP | _CP2),
    "DP2": Layout(2),
    "DP2+distopt": Layout(2, _SHARED),
    "DP2+overlap": Layout(2, _OVERLAP),
    "DP2+buckets": Layout(2, _OVERLAP | _BUCKETS),
    "DP4+instances": Layout(4, _SHARED | _INSTANCES),
    "DP2+instances+overlap": Layout(2, _OVERLAP | _INSTANCES),
    "EP2": Layout(2, _EP2),
    "EP2xTP2": Layout(2, _TP2_SP | _EP2),
    "EP2+shared overlap": Layout(2, _EP2 | _SHARED_EXPERTS),
    "EP2xTP2+shared overlap": Layout(2, _TP2_SP | _EP2 | _SHARED_EXPERTS),
    "EP2xTP2+allgather": Layout(2, _TP2_SP | _EP2 | {"moe_token_dispatcher_type": "allgather"}),
    "EP2+instances": Layout(4, _EP2 | _SHARED | _INSTANCES),
    "ETP2xTP2": Layout(2, _TP2_SP | {"expert_tensor_parallel_size": 2}),
    "PP2xTP2": Layout(4, _TP2_SP | _PP2),
    "PP2 MTP apart": Layout(2, _PP2 | {"pipeline_model_parallel_layout": "E t*4, | MTP L"}),
    "PP3 MTP middle": Layout(3, {"pipeline_model_parallel_size": 3, "pipeline_model_parallel_layout": "Et*4|MTP|L"}),
}


@dataclass(frozen=True)
class Kind:
    """A training run.

    Attributes:
        model: name of a tiny model. Models with an MTP head: dense, experts, latent (latent attention and experts),
            lite (the same, of GLM), hybrid (linear attention and experts), and, with images, deepstack and windows.
            `deeper` and `deeper_experts` have more layers, `two_heads` has another head. Models without a head:
            llama, qwen2 (tied embeddings), qwen3, qwen3_moe.
        options: options of the command, in addition to those of the reader. Names in braces stand for values of the
            reader: the directory of a model, the directory of the run's other files (`directory`), options for rows and
            pairs that are packed (`packed`, `packed_pairs`), the source of completions (`rollouts`).
        command: subcommand of `megatron`.
        rows: kind of rows: rows (conversations), pairs, rated, texts, prompts, or images.
        layout: a key of LAYOUTS.
        resumed: layout in which a second command resumes the run; empty if the run is not resumed.
        exported: layout in which the result is exported; empty if it is not exported.
        is_launched: whether torchrun starts the processes.
        on_device: whether the run is executed on a device, with one process.
        device_options: options only on a device, because they require one.
    """

    model: str
    options: str = ""
    command: str = "sft"
    rows: str = "rows"
    layout: str = ONE_PROCESS
    resumed: str = ""
    exported: str = ""
    is_launched: bool = False
    on_device: bool = False
    device_options: str = ""

    @property
    def names_in_options(self) -> set[str]:
        return set(re.findall(r"{(\w+)}", self.options))

    @property
    def is_float32(self) -> bool:
        return FLOAT32 in self.options

    def filled(self, values: Mapping[str, Any]) -> str:
        """Return the options with the values of a reader."""
        return self.options.format_map(values)


FLOAT32 = "--torch_dtype float32"
BFLOAT16 = "--torch_dtype bfloat16"
NEW_HEAD = "--mtp_num_layers 1 --mtp_init copy_last_layer"
HEADS_ONLY = "--mtp_mode heads_only --mtp_init checkpoint"
LORA = "--tuner_type lora --lora_rank 4"
STREAMED = "{packed} --streaming true --streaming_buffer_size"
BALANCED = "{packed} --global_batch_size 8 --sequence_packing_scheduler dp_balanced"
SAMPLED = "--num_generations 2 --max_completion_length 8 --beta 0.04 --steps_per_generation 3"
FULL = "--recompute_granularity full"

device = partial(Kind, on_device=True)
exported = partial(Kind, exported=ONE_PROCESS)
both = partial(Kind, exported=ONE_PROCESS, on_device=True)
# Without --torch_dtype, a run has the dtype of its reader.
KINDS: dict[str, Kind] = {
    # models
    "dense": both("dense"),
    "dense 4 layers": device("deeper"),
    "dense float32": device("dense", FLOAT32),
    "dense, not fused": device("dense", "--fused_kernels none"),
    "dense FP8": device("deeper", "--fp8_format hybrid"),
    "llama": exported("llama", "--mtp_num_layers 1 --mtp_init random"),
    "llama no head": exported("llama", "--mtp_num_layers 0 --clip_grad 0"),
    "qwen2 tied": exported("qwen2", NEW_HEAD),
    "qwen3": exported("qwen3", NEW_HEAD),
    "qwen3 bfloat16": exported("qwen3", f"{NEW_HEAD} {BFLOAT16}"),
    "experts": device("experts"),
    "experts 4 layers": device("deeper_experts"),
    "experts float32": device("experts", FLOAT32),
    "experts bias update": exported("experts", "--moe_router_bias_update_rate 0.001"),
    "experts packed, balanced": device("experts", "{packed} --moe_aux_loss_coeff 0.01"),
    "qwen3_moe aux loss": exported("qwen3_moe", f"{NEW_HEAD} --moe_aux_loss_coeff 0.01"),
    "latent": both("latent"),
    "latent float32": device("latent", FLOAT32),
    "latent lite, biases updated": device("lite", "--moe_router_bias_update_rate 0.001"),
    "gated delta": both("hybrid"),
    "gated delta float32": device("hybrid", FLOAT32),
    "images": both("deepstack", rows="images"),
    "images, tower trained": device("windows", "--freeze_vit false --freeze_aligner false", rows="images"),
    # layouts
    "TP2+SP qwen3": Kind("qwen3", NEW_HEAD, layout="TP2+SP", exported="TP2+SP"),
    "TP2+SP latent": exported("latent", layout="TP2+SP"),
    "EP2xTP2 experts": Kind("experts", layout="EP2xTP2", exported="EP2"),
    "PP2xTP2 llama": exported("llama", NEW_HEAD, layout="PP2xTP2"),
    "PP2xVPP2 qwen3 depth 2": exported("qwen3", "--mtp_num_layers 2 --mtp_init copy_last_layer", layout="PP2xVPP2"),
    "PP2xVPP2 qwen3_moe": Kind("qwen3_moe", NEW_HEAD, layout="PP2xVPP2", exported="PP2xVPP2"),
    "PP2 MTP apart qwen2 tied": exported("qwen2", NEW_HEAD, layout="PP2 MTP apart"),
    "CP2 llama": exported("llama", NEW_HEAD, layout="CP2"),
    "CP2 latent": exported("latent", layout="CP2"),
    "EP2 qwen3_moe": exported("qwen3_moe", NEW_HEAD, layout="EP2"),
    "DP2+distopt qwen3": exported("qwen3", NEW_HEAD, layout="DP2+distopt", is_launched=True),
    "DP2+distopt latent bfloat16": exported("latent", BFLOAT16, layout="DP2+distopt"),
    "DP2+overlap experts": exported("experts", layout="DP2+overlap"),
    # rows
    "packed": device("dense", "{packed}"),
    "packed CP2 qwen3": exported("qwen3", f"{NEW_HEAD} {{packed}}", layout="CP2"),
    "packed PP2xVPP2 dense": exported("dense", "{packed}", layout="PP2xVPP2"),
    "latent packed": both("latent", "{packed}"),
    "gated delta packed": device("hybrid", "{packed}"),
    "padding_free": device("dense", "--padding_free true"),
    "padding_free heads_only kl llama": exported(
        "llama", f"{NEW_HEAD} --padding_free true --mtp_mode heads_only --mtp_loss kl"
    ),
    "padding_free TP2+SP qwen3_moe": exported("qwen3_moe", f"{NEW_HEAD} --padding_free true", layout="TP2+SP"),
    "dp_balanced": device("dense", BALANCED),
    "dp_balanced DP2 dense": exported("dense", BALANCED, layout="DP2"),
    "dp_balanced EP2 experts": exported("experts", BALANCED, layout="EP2"),
    "streamed": device("dense", f"{STREAMED} 8 --split_dataset_ratio 0"),
    "streamed qwen2": exported("qwen2", f"{NEW_HEAD} {STREAMED} 12"),
    "streamed PP2xVPP2 llama": exported("llama", f"{NEW_HEAD} {STREAMED} 12", layout="PP2xVPP2"),
    "plain text": both("dense", "--global_batch_size 4", command="pt", rows="texts"),
    # heads
    "heads_only": device("dense", f"{HEADS_ONLY} --mtp_loss ce"),
    "heads_only kl": device("dense", f"{HEADS_ONLY} --mtp_loss kl"),
    "heads_only kl, not fused": device("dense", f"{HEADS_ONLY} --mtp_loss kl --fused_kernels none"),
    "heads_only kl TP2+SP dense": exported("dense", "--mtp_mode heads_only --mtp_loss kl", layout="TP2+SP"),
    "heads_only, drafted tokens": both("dense", f"{HEADS_ONLY} --draft_vocab 100"),
    "heads_only, fitted": device("dense", "--mtp_mode heads_only --mtp_init fit_last_layer"),
    "heads_only experts": exported("experts", "--mtp_mode heads_only"),
    "tv latent": exported("latent", "--mtp_loss tv"),
    "unrolled": device("dense", f"{HEADS_ONLY} --mtp_unroll 3"),
    "unrolled packed": device("dense", f"{HEADS_ONLY} --mtp_unroll 3 {{packed}}"),
    "unrolled packed heads_only tv": exported("dense", "--mtp_unroll 3 --mtp_mode heads_only --mtp_loss tv {packed}"),
    "eagle3": exported("llama", "--mtp_mode heads_only --drafter eagle3 --mtp_unroll 2"),
    "eagle3.1 packed": both("llama", "--mtp_mode heads_only --drafter eagle3.1 --mtp_unroll 3 {packed}"),
    "features packed": both("llama", "--mtp_mode heads_only --mtp_features 1 --mtp_unroll 3 {packed}"),
    "dflash packed": both("llama", "--mtp_mode heads_only --drafter dflash --mtp_unroll 3 {packed}"),
    "dspark packed": both(
        "llama", "--mtp_mode heads_only --drafter dspark --mtp_unroll 3 {packed}", resumed=ONE_PROCESS
    ),
    "unrolled joint": device("dense", f"{HEADS_ONLY} --mtp_unroll 3 --mtp_unroll_weights joint"),
    "unrolled qwen3": exported("qwen3", f"{NEW_HEAD} --mtp_unroll 3"),
    "unrolled PP2 kl latent": exported("latent", "--mtp_unroll 3 --mtp_loss kl", layout="PP2 MTP apart"),
    "grafted depth 2": exported("dense", "--mtp_num_layers 2 --mtp_init graft --mtp_graft_from {two_heads}"),
    "cached trunk states": both(
        "dense", f"{HEADS_ONLY} --cache_trunk_states {{directory}}/states --micro_batch_size 1 --train_iters 12"
    ),
    "streamed trunk": both(
        "dense",
        f"{HEADS_ONLY} --mtp_loss kl --stream_trunk true --cache_trunk_states {{directory}}/streamed "
        "--micro_batch_size 1 --acceptance_samples 0",
    ),
    # adapters
    "lora": device("dense", LORA),
    "lora 4 layers": device("deeper", LORA),
    "lora dropout": device("dense", f"{LORA} --lora_dropout 0.1"),
    "lora experts": both("experts", LORA),
    "dora": device("dense", f"{LORA} --use_dora true"),
    # methods
    "dpo": both("dense", command="dpo", rows="pairs"),
    "dpo float32": device("dense", FLOAT32, command="dpo", rows="pairs"),
    "dpo packed, lora": device("dense", f"{{packed_pairs}} {LORA}", command="dpo", rows="pairs"),
    "dpo packed TP2+SP llama": exported(
        "llama", f"{NEW_HEAD} {{packed_pairs}}", command="dpo", rows="pairs", layout="TP2+SP"
    ),
    "orpo CP2 qwen3": exported("qwen3", f"{NEW_HEAD} --loss_type orpo", command="dpo", rows="pairs", layout="CP2"),
    "kto": device("dense", "--loss_type kto", command="dpo", rows="rated"),
    "kto DP2 dense": exported("dense", "--loss_type kto", command="dpo", rows="rated", layout="DP2"),
    "kto packed qwen3_moe": Kind(
        "qwen3_moe", f"{NEW_HEAD} --loss_type kto {{packed}}", command="dpo", rows="rated", exported="EP2"
    ),
    "rm": device("dense", command="rm", rows="pairs"),
    "rm packed, lora": device("dense", f"{{packed_pairs}} {LORA}", command="rm", rows="pairs"),
    "grpo": both(
        "dense",
        f"{SAMPLED} --padding_free true {{rollouts}} --teacher_model {{deeper}} --teacher_kl_coef 0.1",
        command="grpo",
        rows="prompts",
    ),
    "gkd": both("dense", "--teacher_model {deeper} --lmbda 0 --max_completion_length 8", command="gkd"),
    # recomputation
    "recomputed": device("dense", FULL),
    "recomputed two_heads": exported("two_heads", f"{FULL} --recompute_method block --recompute_num_layers 2"),
    "recomputed TP2+SP experts": exported("experts", FULL, layout="TP2+SP"),
    "recomputed selectively": device("experts", "--recompute_granularity selective"),
    "recomputed selectively latent": exported(
        "latent", "--recompute_granularity selective --recompute_modules core_attn mlp moe mla_up_proj"
    ),
    # optimizer, checkpoints
    "distributed optimizer": device(
        "dense", "--use_distributed_optimizer true --async_save true --save_steps 2", resumed=ONE_PROCESS
    ),
    "optimizer on the host": device(
        "dense",
        "--use_distributed_optimizer true --save_steps 2",
        resumed=ONE_PROCESS,
        device_options="--optimizer_cpu_offload true --optimizer_offload_fraction 0.5",
    ),
    "optimizer on the host, not distributed": device("dense", device_options="--optimizer_cpu_offload true"),
    "saved asynchronously": both("dense", "--async_save true --save_steps 1", resumed=ONE_PROCESS),
    "resumed": device("dense", "--mtp_clip_grad 0.5", resumed=ONE_PROCESS),
    "resumed streamed DP2+distopt qwen3_moe": exported(
        "qwen3_moe", f"{NEW_HEAD} {STREAMED} 12 {BFLOAT16}", layout="DP2+distopt", resumed="DP2+distopt"
    ),
    "resumed PP2 as EP2xTP2 experts": Kind("experts", layout="PP2 MTP apart", resumed="EP2xTP2", exported="EP2"),
}
