"""Compare real training runs bit by bit before and after a refactoring.

    python scripts/guard.py record before.json                   # in a checkout before the change
    python scripts/guard.py record after.json                    # in a checkout after it
    python scripts/guard.py compare before.json after.json
    python scripts/guard.py check before.json --only 'TP2*'      # record and compare, selected cases only

A case trains a tiny model for a few steps with the code of this file's checkout, and exports the model. A recording
contains the lines of metrics.jsonl without timings, acceptance.json, and the export: a hash of each tensor, config.json
line by line, and hashes of the other files. Two recordings of the same code on the same machine are equal. Results also
depend on the processor model and on the versions of torch and other packages; `compare` reports it if these differ.

The script uses only the command line, scripts/make_tiny_model.py and the files that runs write. Importing torch and
megatron-core takes longer than the training. Commands therefore run in processes that are forked from a process which
has imported them, as in tests (tests/forked.py). Cases with `is_launched` start new processes.
"""

import argparse
import hashlib
import importlib.metadata
import json
import os
import platform
import random
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("torch", "megatron-core", "transformers", "tokenizers", "safetensors", "numpy")
VARIABLES = {
    "PYTHONPATH": str(ROOT),
    "OMP_NUM_THREADS": "1",  # the order of additions depends on it
    "CUDA_VISIBLE_DEVICES": "",
    "HF_HUB_OFFLINE": "1",
    "PYTHONWARNINGS": "ignore",  # megatron-core warns that Apex is missing
}
# Variables of the shell that would change the number of processes of a case.
CLEARED = ("NPROC_PER_NODE", "NNODES", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT", "RANK", "LOCAL_RANK", "WORLD_SIZE")
TIMEOUT = 900  # seconds for one command; a few are usual
CLOCK = ("_per_second", "seconds", "mfu", "_gb")  # suffixes of metrics that differ between equal runs

# Options of make_tiny_model.py by name. Checkpoints have heads if published models of the family have them.
SIZES = "--hidden_size 256 --num_layers 4 --vocab_size 512"
MODELS = {
    "llama": "--family llama",
    "qwen2": "--family qwen2 --tie_word_embeddings",
    "qwen3": "--family qwen3",
    "mimo": "--family mimo",
    "mimo_2_heads": "--family mimo --mtp_num_layers 2 --seed 43",
    "qwen3_moe": "--family qwen3_moe",
    "glm4_moe": "--family glm4_moe",
    "deepseek_v3": "--family deepseek_v3",
}
# 20 rows, 3 steps of 8: the last step is in the second epoch.
NUM_ROWS, NUM_HELD_OUT_ROWS = 20, 8
TRAINING = (
    "--max_length 160 --torch_dtype float32 --lr 1e-3 "
    "--micro_batch_size 2 --global_batch_size 8 --train_iters 3 --save_steps 100 --eval_steps 100 "
    "--mtp_loss_scaling_factor 0.3 --acceptance_samples 2 --acceptance_max_new_tokens 6 --report_to none"
)
NEW_HEAD = "--mtp_num_layers 1 --mtp_init copy_last_layer"
PACKED = "--packing true --packing_length 192 --micro_batch_size 1 --global_batch_size 4"
DP_BALANCED = "--packing true --packing_length 192 --micro_batch_size 1 --sequence_packing_scheduler dp_balanced"
PAIRS_PACKED = "--packing true --packing_length 320 --micro_batch_size 1 --global_batch_size 4"
STREAMED = f"{PACKED} --streaming true --streaming_buffer_size 12"


@dataclass(frozen=True)
class Layout:
    num_processes: int
    options: str


ALONE = Layout(1, "")
TP2_SP = Layout(2, "--tensor_model_parallel_size 2 --sequence_parallel true")
TP2_SP_EP2 = Layout(2, f"{TP2_SP.options} --expert_model_parallel_size 2")
TP2_SP_PP2 = Layout(4, f"{TP2_SP.options} --pipeline_model_parallel_size 2")
PP2_VPP2 = Layout(2, "--pipeline_model_parallel_size 2 --num_virtual_stages_per_pipeline_rank 2")
PP2_HEAD_APART = Layout(2, "--pipeline_model_parallel_size 2 --pipeline_model_parallel_layout 'Et*4|mL'")
CP2 = Layout(2, "--context_parallel_size 2")
EP2 = Layout(2, "--expert_model_parallel_size 2")
DP2 = Layout(2, "")
DP2_SHARED = Layout(2, "--use_distributed_optimizer true")
DP2_OVERLAP = Layout(2, f"{DP2_SHARED.options} --overlap_grad_reduce true --overlap_param_gather true")


@dataclass(frozen=True)
class Case:
    """A training run and its export.

    Attributes:
        model: a key of MODELS.
        options: options of the command, in addition to TRAINING.
        command: subcommand of `megatron`.
        rows: prefix of the files data/ROWS_train.jsonl and data/ROWS_val.jsonl.
        resumed_at: layout in which training resumes after two steps, for another two steps.
        is_launched: whether commands start new processes instead of forks; with several ranks, NPROC_PER_NODE is set.
        grafted_from: a key of MODELS: the model whose heads are copied.
    """

    model: str
    options: str = ""
    layout: Layout = ALONE
    resumed_at: Layout | None = None
    exported_at: Layout = ALONE
    is_launched: bool = False
    grafted_from: str | None = None
    command: str = "sft"
    rows: str = "turns"


CASES: dict[str, Case] = {
    "llama": Case("llama", "--mtp_num_layers 1 --mtp_init random"),
    "qwen2 tied": Case("qwen2", NEW_HEAD),
    "qwen3": Case("qwen3", NEW_HEAD),
    "mimo": Case("mimo"),
    "qwen3_moe aux loss": Case("qwen3_moe", f"{NEW_HEAD} --moe_aux_loss_coeff 0.01"),
    "glm4_moe bias update": Case("glm4_moe", "--moe_router_bias_update_rate 0.001"),
    "deepseek_v3": Case("deepseek_v3"),
    "llama no head": Case("llama", "--mtp_num_layers 0 --clip_grad 0"),
    # layouts
    "TP2+SP qwen3": Case("qwen3", NEW_HEAD, TP2_SP, exported_at=TP2_SP),
    "TP2+SP deepseek_v3": Case("deepseek_v3", "", TP2_SP),
    "TP2+SP+EP2 glm4_moe": Case("glm4_moe", "", TP2_SP_EP2, exported_at=EP2),
    "TP2+SP+PP2 llama": Case("llama", NEW_HEAD, TP2_SP_PP2),
    "PP2xVPP2 qwen3 depth 2": Case("qwen3", "--mtp_num_layers 2 --mtp_init copy_last_layer", PP2_VPP2),
    "PP2xVPP2 qwen3_moe": Case("qwen3_moe", NEW_HEAD, PP2_VPP2, exported_at=PP2_VPP2),
    "PP2 head apart qwen2 tied": Case("qwen2", NEW_HEAD, PP2_HEAD_APART),
    "CP2 llama": Case("llama", NEW_HEAD, CP2),
    "CP2 deepseek_v3": Case("deepseek_v3", "", CP2),
    "EP2 qwen3_moe": Case("qwen3_moe", NEW_HEAD, EP2),
    "DP2 shared optimizer qwen3": Case("qwen3", NEW_HEAD, DP2_SHARED, is_launched=True),
    "DP2 overlap glm4_moe": Case("glm4_moe", "", DP2_OVERLAP),
    # data
    "padding_free heads_only kl llama": Case(
        "llama", f"{NEW_HEAD} --padding_free true --mtp_mode heads_only --mtp_loss kl"
    ),
    "padding_free TP2+SP qwen3_moe": Case("qwen3_moe", f"{NEW_HEAD} --padding_free true", TP2_SP),
    "packing deepseek_v3": Case("deepseek_v3", PACKED),
    "packing CP2 qwen3": Case("qwen3", f"{NEW_HEAD} {PACKED}", CP2),
    "packing PP2xVPP2 mimo": Case("mimo", PACKED, PP2_VPP2),
    "dp_balanced DP2 mimo": Case("mimo", DP_BALANCED, DP2),
    "dp_balanced EP2 glm4_moe": Case("glm4_moe", DP_BALANCED, EP2),
    "streaming qwen2": Case("qwen2", f"{NEW_HEAD} {STREAMED}"),
    "streaming PP2xVPP2 llama": Case("llama", f"{NEW_HEAD} {STREAMED}", PP2_VPP2),
    # what heads learn
    "heads_only glm4_moe": Case("glm4_moe", "--mtp_mode heads_only"),
    "tv deepseek_v3": Case("deepseek_v3", "--mtp_loss tv"),
    "heads_only kl TP2+SP mimo": Case("mimo", "--mtp_mode heads_only --mtp_loss kl", TP2_SP),
    "unroll 3 qwen3": Case("qwen3", f"{NEW_HEAD} --mtp_unroll 3"),
    "unroll 3 packing heads_only tv mimo": Case("mimo", f"--mtp_unroll 3 --mtp_mode heads_only --mtp_loss tv {PACKED}"),
    "unroll 3 PP2 kl deepseek_v3": Case("deepseek_v3", "--mtp_unroll 3 --mtp_loss kl", PP2_HEAD_APART),
    "graft depth 2 mimo": Case("mimo", "--mtp_num_layers 2", grafted_from="mimo_2_heads"),
    # recomputation, precision
    "full recompute mimo depth 2": Case(
        "mimo_2_heads", "--recompute_granularity full --recompute_method block --recompute_num_layers 2"
    ),
    "full recompute TP2+SP glm4_moe": Case("glm4_moe", "--recompute_granularity full", TP2_SP),
    "selective recompute deepseek_v3": Case(
        "deepseek_v3", "--recompute_granularity selective --recompute_modules core_attn mlp moe mla_up_proj"
    ),
    "bfloat16 qwen3": Case("qwen3", f"{NEW_HEAD} --torch_dtype bfloat16"),
    "bfloat16 DP2 shared optimizer deepseek_v3": Case("deepseek_v3", "--torch_dtype bfloat16", DP2_SHARED),
    # other methods
    "pt packed mimo": Case("mimo", "--packing_length 192 --global_batch_size 4", command="pt", rows="texts"),
    "dpo mimo": Case("mimo", command="dpo", rows="pairs"),
    "dpo packed TP2+SP llama": Case("llama", f"{NEW_HEAD} {PAIRS_PACKED}", TP2_SP, command="dpo", rows="pairs"),
    "orpo CP2 qwen3": Case("qwen3", f"{NEW_HEAD} --loss_type orpo", CP2, command="dpo", rows="pairs"),
    "kto DP2 mimo": Case("mimo", "--loss_type kto", DP2, command="dpo", rows="rated"),
    "kto packed qwen3_moe": Case(
        "qwen3_moe", f"{NEW_HEAD} --loss_type kto {PACKED}", exported_at=EP2, command="dpo", rows="rated"
    ),
    # checkpoints
    "resume mimo": Case("mimo", "--async_save true", resumed_at=ALONE),
    "resume bfloat16 streaming DP2 qwen3_moe": Case(
        "qwen3_moe", f"{NEW_HEAD} {STREAMED} --torch_dtype bfloat16", DP2_SHARED, resumed_at=DP2_SHARED
    ),
    "resume PP2 as TP2+SP+EP2 glm4_moe": Case("glm4_moe", "", PP2_HEAD_APART, resumed_at=TP2_SP_EP2, exported_at=EP2),
}


class CommandFailed(Exception):
    """A command of a case failed; the message contains the last lines of its log."""


def run_swiftlite(command: str, num_processes: int, is_launched: bool, log: Path) -> None:
    """Run `swiftlite COMMAND` in this directory.

    Raises:
        CommandFailed: the exit code is not 0.
    """
    words = shlex.split(command)
    if is_launched:
        launch: dict[str, str] = {}
        if num_processes > 1:
            launch["NPROC_PER_NODE"] = str(num_processes)
        run_python(["-m", "swiftlite", *words], log, launch)
    else:
        run_forked(words, num_processes, log)


def run_python(words: Sequence[str], log: Path, variables: dict[str, str] | None = None) -> None:
    with log.open("ab") as output:
        done = subprocess.run(
            [sys.executable, *words], env=os.environ | (variables or {}), stdout=output, stderr=subprocess.STDOUT
        )
    if done.returncode:
        raise CommandFailed(tail(log))


def run_forked(words: Sequence[str], num_processes: int, log: Path) -> None:
    """Run `swiftlite WORDS` in forked processes, with the environment variables that torchrun would set."""
    from tests.forked import start_swiftlite
    from tests.parallel.launch import open_store, rank_environments

    store = open_store()  # held while the processes run
    ranks: list[dict[str, str]] = [{}]
    if num_processes > 1:
        ranks = rank_environments(num_processes, store.port)
    running = start_swiftlite(words, Path.cwd(), [os.environ | rank for rank in ranks], log.absolute(), log.absolute())
    try:
        code = running.wait(TIMEOUT)
    except subprocess.TimeoutExpired:
        code = running.kill()
    if code:
        raise CommandFailed(tail(log))


def tail(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-25:])


