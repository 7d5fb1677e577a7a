"""Measure training speed: against a plain transformers loop and TRL, with MTP heads, with packed rows, and against
another version of swiftlite.

All compared programs have the same model, rows, batch, precision and threads. Every row has exactly `--max_length`
tokens, so that there is no padding. The programs run in alternating subprocesses. A figure is the median over the steps
of all rounds after the warm-up. The fastest step is shown next to it; if the two differ a lot, the machine was not
idle.

    python scripts/bench/train.py                      # the quickstart's model, created temporarily
    python scripts/bench/train.py --model DIR --torch_dtype bfloat16
    python scripts/bench/train.py --model DIR --heads  # one MTP layer against arithmetic, heads_only against joint
    python scripts/bench/train.py --packing            # rows of different lengths, tokens/s without padding
    python scripts/bench/train.py --revision REVISION  # this version against one of git, with and without an MTP layer

TRL (`pip install trl`) is measured if it is installed.
"""

import argparse
import importlib
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import chain
from pathlib import Path

from contest import race

SCRIPTS = Path(__file__).resolve().parents[1]


def write_rows(path: Path, num_rows: int, max_length: int) -> None:
    """Write rows of standard-library documentation.

    Each row is longer than `max_length` tokens, so that it is truncated.
    """
    sys.path.insert(0, str(SCRIPTS))
    from make_docstring_dataset import stdlib_entries

    # Each word has at least one token, so `max_length` words are at least `max_length` tokens.
    words = " ".join(entry.docstring for entry in stdlib_entries()).split()
    with path.open("w", encoding="utf-8") as file:
        for start in range(0, num_rows * max_length, max_length):
            answer = " ".join(words[start : start + max_length])
            messages = [{"role": "user", "content": "Go on."}, {"role": "assistant", "content": answer}]
            file.write(json.dumps({"messages": messages}) + "\n")


