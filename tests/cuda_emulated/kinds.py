"""Supply models, rows and options of the kinds of runs that are executed on a device, and the bounds of their losses.

This module does not import torch.
"""

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from tests import kinds
from tests.kinds import Kind

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

STEPS = 2
# Held-out rows, evaluation, a checkpoint and drafts measured are part of every run.
COMMON = (
    "--max_length 96 --split_dataset_ratio 0.2 --micro_batch_size 2 --global_batch_size 4 --lr 1e-4 "
    f"--acceptance_samples 1 --acceptance_max_new_tokens 2 --report_to none --train_iters {STEPS}"
)
PACKED = "--packing true --packing_length 96 --micro_batch_size 1 --global_batch_size 2"


@dataclass(frozen=True)
class Model:
    """Arguments of `tests.tiny.make_tiny_hf`, or of `tests.data.images.make_image_model` for models with images."""

    family: str = "qwen3"
    num_layers: int | None = None
    has_images: bool = False
    depth: int = 1

    def make(self, directory: Path) -> None:
        from tests.data.images import make_image_model
        from tests.tiny import make_tiny_hf

        sizes = {}
        if self.num_layers:
            sizes["num_hidden_layers"] = self.num_layers
        if self.has_images:
            make_image_model(directory, self.family)
        else:
            make_tiny_hf(directory, self.family, depth=self.depth, with_tokenizer=True, **sizes)


MODELS = {
    "dense": Model(),
    "deeper": Model(num_layers=4),
    "experts": Model("qwen3_moe"),
    "deeper_experts": Model("qwen3_moe", num_layers=4),
    "latent": Model("deepseek_v3"),
    "lite": Model("glm4_moe_lite"),
    "hybrid": Model("qwen3_next"),
    "deepstack": Model("qwen3_vl", has_images=True),
    "windows": Model("qwen2_5_vl", has_images=True),
    "llama": Model("llama", depth=0),
}
DENSE = ("dense", "deeper", "deepstack", "windows")
KINDS = {name: kind for name, kind in kinds.KINDS.items() if kind.on_device}


def words_of(kind: Kind, directory: Path, output_dir: Path) -> list[str]:
    """Return the command line, for inputs in `directory`."""
    values = {name: directory / name for name in MODELS} | {"directory": directory}
    values |= {"packed": PACKED, "packed_pairs": f"{PACKED} --packing_length 192"}
    values |= {"rollouts": f"--rollouts_from {directory}/drawn/rollouts"}
    return [
        *("megatron", kind.command, "--model", str(directory / kind.model)),
        *("--dataset", str(directory / f"{kind.rows}.jsonl"), "--output_dir", str(output_dir)),
        *f"{COMMON} {kind.filled(values)}".split(),
    ]


# The largest difference between the losses of an emulated run and of the CPU's, relative where a loss is above 1.
# In float32 both compute the same but for the order of sums: measured up to 3e-7, with pairs, whose losses are
# differences of sums, 1.2e-6.
FLOAT32_BOUND = 2e-6
# In bfloat16 (8 bits) a fused kernel rounds once where the CPU's operations round several times, the packed kernel adds
# in another order, and losses are means over some 60 tokens: measured up to 2.2e-3.
DENSE_BOUND = 5e-3
# In FP8 a value that is rounded differently before goes to another neighbour, 6 or 12 % away: measured up to 4.7e-3.
FP8_BOUND = 1e-2
# A token whose experts are nearly equal goes to another one: measured up to 8e-3.
EXPERTS_BOUND = 2e-2
# Pairs: differences of sums of logarithms, times beta: the loss is within so much of it (0.69). Measured up to 2e-2.
PAIRS_BOUND = 3e-2


def bound_of(kind: Kind) -> float:
    """Return the largest difference of losses between a device and the CPU, relative for losses above 1."""
    if kind.is_float32:
        return FLOAT32_BOUND
    if kind.command in ("dpo", "rm"):
        return PAIRS_BOUND
    if kind.model not in DENSE:
        return EXPERTS_BOUND
    if "--fp8_format" in kind.options:
        return FP8_BOUND
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


def start_command(words: list[str]) -> None:
    subprocess.run([sys.executable, "-m", "swiftlite", *words], check=True)


def write_inputs(directory: Path, names: list[str], command: Callable[[list[str]], None] = start_command) -> None:
    """Write the models and rows of some kinds. transformers writes them, so this must not run in an
    emulated process.

    Args:
        command: runs `swiftlite` with some words.
    """
    from tests.data.images import data_uri, noise

    seen = list(ROWS)
    for number in range(1, len(seen), 2):
        image = data_uri(noise(16 + 8 * (number % 3), 16, number))
        seen[number] = ROWS[number] | {"query": f"<image>{ROWS[number]['query']}", "images": [image]}
    for name, rows in (FILES | {"images": seen}).items():
        (directory / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    chosen = [KINDS[name] for name in names]
    needed = {name for kind in chosen for name in (kind.model, *kind.names_in_options)}
    for name in needed & MODELS.keys():
        MODELS[name].make(directory / name)
    if "grpo" in names:
        drawing = replace(KINDS["grpo"], options=f"{kinds.SAMPLED} --reward_funcs length")
        command(words_of(drawing, directory, directory / "drawn"))
