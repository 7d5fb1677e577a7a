"""Conversion: Hugging Face -> Megatron -> Hugging Face of 1 GB, against safetensors load + save of the same file.

    python scripts/bench/convert.py [--gigabytes 1.0] [--rounds 5] [--dir DIR]

One line per figure: what, median seconds, ratio to the reference named in the line, and whether the target holds; then
the memory that each step takes beyond what it starts with. Every step runs in a process of its own, in turn, with the
file in the page cache; imports and the building of the model are not counted. All writes count until they are on disk
(fsync), since the bridge does not return before. The same then by 4 processes (tensor parallel 2 x pipeline parallel
2), one thread each, each with its own slices: the slowest one's seconds and the largest one's memory, against 1
process. Exit code 1 when a target is missed.
"""

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

TARGET = 2.0  # each way, against the plain load + save
THREADS = 2
RANKS = 4
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
    """Random bfloat16 numbers in the shapes of a Qwen3 with one MTP head, of about this size, in one file."""
    import torch
    from safetensors.torch import save_file

    from swiftlite import families

    sizes = []
    for num_layers in (1, 2):
        rows = families.FAMILIES["qwen3"].rows(HF_CONFIG | {"num_hidden_layers": num_layers})
        sizes.append(sum(2 * torch.Size(shape).numel() for row in rows for shape in row.hf.values()))
    per_layer = sizes[1] - sizes[0]
    num_layers = 2 * max(1, round((gigabytes * 1e9 - sizes[0] + per_layer) / per_layer / 2))  # even: for two stages
    config = HF_CONFIG | {"num_hidden_layers": num_layers}
    rows = families.get(config).rows(config)
    tensors = {key: torch.randn(shape).bfloat16() for row in rows for key, shape in row.hf.items()}
    directory.mkdir()
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(config))