def encode_rows(args: argparse.Namespace) -> tuple[list[list[int]], int]:
    """Return the rows as token ids, truncated to `max_length`, and the length of the prompt that all rows share."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(args.model)
    chats = [json.loads(line)["messages"] for line in args.dataset.read_text(encoding="utf-8").splitlines()]
    prompt = tokenizer.apply_chat_template(chats[0][:-1], add_generation_prompt=True, return_dict=False)
    rows = [tokenizer.apply_chat_template(chat, return_dict=False)[: args.max_length] for chat in chats]
    return rows, len(prompt)


def train_plain(args: argparse.Namespace) -> list[float]:
    """Return the tokens/s of each step of a plain loop with a transformers model and torch's AdamW."""
    import torch
    from transformers import AutoModelForCausalLM

    rows, prompt_length = encode_rows(args)
    batches: list[dict[str, torch.Tensor]] = []
    for start in range(0, len(rows), args.micro_batch_size):
        tokens_BS = torch.tensor(rows[start : start + args.micro_batch_size])
        labels_BS = tokens_BS.clone()
        labels_BS[:, :prompt_length] = -100
        batches.append({"input_ids": tokens_BS, "labels": labels_BS})

    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32, attn_implementation="sdpa").train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    # Mixed precision as in swiftlite: float32 weights and optimizer state, bfloat16 computation.
    precision = torch.autocast("cpu", torch.bfloat16) if args.torch_dtype == "bfloat16" else nullcontext()
    speed = []
    for batch in batches:
        start = time.perf_counter()
        with precision:
            loss = model(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        loss.item()
        speed.append(batch["input_ids"].numel() / (time.perf_counter() - start))
    return speed


def train_trl(args: argparse.Namespace) -> list[float]:
    """Return the tokens/s of each step of TRL's SFTTrainer. It also trains the tokens of prompts."""
    from transformers import TrainerCallback

    trl = importlib.import_module("trl")  # not a requirement of swiftlite
    datasets = importlib.import_module("datasets")

    rows, _ = encode_rows(args)
    seconds: list[float] = []

    class Clock(TrainerCallback):
        def on_step_begin(self, *_: object, **__: object) -> None:
            self.start = time.perf_counter()

        def on_step_end(self, *_: object, **__: object) -> None:
            seconds.append(time.perf_counter() - self.start)

    with tempfile.TemporaryDirectory() as output_dir:
        config = trl.SFTConfig(
            output_dir=output_dir,
            per_device_train_batch_size=args.micro_batch_size,
            gradient_accumulation_steps=1,
            gradient_checkpointing=False,
            max_length=args.max_length,
            max_steps=args.steps,
            learning_rate=1e-4,
            adam_beta2=0.95,
            weight_decay=0.1,
            bf16=args.torch_dtype == "bfloat16",
            use_cpu=True,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
            logging_steps=args.steps,
            model_init_kwargs={"dtype": "float32", "attn_implementation": "sdpa"},
        )
        trainer = trl.SFTTrainer(
            model=str(args.model),
            args=config,
            train_dataset=datasets.Dataset.from_dict({"input_ids": rows}),
            callbacks=[Clock()],
        )
        trainer.train()
    return [args.micro_batch_size * args.max_length / step for step in seconds]


def train_swiftlite(
    args: argparse.Namespace, mtp_num_layers: int, options: Sequence[object] = (), root: Path | None = None
) -> list[float]:
    """Return the tokens/s of each step of `swiftlite megatron sft`; the arguments are those of `steps_of_swiftlite`."""
    return [step["tokens_per_second"] for step in steps_of_swiftlite(args, mtp_num_layers, options, root)]


def steps_of_swiftlite(
    args: argparse.Namespace, mtp_num_layers: int, options: Sequence[object] = (), root: Path | None = None
) -> list[dict[str, float]]:
    """Return the metrics of each step of `swiftlite megatron sft`.

    Args:
        options: further options, which can also replace the dataset.
        root: directory that contains the package swiftlite; None: the package that Python finds.
    """
    dataset: tuple[object, ...] = ()
    if "--sft_mock_dataset_config_json" not in options:
        dataset = ("--dataset", args.dataset)
    with tempfile.TemporaryDirectory() as output_dir:
        command = [
            *(sys.executable, "-m", "swiftlite", "megatron", "sft"),
            *("--model", args.model, *dataset, "--output_dir", output_dir),
            *("--mtp_num_layers", mtp_num_layers, "--mtp_init", "random", "--torch_dtype", args.torch_dtype),
            *("--micro_batch_size", args.micro_batch_size, "--global_batch_size", args.micro_batch_size),
            *("--train_iters", args.steps, "--max_length", args.max_length, "--truncation_strategy", "right"),
            *("--split_dataset_ratio", 0, "--acceptance_samples", 0, "--logging_steps", 1, "--report_to", "none"),
            *options,
        ]
        environment = os.environ | ({"PYTHONPATH": str(root)} if root else {})
        words = [str(word) for word in command]
        done = subprocess.run(words, capture_output=True, text=True, cwd=root, env=environment)
        if done.returncode:
            sys.exit(f"{' '.join(map(str, command))}\n{done.stdout}{done.stderr}")
        lines = (Path(output_dir) / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines if "tokens_per_second" in line]


CONTESTANTS: dict[str, Callable[[argparse.Namespace], list[float]]] = {
    "plain": train_plain,
    "swiftlite": lambda args: train_swiftlite(args, 0),
    "swiftlite_mtp": lambda args: train_swiftlite(args, 1),
    "heads_only": lambda args: train_swiftlite(args, 1, ("--mtp_mode", "heads_only", "--mtp_loss", "ce")),
    "trl": train_trl,
    "revision": lambda args: train_swiftlite(args, 0, root=args.worktree),
    "revision_mtp": lambda args: train_swiftlite(args, 1, root=args.worktree),
}

# The same samples in each step, arranged differently.
PACKING: dict[str, tuple[object, ...]] = {
    "padded": (),
    "padding_free": ("--padding_free",),
    "packed": ("--packing", "--packing_length", 2048, "--sequence_packing_scheduler", "dp_balanced"),
}
MOCK = {
    "mode": "distribution",
    "type": "lognormal",
    "min_seq_len": 16,
    "max_seq_len": 1024,
    "mean_seq_len": 256,
    "lognormal_sigma": 1.1,
}
SOURCES: dict[str, tuple[object, ...]] = {
    "quickstart": (),
    "lognormal": ("--sft_mock_dataset_config_json", json.dumps(MOCK), "--max_length", MOCK["max_seq_len"]),
}
CONTESTANTS |= {
    f"{way}, {source}": partial(train_swiftlite, mtp_num_layers=1, options=(*data, *options))
    for source, data in SOURCES.items()
    for way, options in PACKING.items()
}


# (contestant, label, contestant to compare with, description of the comparison)
ALONE = (
    ("plain", "plain transformers loop", "plain", ""),
    ("swiftlite", "swiftlite without MTP", "plain", "the plain loop"),
    ("swiftlite_mtp", "swiftlite, one MTP layer", "swiftlite", "swiftlite without MTP"),
)
TRL = ("trl", "TRL's SFTTrainer", "plain", "the plain loop")
HEADS = (
    ("swiftlite", "without MTP", "swiftlite", ""),
    ("swiftlite_mtp", "one MTP layer, joint", "swiftlite", "without MTP"),
    ("heads_only", "one MTP layer, heads_only", "swiftlite_mtp", "joint"),
)
VERSIONS = (
    ("revision", "revision without MTP", "revision", ""),
    ("swiftlite", "without MTP", "revision", "the revision"),
    ("revision_mtp", "revision, one MTP layer", "revision_mtp", ""),
    ("swiftlite_mtp", "one MTP layer", "revision_mtp", "the revision"),
)
PACKED = tuple(
    (f"{way}, {source}", f"{way}, {source}", f"padded, {source}", "" if way == "padded" else "padded")
    for source in SOURCES
    for way in PACKING
)


def choose(args: argparse.Namespace) -> tuple[tuple[str, str, str, str], ...]:
    """Return the programs to compare."""
    if args.packing:
        return PACKED
    if args.heads:
        return HEADS
    if args.revision:
        return VERSIONS
    if importlib.util.find_spec("trl"):
        return (*ALONE, TRL)
    print("TRL takes no part: pip install trl")
    return ALONE


@contextmanager
def worktree(revision: str, directory: Path) -> Iterator[None]:
    """Check out a revision of this repository in a directory, temporarily."""
    git = ("git", "-C", SCRIPTS.parent, "worktree")
    subprocess.run([*git, "add", "--quiet", "--detach", directory, revision], check=True)
    try:
        yield
    finally:
        subprocess.run([*git, "remove", "--force", directory], check=True)


def mtp_cost(config: dict) -> float:
    """Return the work of the matrix products of one MTP layer, relative to the work of the model without heads.

    An MTP layer has the matrix products of the last decoder layer, a projection of two states to one, and another
    product with the output matrix.
    """
    hidden, width = config["hidden_size"], config["intermediate_size"]
    head_dim = config.get("head_dim") or hidden // config["num_attention_heads"]
    heads = 2 * config["num_attention_heads"] + 2 * config["num_key_value_heads"]
    layer = hidden * head_dim * heads + 3 * hidden * width
    output = hidden * config["vocab_size"]
    return (layer + 2 * hidden * hidden + output) / (config["num_hidden_layers"] * layer + output)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model", type=Path, help="Hugging Face model directory (default: the quickstart's tiny qwen3)"
    )
    parser.add_argument("--torch_dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--micro_batch_size", type=int, default=8)
    parser.add_argument("--max_length", type=int, default=256)
    parser.add_argument("--steps", type=int, default=40, help="steps per round (default: 40)")
    parser.add_argument("--warmup", type=int, default=10, help="steps at the start of a round that do not count")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--contestant", choices=CONTESTANTS, help=argparse.SUPPRESS)
    parser.add_argument("--dataset", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--worktree", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--revision", default="", help="revision of git to compare with")
    parser.add_argument("--packing", action="store_true", help="packed against padded")
    parser.add_argument(
        "--heads", action="store_true", help="one MTP layer against arithmetic, heads_only against joint"
    )
    args = parser.parse_args()
    if args.contestant:
        print(json.dumps(CONTESTANTS[args.contestant](args)))
        return
    with tempfile.TemporaryDirectory() as directory:
        args.dataset = Path(directory) / "rows.jsonl"
        if args.packing:
            make_rows = [sys.executable, SCRIPTS / "make_docstring_dataset.py", "--output", args.dataset]
            subprocess.run(make_rows, check=True, stdout=subprocess.DEVNULL)
        else:
            write_rows(args.dataset, args.steps * args.micro_batch_size, args.max_length)
        if args.model is None:
            args.model = Path(directory) / "model"
            make_model = [sys.executable, SCRIPTS / "make_tiny_model.py", "--output_dir", args.model]
            subprocess.run(make_model, check=True, stdout=subprocess.DEVNULL)
        architecture = json.loads((args.model / "config.json").read_text())
        compared = choose(args)
        names = [name for name, *_ in compared]
        paths = {"model": args.model.resolve(), "dataset": args.dataset, "worktree": Path(directory) / "worktree"}
        options = chain.from_iterable((f"--{name}", path) for name, path in paths.items())
        with worktree(args.revision, paths["worktree"]) if args.revision else nullcontext():
            rounds = race(names, args.rounds, args.threads, *options)
    speed = {name: [*chain.from_iterable(steps[args.warmup :] for steps in found)] for name, found in rounds.items()}
    median = {name: statistics.median(values) for name, values in speed.items()}
    for name, label, rival, than in compared:
        ratio = ""
        if than:
            ratio = f"   {median[name] / median[rival]:.2f}x {than}"
        print(f"{label:<26}{median[name]:8.0f} tokens/s (fastest step {max(speed[name]):.0f}){ratio}")
    if "trl" in median:
        print(f"swiftlite without MTP against TRL's SFTTrainer: {median['swiftlite'] / median['trl']:.2f}x")
    if args.heads:
        expected = mtp_cost(architecture)
        measured = median["swiftlite"] / median["swiftlite_mtp"] - 1
        print(
            f"one MTP layer costs {measured:.3f} of the rest, by arithmetic {expected:.3f}: {measured / expected:.2f}x"
        )


if __name__ == "__main__":
    main()
