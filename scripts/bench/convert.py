"""Measure converting 1 GB from Hugging Face to Megatron and back, relative to loading and saving the file.

    python scripts/bench/convert.py [--gigabytes 1.0] [--rounds 5] [--dir DIR]

Prints one line per figure: name, median seconds, ratio to loading and saving, and whether the target is met. Steps run
in alternating subprocesses, with the file in the page cache; imports and building the model are not measured. Times of
writing include the time until data are on disk (fsync), because swiftlite waits for it. The exit code is 1 if a target
is missed.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
from pathlib import Path

from contest import race, timed

TARGET = 2.0  # of each direction, relative to plain load + save
THREADS = 2
HF_CONFIG = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rms_norm_eps": 1e-6,
    "vocab_size": 32000,
    "max_position_embeddings": 512,
    "num_nextn_predict_layers": 1,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}


def make_checkpoint(directory: Path, gigabytes: float) -> None:
    """Write a file of about `gigabytes` with random bfloat16 values in the shapes of a Qwen3 with one MTP head."""
    import torch
    from safetensors.torch import save_file

    from swiftlite import families

    sizes = []
    for num_layers in (1, 2):
        rows = families.FAMILIES["qwen3"].rows(HF_CONFIG | {"num_hidden_layers": num_layers})
        sizes.append(sum(2 * torch.Size(shape).numel() for row in rows for shape in row.hf.values()))
    per_layer = sizes[1] - sizes[0]
    num_layers = 2 * max(1, round((gigabytes * 1e9 - sizes[0] + per_layer) / per_layer / 2))  # even, for two stages
    config = HF_CONFIG | {"num_hidden_layers": num_layers}
    rows = families.get(config).rows(config)
    tensors = {key: torch.randn(shape).bfloat16() for row in rows for key, shape in row.hf.items()}
    directory.mkdir()
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(config))


def run_plain(source: Path, out_dir: Path) -> dict[str, float]:
    """Load and save with the safetensors package.

    The package maps the file, so the tensors are also copied to load them.
    """
    from safetensors.torch import load_file, save_file

    tensors = {}

    def load() -> None:
        tensors.update({key: tensor.clone() for key, tensor in load_file(source / "model.safetensors").items()})

    def save() -> None:
        save_file(tensors, out_dir / "model.safetensors", metadata={"format": "pt"})
        with (out_dir / "model.safetensors").open("rb") as file:
            os.fsync(file.fileno())

    return {"plain": timed(load)[0] + timed(save)[0]}


def run_bridge(source: Path, out_dir: Path) -> dict[str, float]:
    """Measure `load_hf` into an existing Megatron model, and then `save_hf`."""
    import torch

    from swiftlite import families
    from swiftlite.base.heads import Heads
    from swiftlite.bridge.hf_config import read_config
    from swiftlite.bridge.saving import save_hf
    from swiftlite.bridge.tensors import describe
    from swiftlite.bridge.transfer import load_hf
    from swiftlite.model.build import build_model
    from swiftlite.runtime.distributed import session

    hf_config = read_config(source)
    family = families.get(hf_config)
    with session() as mesh:
        architecture = family.architecture(hf_config)
        model = build_model(architecture, hf_config, mesh=mesh, dtype=torch.bfloat16, heads=Heads(1))
        with torch.no_grad():
            for parameter in model[0].parameters():
                parameter.zero_()  # allocates the pages before the measurement
        dtypes = {key: tensor["dtype"] for key, tensor in describe(source).items()}
        found = {
            "HF -> Megatron": timed(lambda: load_hf(model, source, family, hf_config))[0],
            "Megatron -> HF": timed(lambda: save_hf(model, out_dir, family, hf_config, dtypes=dtypes))[0],
        }
        check_equal(source, out_dir)
    return found


def check_equal(source: Path, out_dir: Path) -> None:
    """Check that the conversion is bitwise exact."""
    import torch
    from safetensors.torch import load_file

    one, other = load_file(source / "model.safetensors"), load_file(out_dir / "model.safetensors")
    assert one.keys() == other.keys()
    assert all(torch.equal(one[key], other[key]) for key in one)


CONTESTANTS = {"plain": run_plain, "bridge": run_bridge}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dir", type=Path, help="where to work; needs three times the size")
    parser.add_argument("--contestant", choices=CONTESTANTS, help=argparse.SUPPRESS)
    parser.add_argument("--source", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.contestant:
        with tempfile.TemporaryDirectory(dir=options.source.parent) as out_dir:
            print(json.dumps(CONTESTANTS[options.contestant](options.source, Path(out_dir))))
        return 0

    with tempfile.TemporaryDirectory(dir=options.dir) as work_dir:
        source = Path(work_dir) / "source"
        make_checkpoint(source, options.gigabytes)
        size = (source / "model.safetensors").stat().st_size / 1e9
        results = race(CONTESTANTS, options.rounds + 1, THREADS, "--source", source)
    medians: dict[str, float] = {}
    for _, *rounds in results.values():  # the first round fills the page cache
        medians |= {name: statistics.median(one[name] for one in rounds) for name in rounds[0]}
    plain = medians.pop("plain")
    print(f"checkpoint {size:.2f} GB, {options.rounds} rounds, {THREADS} threads")
    print(f"{'plain load + save':<18} {plain:7.3f} s")
    for direction, median in medians.items():
        verdict = "ok" if median <= TARGET * plain else f"over the target of {TARGET}x"
        print(f"{direction:<18} {median:7.3f} s   {median / plain:6.3f}x of plain load + save   {verdict}")
    return int(max(medians.values()) > TARGET * plain)


if __name__ == "__main__":
    sys.exit(main())