def resident(kind: str) -> float:
    """Memory of this process in GB, as the kernel counts it: VmRSS now, VmHWM at most, RssAnon without mapped files."""
    match = re.search(rf"{kind}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert match
    return int(match.group(1)) * 1024 / 1e9


def measure(step: Callable[[], object]) -> dict[str, float]:
    """Seconds that a step takes, and the most memory it takes beyond what was there before."""
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts again from here
    before = resident("VmRSS")
    start = time.perf_counter()
    step()
    return {"seconds": time.perf_counter() - start, "peak": resident("VmHWM") - before}


def run_plain(source: Path, out_dir: Path) -> dict[str, dict[str, float]]:
    """The safetensors package: load into memory (it maps the file; the copy is what makes it a load), then save."""
    from safetensors.torch import load_file, save_file

    tensors = {}

    def load() -> None:
        tensors.update({key: tensor.clone() for key, tensor in load_file(source / "model.safetensors").items()})

    def save() -> None:
        save_file(tensors, out_dir / "model.safetensors", metadata={"format": "pt"})
        with (out_dir / "model.safetensors").open("rb") as file:
            os.fsync(file.fileno())

    return {"plain load": measure(load), "plain save": measure(save)}


def run_bridge(source: Path, out_dir: Path) -> dict[str, dict[str, float]]:
    """load_hf into a Megatron model that exists, then save_hf."""
    import torch

    from swiftlite import families
    from swiftlite.args.fields import ParallelLayout
    from swiftlite.bridge import placement
    from swiftlite.bridge.hf_config import read_config
    from swiftlite.bridge.tensors import describe
    from swiftlite.bridge.transfer import load_hf, save_hf
    from swiftlite.heads import Heads
    from swiftlite.model.build import build_model
    from swiftlite.runtime.distributed import session

    hf_config = read_config(source)
    family = families.get(hf_config)
    size = 2 if int(os.environ.get("WORLD_SIZE", "1")) == RANKS else 1
    layout = ParallelLayout(tensor_model_parallel_size=size, pipeline_model_parallel_size=size)
    with session(layout) as mesh:
        architecture = family.architecture(hf_config)
        model = build_model(architecture, hf_config, mesh=mesh, dtype=torch.bfloat16, heads=Heads(1))
        with torch.no_grad():
            for parameter in (parameter for chunk in model for parameter in chunk.parameters()):
                parameter.zero_()  # the pages exist before the clock starts
        dtypes = {key: tensor["dtype"] for key, tensor in describe(source).items()}
        placement.barrier()
        mine = {
            "load_hf": measure(lambda: load_hf(model, source, family, hf_config)),
            "save_hf": measure(lambda: save_hf(model, out_dir, family, hf_config, dtypes=dtypes)),
        }
        ranks = placement.gather_from_all_ranks(mine)
        if placement.is_first_rank():
            check_equal(source, out_dir)
    suffix = f"_{RANKS}" if size > 1 else ""
    return {
        name + suffix: {figure: max(rank[name][figure] for rank in ranks) for figure in mine[name]} for name in mine
    }


def check_equal(source: Path, out_dir: Path) -> None:
    """A fast conversion that loses a bit is worth nothing."""
    import torch
    from safetensors.torch import load_file

    one, other = load_file(source / "model.safetensors"), load_file(out_dir / "model.safetensors")
    assert one.keys() == other.keys()
    assert all(torch.equal(one[key], other[key]) for key in one)


def run_apart(what: str, source: Path, processes: int = 1) -> dict[str, dict[str, float]]:
    """`run_plain` or `run_bridge` in a fresh process, or in several."""
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    with tempfile.TemporaryDirectory(dir=source.parent) as out_dir:
        command = [*(start if processes > 1 else start[:1]), __file__]
        command += ["--step", what, "--dir", str(source), "--out", out_dir]
        threads = str(THREADS if processes == 1 else 1)
        environment = os.environ | {"OMP_NUM_THREADS": threads, "PYTHONWARNINGS": "ignore"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stderr)
    return json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dir", type=Path, help="where to work; needs three times the size")
    parser.add_argument("--step", choices=["plain", "bridge"], help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.step:
        figures = {"plain": run_plain, "bridge": run_bridge}[options.step](options.dir, options.out)
        if os.environ.get("RANK", "0") == "0":
            print(json.dumps(figures))
        return 0

    with tempfile.TemporaryDirectory(dir=options.dir) as work_dir:
        source = Path(work_dir) / "source"
        make_checkpoint(source, options.gigabytes)
        size = (source / "model.safetensors").stat().st_size / 1e9
        rounds = []
        for _ in range(options.rounds + 1):
            one = run_apart("plain", source) | run_apart("bridge", source)
            rounds.append(one | run_apart("bridge", source, RANKS))
    rounds = rounds[1:]  # the first fills the page cache

    def median(name: str, figure: str) -> float:
        return statistics.median(one[name][figure] for one in rounds)

    plain = statistics.median(one["plain load"]["seconds"] + one["plain save"]["seconds"] for one in rounds)
    print(f"checkpoint {size:.2f} GB, {options.rounds} rounds, {THREADS} threads")
    print(f"{'plain load + save':<18} {plain:7.3f} s   {1:6.3f}x")
    missed = False
    for name, direction in (("load_hf", "HF -> Megatron"), ("save_hf", "Megatron -> HF")):
        seconds = median(name, "seconds")
        missed |= seconds > TARGET * plain
        verdict = "ok" if seconds <= TARGET * plain else f"over the target of {TARGET}x"
        print(f"{direction:<18} {seconds:7.3f} s   {seconds / plain:6.3f}x of plain load + save   {verdict}")
    for name, reference in (("load_hf", "plain load"), ("save_hf", "plain save")):
        seconds, plain_seconds = median(name, "seconds"), median(reference, "seconds")
        print(f"{name:<18} {seconds:7.3f} s   {seconds / plain_seconds:6.3f}x of {reference} ({plain_seconds:.3f} s)")
    for name in ("load_hf", "save_hf"):
        seconds, alone = median(f"{name}_{RANKS}", "seconds"), median(name, "seconds")
        print(f"{name}, {RANKS} ranks {seconds:7.3f} s   {seconds / alone:6.3f}x of 1 process ({alone:.3f} s)")
    for name in ("plain load", "load_hf", f"load_hf_{RANKS}", "plain save", "save_hf", f"save_hf_{RANKS}"):
        note = "   (its result, the tensors themselves, included)" if name == "plain load" else ""
        print(
            f"{name:<18} {median(name, 'peak'):7.3f} GB  {median(name, 'peak') / size:6.3f}x of the file, at most{note}"
        )
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
