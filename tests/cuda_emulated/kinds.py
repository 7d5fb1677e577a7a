"""Define the kinds of runs: a command, a tiny model, and options. This module does not import torch."""

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROWS = [{"query": f"What is {n} plus {n}?", "response": f"It is {2 * n}{' exactly' * (n % 3)}."} for n in range(20)]
PAIRS = [row | {"rejected_response": f"No idea{', perhaps' * (n % 4)} {n}?"} for n, row in enumerate(ROWS)]
# Of each pair one of the answers.
RATED = [
    {"query": row["query"], "response": row["response" if n % 3 else "rejected_response"], "label": n % 3 > 0}
    for n, row in enumerate(PAIRS)
]
TEXTS = [{"text": f"{row['query']} {row['response']}"} for row in ROWS]
PROMPTS = [{"query": row["query"]} for row in ROWS]
FILES = {"rows": ROWS, "pairs": PAIRS, "rated": RATED, "texts": TEXTS, "prompts": PROMPTS}

STEPS = 3
# Held-out rows, evaluation, a checkpoint and drafts measured are part of every run.
COMMON = (
    "--max_length 96 --split_dataset_ratio 0.2 --micro_batch_size 2 --global_batch_size 4 --lr 1e-4 "
    f"--acceptance_samples 1 --acceptance_max_new_tokens 3 --report_to none --train_iters {STEPS}"
)
PACKED = "--packing true --packing_length 96 --micro_batch_size 1 --global_batch_size 2"
HEADS = "--mtp_mode heads_only --mtp_init checkpoint"


ADAPTERS = "--tuner_type lora --lora_rank 4"
SAMPLED = f"--num_generations 2 --max_completion_length 8 --beta 0.04 --steps_per_generation {STEPS}"
"""Options of `megatron grpo` for one generation. Its completions are drawn before, by `write_inputs`."""


@dataclass(frozen=True)
class Model:
    """Arguments of `tests.tiny.make_tiny_hf`, or of `tests.data.images.make_image_model` for models with images."""

    family: str = "qwen3"
    sizes: tuple[tuple[str, Any], ...] = ()
    has_images: bool = False

    @property
    def directory(self) -> str:
        return "-".join([self.family, *(f"{name}{value}" for name, value in self.sizes)])


@dataclass(frozen=True)
class Kind:
    """A run to test.

    Attributes:
        options: options of the command, in addition to COMMON.
        rows: the name of a data file, of FILES or "seen".
        goes_on: whether a second command resumes the run with `--resume`, for the same number of steps.
        on_device: options only on a device, because they require one.
    """

    options: str = ""
    model: Model = Model()
    command: str = "sft"
    rows: str = "rows"
    goes_on: bool = False
    on_device: str = ""

    @property
    def has_experts(self) -> bool:
        return self.model.family != "qwen3" and not self.model.has_images

    @property
    def is_float32(self) -> bool:
        return FLOAT32 in self.options

    def words(self, directory: Path, output_dir: Path) -> list[str]:
        """Return the command line, for inputs in `directory`."""
        return [
            *("megatron", self.command, "--model", str(directory / self.model.directory)),
            *("--dataset", str(directory / f"{self.rows}.jsonl"), "--output_dir", str(output_dir)),
            *f"{COMMON} {self.options}".split(),
        ]