def make_data(directory: Path) -> None:
    """Write random conversations of one or two rounds. Also write them as pairs, as rated answers, and as text."""
    generator = random.Random(0)
    words = "sum list of the a value returns key text when set file first last is and in to no each".split()

    def say(lowest: int, highest: int) -> str:
        return " ".join(generator.choices(words, k=generator.randint(lowest, highest)))

    def make_row() -> dict[str, Any]:
        rounds = generator.choice((1, 1, 2))
        messages = []
        if generator.random() < 0.25:
            messages.append({"role": "system", "content": "Be brief."})
        for _ in range(rounds):
            messages.append({"role": "user", "content": f"What is the {say(1, 12)}?"})
            messages.append({"role": "assistant", "content": f"It is the {say(1, 24)}."})
        return {"messages": messages, "channel": "long" if rounds > 1 else "short"}

    directory.mkdir()
    for name, count in (("train", NUM_ROWS), ("val", NUM_HELD_OUT_ROWS)):
        turns = [make_row() for _ in range(count)]
        rows = {"turns": turns, "pairs": [], "rated": [], "texts": []}
        for number, row in enumerate(turns):
            answer = row["messages"][-1]["content"]
            rows["pairs"].append(row | {"rejected_response": answer[: len(answer) // 2] + " maybe"})
            rows["rated"].append(row | {"label": number % 3 > 0})
            rows["texts"].append({"text": " ".join(message["content"] for message in row["messages"])})
        for kind, of_kind in rows.items():
            (directory / f"{kind}_{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in of_kind))


def make_model(name: str) -> Path:
    """Create models/NAME if it does not exist."""
    directory = Path("models") / name
    if not directory.exists():
        Path("models").mkdir(exist_ok=True)
        command = f"{ROOT / 'scripts' / 'make_tiny_model.py'} --output_dir {directory} {SIZES} {MODELS[name]}"
        run_python(shlex.split(command), Path("models") / f"{name}.log")
        roughen(directory / "model.safetensors")
    return directory


def roughen(file: Path) -> None:
    """Scale matrices, and make the values of norms and biases different, so that a misplaced tensor changes the
    results.
    """
    import torch
    from safetensors.torch import load_file, save_file

    generator = torch.Generator().manual_seed(0)
    tensors = load_file(file)
    for name in sorted(tensors):
        if tensors[name].dim() == 1:
            tensors[name] += 0.1 * torch.randn(tensors[name].shape, generator=generator)
        else:
            tensors[name] *= 3  # logits differ clearly between tokens
            # The embedding of padding is 0, for which the gradient of a norm is a thousand times larger than for
            # others.
            tensors[name][(tensors[name] == 0).all(-1)] = 0.05
    save_file(tensors, file, metadata={"format": "pt"})


def run_case(case: Case, directory: Path) -> dict[str, Any]:
    """Train and export in `directory`; return the values to compare."""
    run, exported, log = directory / "run", directory / "exported", directory / "log.txt"
    files = f"--dataset data/{case.rows}_train.jsonl --val_dataset data/{case.rows}_val.jsonl"
    model = make_model(case.model)
    training = f"megatron {case.command} --model {model} --output_dir {run} {files} {TRAINING} {case.options}"
    if case.grafted_from:
        training += f" --mtp_init graft --mtp_graft_from {make_model(case.grafted_from)}"
    if case.resumed_at is None:
        run_swiftlite(f"{training} {case.layout.options}", case.layout.num_processes, case.is_launched, log)
    else:
        training += " --lr_decay_style constant --lr_warmup_fraction 0"  # independent of the number of steps
        first, second = case.layout, case.resumed_at
        run_swiftlite(f"{training} --train_iters 2 {first.options}", first.num_processes, case.is_launched, log)
        again = f"{training} --train_iters 4 --resume true {second.options}"
        run_swiftlite(again, second.num_processes, case.is_launched, log)
    export = f"export --to_hf --model {run} --output_dir {exported} {case.exported_at.options}"
    run_swiftlite(export, case.exported_at.num_processes, case.is_launched, log)
    return {
        "metrics": read_metrics(run / "metrics.jsonl"),
        "acceptance": read_json(run / "acceptance.json"),
        "export": read_export(exported),
    }


def read_metrics(file: Path) -> list[dict[str, Any]]:
    lines = []
    for line in file.read_text().splitlines():
        metrics = json.loads(line)
        kept = [name for name in metrics if not name.startswith("time/") and not name.endswith(CLOCK)]
        lines.append({name: metrics[name] for name in kept})
    return lines


def read_json(file: Path) -> Any:
    """Return the content of a file; None if it does not exist, such as acceptance.json of a model without heads."""
    if not file.exists():
        return None
    return json.loads(file.read_text())


def read_export(directory: Path) -> dict[str, Any]:
    """Return, for each file of an export: a hash of each tensor (safetensors), the lines (config.json), or a hash of
    the file.
    """
    content: dict[str, Any] = {}
    for file in sorted(directory.iterdir()):
        if file.suffix == ".safetensors":
            content[file.name] = hash_tensors(file)
        elif file.name == "config.json":
            content[file.name] = file.read_text().splitlines()
        else:
            content[file.name] = hashlib.sha256(file.read_bytes()).hexdigest()
    return content


def hash_tensors(file: Path) -> dict[str, str]:
    """Return a hash of the name, dtype, shape and bytes of each tensor, and a hash of all tensors
    together (key "all").
    """
    import torch
    from safetensors import safe_open

    hashes = {}
    with safe_open(file, "pt") as tensors:
        for name in sorted(tensors.keys()):
            tensor = tensors.get_tensor(name)
            digest = hashlib.sha256(f"{name} {tensor.dtype} {tuple(tensor.shape)} ".encode())
            digest.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())
            hashes[name] = digest.hexdigest()
    return hashes | {"all": hashlib.sha256("".join(hashes.values()).encode()).hexdigest()}


def record(file: Path, only: str, keep: Path | None) -> bool:
    """Run the cases and write their results; return whether all cases succeeded."""
    os.environ.update(VARIABLES)
    for name in CLEARED:
        os.environ.pop(name, None)
    sys.path.insert(0, str(ROOT))
    file = file.resolve()
    start = time.monotonic()
    names = [name for name in CASES if fnmatchcase(name, only)]
    results: dict[str, Any] = {}
    recording = {"environment": describe_environment(), "commit": describe_commit(), "inputs": {}, "cases": results}
    with tempfile.TemporaryDirectory() as temporary:
        work = keep or Path(temporary)
        work.mkdir(parents=True, exist_ok=True)
        os.chdir(work)  # so that directory names are the same in every recording
        make_data(Path("data"))
        failed = 0
        for number, name in enumerate(names, start=1):
            case_start = time.monotonic()
            directory = Path("cases") / str(number)
            directory.mkdir(parents=True)
            problem = ""
            try:
                results[name] = run_case(CASES[name], directory)
            except CommandFailed as error:
                failed += 1
                problem = f"  FAILED\n{error}"
                results[name] = {"failed": True}
            if keep is None:
                shutil.rmtree(directory)
            print(f"{time.monotonic() - case_start:6.1f} s  {name}{problem}", flush=True)
        recording["inputs"] = hash_inputs()
        file.write_text(json.dumps(recording, indent=1) + "\n")
        os.chdir(ROOT)
    print(f"{time.monotonic() - start:6.1f} s  {len(names)} cases, {failed} failed: {file}")
    return not failed


def hash_inputs() -> dict[str, str]:
    """Return hashes of the data and the models of the cases."""
    hashes = {}
    for file in sorted(Path("data").iterdir()):
        hashes[str(file)] = hashlib.sha256(file.read_bytes()).hexdigest()
    for directory in sorted(Path("models").glob("*/")):
        for name in ("config.json", "tokenizer.json"):
            hashes[str(directory / name)] = hashlib.sha256((directory / name).read_bytes()).hexdigest()
        hashes[str(directory)] = hash_tensors(directory / "model.safetensors")["all"]
    return hashes


def describe_environment() -> dict[str, str]:
    """Return what results depend on except the code: processor and versions."""
    import torch

    described = {"processor": processor(), "capability": torch.backends.cpu.get_cpu_capability()}
    described["python"] = platform.python_version()
    for package in PACKAGES:
        described[package] = importlib.metadata.version(package)
    return described


def processor() -> str:
    """Return name, family and model of the first processor."""
    values = {}
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        values.setdefault(name.strip(), value.strip())
    parts = [values.get(name, "?") for name in ("model name", "cpu family", "model")]
    return f"{parts[0]}, family {parts[1]}, model {parts[2]}"


def describe_commit() -> str:
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
    return subprocess.run(command, capture_output=True, text=True).stdout.strip()


def compare(before: Path, after: Path, only: str) -> bool:
    """Print a line for each case; return whether all cases are equal."""
    old, new = (json.loads(file.read_text()) for file in (before, after))
    print(f"{before}: {old['commit']}\n{after}: {new['commit']}")
    for part, meaning in (
        ("environment", "results may differ for this reason"),
        ("inputs", "different models or data"),
    ):
        for name in sorted(old[part].keys() & new[part].keys()):
            if old[part][name] != new[part][name]:
                print(f"{name}: {old[part][name]} before, {new[part][name]} after ({meaning})")
    num_different = 0
    names = [name for name in old["cases"] | new["cases"] if fnmatchcase(name, only)]
    for name in names:
        difference = describe_difference(old["cases"].get(name), new["cases"].get(name))
        num_different += bool(difference)
        print(f"{name}: {difference or 'equal'}")
    print(f"{len(names) - num_different} of {len(names)} cases are equal")
    return not num_different


def describe_difference(before: Any, after: Any) -> str:
    """Return the first difference and the number of differences; empty if the results are equal."""
    if before is None:
        return "not in the first file"
    if after is None:
        return "not in the second file"
    if "failed" in before or "failed" in after:
        return "failed"
    old, new = dict(flatten(before)), dict(flatten(after))
    different = [path for path in old | new if repr(old.get(path)) != repr(new.get(path))]
    if not different:
        return ""
    path = different[0]
    if path not in new:
        text = f"{path} only before"
    elif path not in old:
        text = f"{path} only after"
    else:
        text = f"{path} {old[path]!r} before, {new[path]!r} after{describe_distance(old[path], new[path])}"
    return f"{text}; {len(different)} of {len(old | new)} values differ"


def describe_distance(before: Any, after: Any) -> str:
    if not (isinstance(before, float) and isinstance(after, float)) or before == 0:
        return ""
    return f" (relative difference {abs(after - before) / abs(before):.1e})"


def flatten(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield all leaves of nested lists and dicts with their paths."""
    if isinstance(value, dict):
        prefix = ""
        if path:
            prefix = f"{path}."
        for name, part in value.items():
            yield from flatten(part, prefix + name)
    elif isinstance(value, list):
        for number, part in enumerate(value):
            yield from flatten(part, f"{path}[{number}]")
    else:
        yield path, value


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    recorder = commands.add_parser("record", help="run the cases and write FILE")
    recorder.add_argument("file", type=Path)
    comparer = commands.add_parser("compare", help="print the differences between two recordings")
    comparer.add_argument("before", type=Path)
    comparer.add_argument("after", type=Path)
    checker = commands.add_parser("check", help="record, and compare with FILE")
    checker.add_argument("file", type=Path)
    for command in (recorder, comparer, checker):
        command.add_argument("--only", default="*", metavar="PATTERN", help="case names, as a shell pattern [*]")
    for command in (recorder, checker):
        command.add_argument(
            "--keep", type=Path, metavar="DIR", help="use this new directory for models and runs, and keep it"
        )
    return parser.parse_args()


def main() -> int:
    args = parse()
    if not any(fnmatchcase(name, args.only) for name in CASES):
        sys.exit(f"--only {args.only!r} matches no case; an example of a case name is {next(iter(CASES))!r}")
    if args.command == "record":
        return int(not record(args.file, args.only, args.keep))
    if args.command == "compare":
        return int(not compare(args.before, args.after, args.only))
    with tempfile.TemporaryDirectory() as directory:
        before, after = args.file.resolve(), Path(directory) / "now.json"
        record(after, args.only, args.keep)
        return int(not compare(before, after, args.only))


if __name__ == "__main__":
    sys.exit(main())
