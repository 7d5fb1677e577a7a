"""Train a head for a model of 8 billion parameters with `--stream_trunk`, and measure peak memory and time.

The model has the shape of Granite 3 8B (40 layers, hidden size 4096, 49,155 tokens, tied embeddings) and random weights
in bfloat16: 16 GB of shards, written to --directory if they are missing. Peak memory is the largest resident set size
of the training process, and the file system's cache is not part of it. Compare it with the estimate of `doctor --plan`.

    python scripts/bench/stream_trunk.py --directory /tmp/8b --tokens 4096

Peak memory does not depend on the number of layers, so `--layers 2` measures it within minutes.
"""

import argparse
import json
import re
import resource
import subprocess
import sys
import time
from pathlib import Path

import torch
from safetensors.torch import save_file

from swiftlite.base.heads import Heads
from swiftlite.plan.cost.setup import Setup
from swiftlite.plan.cost.streamed_memory import estimate_streamed

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 49155,
    "hidden_size": 4096,
    "intermediate_size": 12800,
    "num_hidden_layers": 40,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}
LENGTH = 1024
"""Length of a packed row."""
WORDS_PER_ROW = 100


def write_model(directory: Path, tokenizer: Path, layers: int) -> None:
    """Write the model, one file per layer, with the tokenizer of another model."""
    config = CONFIG | {"num_hidden_layers": layers}
    directory.mkdir(parents=True, exist_ok=True)
    for path in tokenizer.iterdir():
        if path.name.startswith(("tokenizer", "special_tokens", "chat_template", "vocab", "merges")):
            (directory / path.name).write_bytes(path.read_bytes())
    (directory / "config.json").write_text(json.dumps(config, indent=2))
    hidden, wide = CONFIG["hidden_size"], CONFIG["intermediate_size"]
    keys = CONFIG["num_key_value_heads"] * CONFIG["head_dim"]
    shapes = {
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (wide, hidden),
        "mlp.up_proj": (wide, hidden),
        "mlp.down_proj": (hidden, wide),
    }
    device = "cpu"
    if torch.cuda.is_available():
        device = "cuda"  # draws weights in seconds instead of minutes
    generator = torch.Generator(device).manual_seed(0)
    weight_map = {}

    def write(number: int, tensors: dict[str, torch.Tensor]) -> None:
        file = f"model-{number:05d}-of-{layers + 1:05d}.safetensors"
        save_file(tensors, directory / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(tensors, file))

    def random(*shape: int) -> torch.Tensor:
        return (0.02 * torch.randn(shape, generator=generator, device=device)).bfloat16().cpu()

    write(
        1, {"model.embed_tokens.weight": random(CONFIG["vocab_size"], hidden), "model.norm.weight": 1 + random(hidden)}
    )
    for layer in range(layers):
        prefix = f"model.layers.{layer}."
        tensors = {f"{prefix}{name}.weight": random(*shape) for name, shape in shapes.items()}
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}{norm}.weight"] = 1 + random(hidden)
        write(layer + 2, tensors)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def write_rows(path: Path, num_tokens: int) -> None:
    """Write more than enough rows of random words for this number of tokens."""
    generator = torch.Generator().manual_seed(1)
    with path.open("w") as file:
        for _ in range(num_tokens // WORDS_PER_ROW + 1):
            numbers = torch.randint(10, 99, (WORDS_PER_ROW,), generator=generator).tolist()
            file.write(json.dumps({"query": "Numbers?", "response": " ".join(map(str, numbers))}) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", type=Path, required=True, help="directory of the model and of the run")
    parser.add_argument("--tokenizer", type=Path, required=True, help="model directory whose tokenizer is used")
    parser.add_argument("--tokens", type=int, default=4096, help="tokens of the training rows")
    parser.add_argument("--layers", type=int, default=CONFIG["num_hidden_layers"])
    parser.add_argument("--draft_vocab", type=int, default=1024)
    args = parser.parse_args()
    model = args.directory / "model"
    if not (model / "model.safetensors.index.json").exists():
        write_model(model, args.tokenizer, args.layers)
    rows = args.directory / "rows.jsonl"
    write_rows(rows, args.tokens // 2)  # a number of two digits is two tokens or more
    command = [sys.executable, "-m", "swiftlite", "megatron", "sft", "--model", str(model), "--dataset", str(rows)]
    command += ["--output_dir", str(args.directory / f"run-{int(time.time())}"), "--torch_dtype", "bfloat16"]
    command += "--mtp_num_layers 1 --mtp_mode heads_only --mtp_init copy_last_layer --split_dataset_ratio 0".split()
    command += f"--packing true --max_length {LENGTH} --global_batch_size 1 --num_train_epochs 2".split()
    command += ["--draft_vocab", str(args.draft_vocab), "--stream_trunk", "true"]
    command += ["--cache_trunk_states", str(args.directory / "states"), "--logging_steps", "1"]
    start = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    seconds = time.monotonic() - start
    print(done.stderr[-4000:])
    done.check_returncode()
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
    heads = Heads(1, draft_vocab=tuple(range(args.draft_vocab)))
    streamed = estimate_streamed(
        json.loads((model / "config.json").read_text()), Setup(heads=heads, mtp_mode="heads_only", max_length=LENGTH)
    )
    tokens = re.search(r"hidden states of the trunk for (\d+) tokens", done.stderr)
    assert tokens is not None
    flops = int(tokens.group(1)) * streamed.flops_per_token
    print(f"peak memory {peak / 1e9:.2f} GB, estimated {streamed.peak / 1e9:.2f} GB: {peak / streamed.peak:.2f}x")
    print(f"trunk {flops:.3g} FLOPs for {tokens.group(1)} tokens; whole run {seconds:.0f} s")


if __name__ == "__main__":
    main()