DEEP = (("num_hidden_layers", 4),)
TEACHER = Model(sizes=DEEP)
DEEPSTACK, WINDOWS = (Model(family, has_images=True) for family in ("qwen3_vl", "qwen2_5_vl"))
MOE, LATENT, LITE, HYBRID = (Model(family) for family in ("qwen3_moe", "deepseek_v3", "glm4_moe_lite", "qwen3_next"))
FLOAT32 = "--torch_dtype float32"
KINDS: dict[str, Kind] = {
    "dense": Kind(),
    "dense 4 layers": Kind(model=Model(sizes=DEEP)),
    "dense float32": Kind(FLOAT32),
    "dense, not fused": Kind("--fused_kernels none"),
    "packed": Kind(PACKED),
    "padding_free": Kind("--padding_free true"),
    "dp_balanced": Kind(f"{PACKED} --sequence_packing_scheduler dp_balanced --global_batch_size 8"),
    "streamed": Kind(f"{PACKED} --streaming true --streaming_buffer_size 8 --split_dataset_ratio 0"),
    "plain text": Kind(command="pt", rows="texts"),
    "experts": Kind(model=MOE),
    "experts 4 layers": Kind(model=Model("qwen3_moe", DEEP)),
    "experts packed, balanced": Kind(f"{PACKED} --moe_aux_loss_coeff 0.01", model=MOE),
    "experts float32": Kind(FLOAT32, model=MOE),
    "latent": Kind(model=LATENT),
    "latent packed": Kind(PACKED, model=LATENT),
    "latent float32": Kind(FLOAT32, model=LATENT),
    "latent lite, biases updated": Kind("--moe_router_bias_update_rate 0.001", model=LITE),
    "gated delta": Kind(model=HYBRID),
    "gated delta float32": Kind(FLOAT32, model=HYBRID),
    "gated delta packed": Kind(PACKED, model=HYBRID),
    "lora": Kind(ADAPTERS),
    "lora dropout": Kind(f"{ADAPTERS} --lora_dropout 0.1"),
    "dora": Kind(f"{ADAPTERS} --use_dora true"),
    "lora experts": Kind(ADAPTERS, model=MOE),
    "dpo": Kind(command="dpo", rows="pairs"),
    "dpo packed, lora": Kind(f"{PACKED} --packing_length 192 {ADAPTERS}", command="dpo", rows="pairs"),
    "dpo float32": Kind(FLOAT32, command="dpo", rows="pairs"),
    "kto": Kind("--loss_type kto", command="dpo", rows="rated"),
    "grpo": Kind(
        f"{SAMPLED} --padding_free true --rollouts_from {{directory}}/drawn/rollouts "
        f"--teacher_model {{directory}}/{TEACHER.directory} --teacher_kl_coef 0.1",
        command="grpo",
        rows="prompts",
    ),
    "gkd": Kind(
        f"--teacher_model {{directory}}/{TEACHER.directory} --lmbda 0 --max_completion_length 8", command="gkd"
    ),
    "heads_only": Kind(f"{HEADS} --mtp_loss ce"),
    "heads_only kl": Kind(f"{HEADS} --mtp_loss kl"),
    "heads_only kl, not fused": Kind(f"{HEADS} --mtp_loss kl --fused_kernels none"),
    "heads_only, drafted tokens": Kind(f"{HEADS} --draft_vocab 100"),
    "heads_only, fitted": Kind("--mtp_mode heads_only --mtp_init fit_last_layer"),
    "unrolled": Kind(f"{HEADS} --mtp_unroll 3"),
    "unrolled packed": Kind(f"{HEADS} --mtp_unroll 3 {PACKED}"),
    "cached trunk states": Kind(
        f"{HEADS} --cache_trunk_states {{directory}}/states --micro_batch_size 1 --train_iters 12"
    ),
    "streamed trunk": Kind(
        f"{HEADS} --mtp_loss kl --stream_trunk true --cache_trunk_states {{directory}}/streamed --micro_batch_size 1 "
        "--acceptance_samples 0"
    ),
    "images": Kind(model=DEEPSTACK, rows="seen"),
    "images, tower trained": Kind("--freeze_vit false --freeze_aligner false", model=WINDOWS, rows="seen"),
    "recomputed": Kind("--recompute_granularity full"),
    "recomputed selectively": Kind("--recompute_granularity selective", model=MOE),
    "saved asynchronously": Kind("--async_save true --save_steps 1"),
    "distributed optimizer": Kind("--use_distributed_optimizer true --async_save true --save_steps 2", goes_on=True),
    "optimizer on the host": Kind(
        "--use_distributed_optimizer true --save_steps 2",
        goes_on=True,
        on_device="--optimizer_cpu_offload true --optimizer_offload_fraction 0.5",
    ),
    "optimizer on the host, not distributed": Kind(on_device="--optimizer_cpu_offload true"),
    "resumed": Kind("--mtp_clip_grad 0.5", goes_on=True),
}


# The largest difference between the losses of an emulated run and of the CPU's, relative where a loss is above 1.
# In float32 both compute the same but for the order of sums: measured up to 3e-7, with pairs, whose losses are
# differences of sums, 1.2e-6.
FLOAT32_BOUND = 2e-6
# In bfloat16 (8 bits) a fused kernel rounds once where the CPU's operations round several times, the packed kernel adds
# in another order, and losses are means over some 60 tokens: measured up to 2.2e-3.
DENSE_BOUND = 5e-3
# A token whose experts are nearly equal goes to another one: measured up to 8e-3.
EXPERTS_BOUND = 2e-2
# Pairs: differences of sums of logarithms, times beta: the loss is within so much of it (0.69). Measured up to 2e-2.
PAIRS_BOUND = 3e-2


def bound_of(kind: Kind) -> float:
    """Return the largest difference of losses between a device and the CPU, relative for losses above 1."""
    if kind.is_float32:
        return FLOAT32_BOUND
    if kind.command == "dpo":
        return PAIRS_BOUND
    if kind.has_experts:
        return EXPERTS_BOUND
    return DENSE_BOUND


def loss_pairs(ours: list[dict[str, float]], theirs: list[dict[str, float]]) -> list[tuple[str, float, float]]:
    """Return name, our value and their value of each loss in two runs' metrics.

    Raises:
        ValueError: the runs have different metrics.
    """
    pairs = []
    for line, expected in zip(ours, theirs, strict=True):
        names = [name for name in line if name != "mfu"]  # a CPU has no peak speed
        if names != list(expected):
            raise ValueError(f"metrics {names}, expected {list(expected)}")
        pairs += [(name, line[name], expected[name]) for name in names if name.endswith("loss")]
    return pairs


def write_inputs(directory: Path, names: list[str]) -> None:
    """Write the models and rows of some kinds. transformers writes them, so this must not run in an
    emulated process.
    """
    from tests.data.images import data_uri, make_image_model, noise
    from tests.tiny import make_tiny_hf

    seen = list(ROWS)
    for number in range(1, len(seen), 2):
        image = data_uri(noise(16 + 8 * (number % 3), 16, number))
        seen[number] = ROWS[number] | {"query": f"<image>{ROWS[number]['query']}", "images": [image]}
    (directory / "seen.jsonl").write_text("".join(json.dumps(row) + "\n" for row in seen))
    for name, rows in FILES.items():
        (directory / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    models = {KINDS[name].model for name in names}
    if {"gkd", "grpo"} & set(names):
        models.add(TEACHER)
    for model in models:
        hf_dir = directory / model.directory
        if model.has_images:
            make_image_model(hf_dir, model.family)
        else:
            make_tiny_hf(hf_dir, model.family, depth=1, with_tokenizer=True, **dict(model.sizes))
    if "grpo" in names:
        drawing = Kind(f"{SAMPLED} --reward_funcs length", command="grpo", rows="prompts")
        words = drawing.words(directory, directory / "drawn")
        subprocess.run([sys.executable, "-m", "swiftlite", *words], check=True)
