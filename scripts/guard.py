"""Compare training runs and their results bit by bit before and after a refactoring.

    python scripts/guard.py record before.json                   # in a checkout before the change
    python scripts/guard.py record after.json                    # in a checkout after it
    python scripts/guard.py compare before.json after.json
    python scripts/guard.py check before.json --only 'TP2*'      # record and compare, selected kinds only
    python scripts/guard.py check before.json --parts texts      # record and compare, in two minutes

The kinds of runs are those of tests/kinds.py. A recording has four parts:

runs    For each exported kind, a tiny model is trained for a few steps and exported: the lines of metrics.jsonl without
        timings, acceptance.json, and the export, as a hash of each tensor, the lines of config.json, and hashes of the
        other files.
texts   For every kind, the output of --dry_run, and of `doctor --plan` for a larger model of the same family.
gguf    For some runs, the GGUF file: a hash of each tensor, and the metadata.
drafts  For some runs, answers and draft counts of the transformers engine.

Two recordings of the same code on the same machine are equal. Results also depend on the processor model and on the
versions of torch and other packages; `compare` reports it if these differ. To record a commit without this script, copy
scripts/guard.py and tests/kinds.py into a checkout of it.

The script uses only the command line, scripts/make_tiny_model.py, scripts/make_tiny_vision_model.py, and the files that
runs write. Importing torch and megatron-core takes longer than the training. Commands therefore run in processes that
are forked from a process which has imported them, as in tests (tests/forked.py). Kinds with `is_launched` start new
processes.
"""

import argparse
import base64
import hashlib
import importlib.metadata
import io
import json
import os
import platform
import random
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.kinds import KINDS, LAYOUTS, NEW_HEAD, ONE_PROCESS, Kind, Layout  # noqa: E402  # of this checkout

PACKAGES = ("torch", "megatron-core", "transformers", "tokenizers", "safetensors", "numpy")
VARIABLES = {
    "PYTHONPATH": str(ROOT),
    "OMP_NUM_THREADS": "1",  # the order of additions depends on it
    "CUDA_VISIBLE_DEVICES": "",
    "HF_HUB_OFFLINE": "1",
    "PYTHONWARNINGS": "ignore",  # megatron-core warns that Apex is missing
}
# Variables of the shell that would change the number of processes of a run.
CLEARED = ("NPROC_PER_NODE", "NNODES", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT", "RANK", "LOCAL_RANK", "WORLD_SIZE")
TIMEOUT = 900  # seconds for one command; a few are usual
CLOCK = ("_per_second", "seconds", "mfu", "_gb")  # suffixes of metrics that differ between equal runs

# Options of the script that makes a model of tests/kinds.py.
SIZES = "--hidden_size 256 --num_layers 4 --vocab_size 512"
MODELS = {
    "dense": "--family mimo",
    "deeper": "--family mimo --num_layers 6 --seed 44",
    "two_heads": "--family mimo --mtp_num_layers 2 --seed 43",
    "experts": "--family glm4_moe",
    "deeper_experts": "--family glm4_moe --num_layers 6",
    "latent": "--family deepseek_v3",
    "lite": "--family glm4_moe_lite",
    "hybrid": "--family qwen3_next",
    "deepstack": "--family qwen3_vl",
    "windows": "--family qwen2_5_vl",
    "llama": "--family llama",
    "qwen2": "--family qwen2 --tie_word_embeddings",
    "qwen3": "--family qwen3",
    "qwen3_moe": "--family qwen3_moe",
}
WITHOUT_HEAD = ("hybrid", "deepstack", "windows")
"""Models for which the scripts make no head, although the kinds of runs expect one. Runs add it."""
WIDTHS = ("hidden_size", "intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size")
WIDTHS += ("num_attention_heads", "num_key_value_heads", "num_heads", "out_hidden_size")
LARGER = {"vocab_size": 256} | dict.fromkeys(WIDTHS, 16)
"""Factors of sizes in config.json for `doctor --plan`, which rounds to 10 MB."""
# 20 rows, 3 steps of 8: the last step is in the second epoch.
NUM_ROWS, NUM_HELD_OUT_ROWS = 20, 8
TRAINING = (
    "--max_length 160 --torch_dtype float32 --lr 1e-3 "
    "--micro_batch_size 2 --global_batch_size 8 --train_iters 3 --save_steps 100 --eval_steps 100 "
    "--mtp_loss_scaling_factor 0.3 --acceptance_samples 2 --acceptance_max_new_tokens 6 --report_to none"
)
PACKED = "--packing true --micro_batch_size 1 --global_batch_size 4 --packing_length"
OPTIONS = {"packed": f"{PACKED} 192", "packed_pairs": f"{PACKED} 320", "rollouts": "--reward_funcs length"}
ANSWERING = "--speculative mtp --temperature 0 --max_new_tokens 12 --torch_dtype float32"
SERVED = {
    "gguf": ("experts bias update", "latent", "gated delta"),
    "drafts": ("dense", "experts bias update", "latent"),
}
"""Kinds whose results have these parts."""


class CommandFailed(Exception):
    """A command of a kind failed; the message contains the exit code and the last lines of its log."""


def run_swiftlite(command: str, layout: Layout, log: Path, is_launched: bool = False) -> None:
    """Run `swiftlite COMMAND` in this directory, with the processes and options of a layout.

    Raises:
        CommandFailed: the exit code is not 0.
    """
    from tests.parallel.launch import open_store, rank_environments

    words = [*shlex.split(command), *layout.words()]
    if is_launched:
        run_python(["-m", "swiftlite", *words], log, {"NPROC_PER_NODE": str(layout.num_processes)})
        return
    store = open_store()  # held while the processes run
    ranks: list[dict[str, str]] = [{}]
    if layout.num_processes > 1:
        ranks = rank_environments(layout.num_processes, store.port)
    if code := run_forked(words, ranks, log):
        raise CommandFailed(f"exit code {code}\n{tail(log)}")


def run_python(words: Sequence[str], log: Path, variables: Mapping[str, str] | None = None) -> None:
    with log.open("ab") as output:
        done = subprocess.run(
            [sys.executable, *words], env=os.environ | (variables or {}), stdout=output, stderr=subprocess.STDOUT
        )
    if done.returncode:
        raise CommandFailed(f"exit code {done.returncode}\n{tail(log)}")


def run_forked(words: Sequence[str], environments: Sequence[Mapping[str, str]], log: Path) -> int | None:
    """Run `swiftlite WORDS` in forked processes, one for each set of environment variables; return the exit code."""
    from tests.forked import start_swiftlite

    environments = [os.environ | variables for variables in environments]
    running = start_swiftlite(words, Path.cwd(), environments, log.absolute(), log.absolute())
    try:
        return running.wait(TIMEOUT)
    except subprocess.TimeoutExpired:
        return running.kill()


def text_of(words: Sequence[str], log: Path, num_processes: int = 1) -> list[str]:
    """Return the output of `swiftlite WORDS`, which starts no other process, and its exit code."""
    code = run_forked(words, [{"NPROC_PER_NODE": str(num_processes)}], log)
    text = log.read_text().replace(str(Path.cwd()), "DIRECTORY").replace(str(ROOT), "CHECKOUT")
    return [*text.splitlines(), f"exit code {code}"]


def tail(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-25:])


def make_data(directory: Path) -> None:
    """Write random conversations of one or two rounds, and the rows of the other kinds, which are made of them."""
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
        made = [rows_of(number, make_row()) for number in range(count)]
        for kind in made[0]:
            lines = [json.dumps(rows[kind]) + "\n" for rows in made]
            (directory / f"{kind}_{name}.jsonl").write_text("".join(lines))


def rows_of(number: int, row: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return a conversation as a row of each kind of tests/kinds.py."""
    *before, last = row["messages"]
    question, answer = before[-1]["content"], last["content"]
    return {
        "rows": row,
        "pairs": row | {"rejected_response": answer[: len(answer) // 2] + " maybe"},
        "rated": row | {"label": number % 3 > 0},
        "texts": {"text": " ".join(message["content"] for message in row["messages"])},
        "prompts": {"messages": before},
        "images": {"query": f"<image>{question}", "response": answer, "images": [random_image(number)]},
    }


def random_image(seed: int) -> str:
    from PIL import Image

    width, height, file = 32 + 16 * (seed % 3), 32, io.BytesIO()
    pixels = random.Random(seed).randbytes(3 * width * height)
    Image.frombytes("RGB", (width, height), pixels).save(file, "PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


def make_model(name: str) -> Path:
    """Create models/NAME if it does not exist."""
    from tests.forked import forkserver

    directory = Path("models") / name
    if not directory.exists():
        script = ROOT / "scripts" / "make_tiny_model.py"
        if "_vl" in MODELS[name]:
            script = script.with_name("make_tiny_vision_model.py")
        words = shlex.split(f"{script} --output_dir {directory} {SIZES} {MODELS[name]}")
        making = forkserver().Process(target=become_script, args=(words,))
        making.start()
        making.join()
        roughen(directory / "model.safetensors")
    return directory


def become_script(words: list[str]) -> None:
    sys.argv = words
    sys.path.insert(0, str(Path(words[0]).parent))  # as `python SCRIPT` does
    with Path(os.devnull).open("w") as nothing, redirect_stdout(nothing):
        runpy.run_path(words[0], run_name="__main__")


def make_larger(name: str) -> Path:
    """Create larger/NAME with config.json only, which is enough for `doctor --plan`."""
    directory = Path("larger") / name
    directory.mkdir(parents=True, exist_ok=True)
    config = json.loads((make_model(name) / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(enlarged(config)))
    return directory


def enlarged(config: dict[str, Any]) -> dict[str, Any]:
    values = {}
    for key, value in config.items():
        if isinstance(value, dict):
            value = enlarged(value)
        elif key in LARGER:
            value *= LARGER[key]
        values[key] = value
    return values


def options_of(kind: Kind, directory: Path, make: Callable[[str], Path]) -> str:
    """Return the options of a kind; directories of models that they name are created by `make`."""
    values = OPTIONS | {"directory": directory} | {name: make(name) for name in kind.names_in_options & MODELS.keys()}
    options = kind.filled(values)
    if kind.model in WITHOUT_HEAD:
        options = f"{NEW_HEAD} {options}"
    return options


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


def training_of(kind: Kind, directory: Path) -> str:
    """Return the training command without the options of a layout."""
    files = f"--dataset data/{kind.rows}_train.jsonl --val_dataset data/{kind.rows}_val.jsonl"
    options = f"{TRAINING} {options_of(kind, directory, make_model)}"
    model = make_model(kind.model)
    return f"megatron {kind.command} --model {model} --output_dir {directory / 'run'} {files} {options}"


def train(kind: Kind, directory: Path) -> None:
    """Train, for two times two steps if the run is resumed, and export."""
    log = directory / "log.txt"
    training, layout = training_of(kind, directory), LAYOUTS[kind.layout]
    if kind.resumed:
        training += " --lr_decay_style constant --lr_warmup_fraction 0"  # independent of the number of steps
        run_swiftlite(f"{training} --train_iters 2", layout, log, kind.is_launched)
        training += " --train_iters 4 --resume true"
        layout = LAYOUTS[kind.resumed]
    run_swiftlite(training, layout, log, kind.is_launched)
    export = f"export --to_hf --model {directory / 'run'} --output_dir {directory / 'exported'}"
    run_swiftlite(export, LAYOUTS[kind.exported], log, kind.is_launched)


def record_run(kind: Kind, directory: Path) -> dict[str, Any]:
    return {
        "metrics": read_metrics(directory / "run" / "metrics.jsonl"),
        "acceptance": read_json(directory / "run" / "acceptance.json"),
        "export": read_export(directory / "exported"),
    }


def record_texts(kind: Kind, directory: Path) -> dict[str, list[str]]:
    layout = LAYOUTS[kind.layout]
    training = [*shlex.split(training_of(kind, directory)), *layout.words()]
    plan = planning_of(kind, directory)
    texts = {
        "dry_run": text_of([*training, "--dry_run"], directory / "dry_run.txt", layout.num_processes),
        "plan": text_of(plan, directory / "plan.txt"),
    }
    if (kind.options, kind.command, kind.layout) == ("", "sft", ONE_PROCESS):
        search = [*plan, "--gpu_type", "H100", "--num_gpus", "16"]
        texts["search"] = text_of(search, directory / "search.txt")
    return texts


def planning_of(kind: Kind, directory: Path) -> list[str]:
    """Return the command that plans the memory of a run of a larger model with the same options."""
    command = ["doctor", "--plan", "true", "--model", str(make_larger(kind.model)), "--max_length", "160"]
    if kind.command == "dpo":
        command += ["--loss_type", "sigmoid"]  # which means dpo, and can be another one below
    if kind.rows == "images":
        command += ["--images_per_row", "1"]
    return [*command, *shlex.split(options_of(kind, directory, make_larger)), *LAYOUTS[kind.layout].words()]


def record_gguf(kind: Kind, directory: Path) -> dict[str, Any]:
    """Convert the run; return a hash of each tensor of the GGUF file, and the metadata, long ones as hashes."""
    from gguf import GGUFReader

    export = f"export --to_gguf --model {directory / 'run'} --output_dir {directory / 'gguf'}"
    run_swiftlite(export, LAYOUTS[ONE_PROCESS], directory / "log.txt")
    (file,) = (directory / "gguf").glob("*.gguf")
    reader = GGUFReader(file)
    metadata = {}
    for name, field in reader.fields.items():
        text = json.dumps(field.contents(), default=str)
        if len(text) > 100:
            text = hashlib.sha256(text.encode()).hexdigest()
        metadata[name] = text
    tensors = {}
    for tensor in reader.tensors:
        digest = hashlib.sha256(f"{tensor.tensor_type.name} {tensor.shape.tolist()} ".encode())
        digest.update(tensor.data.tobytes())
        tensors[tensor.name] = digest.hexdigest()
    return {"file": file.name, "metadata": metadata, "tensors": tensors}


def record_drafts(kind: Kind, directory: Path) -> dict[str, Any]:
    """Answer the held-out rows with the export's heads; return the answers and the acceptance in acceptance.json."""
    acceptance, answers = directory / "acceptance.json", directory / "answers.jsonl"
    shutil.copyfile(directory / "run" / "acceptance.json", acceptance)
    files = f"--val_dataset data/rows_val.jsonl --result_path {answers} --acceptance_json {acceptance}"
    infer = f"infer --infer_backend transformers --model {directory / 'exported'} {files} {ANSWERING}"
    run_swiftlite(infer, LAYOUTS[ONE_PROCESS], directory / "log.txt")
    lines = [json.loads(line) for line in answers.read_text().splitlines()]
    return {"acceptance": read_json(acceptance), "answers": lines}


PARTS: dict[str, Callable[[Kind, Path], dict[str, Any]]] = {
    "runs": record_run,
    "texts": record_texts,
    "gguf": record_gguf,
    "drafts": record_drafts,
}


def parts_of(name: str, chosen: Sequence[str]) -> list[str]:
    """Return which of the chosen parts a kind has."""
    has = {"runs": bool(KINDS[name].exported), "texts": True} | {part: name in SERVED[part] for part in SERVED}
    return [part for part in PARTS if part in chosen and has[part]]


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
    for file in sorted(directory.rglob("*")):  # a drafter is in a folder of its own
        name = str(file.relative_to(directory))
        if file.suffix == ".safetensors":
            content[name] = hash_tensors(file)
        elif file.name == "config.json":
            content[name] = file.read_text().splitlines()
        elif file.is_file():
            content[name] = hashlib.sha256(file.read_bytes()).hexdigest()
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


def record(args: argparse.Namespace, file: Path) -> bool:
    """Record the chosen parts of the kinds in a file; return whether all commands succeeded."""
    os.environ.update(VARIABLES)
    for name in CLEARED:
        os.environ.pop(name, None)
    file = file.resolve()
    start = time.monotonic()
    parts = {name: parts_of(name, args.parts) for name in KINDS if fnmatchcase(name, args.only)}
    parts = {name: of_kind for name, of_kind in parts.items() if of_kind}
    results: dict[str, dict[str, Any]] = {part: {} for part in args.parts}
    recording = {"environment": describe_environment(), "commit": describe_commit(), "inputs": {}, "results": results}
    failed = 0
    with tempfile.TemporaryDirectory() as temporary:
        work = args.keep or Path(temporary)
        work.mkdir(parents=True, exist_ok=True)
        os.chdir(work)  # so that directory names are the same in every recording
        make_data(Path("data"))
        for name, of_kind in parts.items():
            kind_start = time.monotonic()
            directory = Path("kinds") / re.sub(r"\W+", "_", name)
            directory.mkdir(parents=True)
            problem = record_kind(name, of_kind, directory, results)
            failed += bool(problem)
            if args.keep is None:
                shutil.rmtree(directory)
            print(f"{time.monotonic() - kind_start:6.1f} s  {name} ({', '.join(of_kind)}){problem}", flush=True)
        recording["inputs"] = hash_inputs()
        file.write_text(json.dumps(recording, indent=1) + "\n")
        os.chdir(ROOT)
    print(f"{time.monotonic() - start:6.1f} s  {len(parts)} kinds, {failed} failed: {file}")
    return not failed


def record_kind(name: str, parts: Sequence[str], directory: Path, results: dict[str, dict[str, Any]]) -> str:
    """Add the parts of a kind to the results; return the reason if a command failed, otherwise an empty text."""
    kind = KINDS[name]
    for part in parts:
        results[part][name] = {"failed": True}
    try:
        if "texts" in parts:  # before the run, because a plan for the directory of a run is refused
            results["texts"][name] = record_texts(kind, directory)
        of_run = [part for part in parts if part != "texts"]
        if of_run:
            train(kind, directory)
        for part in of_run:
            results[part][name] = PARTS[part](kind, directory)
    except CommandFailed as error:
        return f"  FAILED\n{error}"
    return ""


def hash_inputs() -> dict[str, str]:
    """Return hashes of the data and the models of the kinds."""
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
    return subprocess.run(command, capture_output=True, text=True).stdout.strip() or "unknown commit"


def compare(args: argparse.Namespace, before: Path, after: Path) -> bool:
    """Print a line for each result; return whether all results are equal."""
    old, new = (json.loads(file.read_text()) for file in (before, after))
    print(f"{before}: {old['commit']}\n{after}: {new['commit']}")
    for part, meaning in (
        ("environment", "results may differ for this reason"),
        ("inputs", "different models or data"),
    ):
        for name in sorted(old[part].keys() & new[part].keys()):
            if old[part][name] != new[part][name]:
                print(f"{name}: {old[part][name]} before, {new[part][name]} after ({meaning})")
    num_results = num_different = 0
    for part in args.parts:
        ours, theirs = old["results"].get(part, {}), new["results"].get(part, {})
        for name in ours | theirs:
            if fnmatchcase(name, args.only):
                difference = describe_difference(ours.get(name), theirs.get(name))
                num_results += 1
                num_different += bool(difference)
                print(f"{part}, {name}: {difference or 'equal'}")
    print(f"{num_results - num_different} of {num_results} results are equal")
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
    recorder = commands.add_parser("record", help="record the kinds in FILE")
    recorder.add_argument("file", type=Path)
    comparer = commands.add_parser("compare", help="print the differences between two recordings")
    comparer.add_argument("before", type=Path)
    comparer.add_argument("after", type=Path)
    checker = commands.add_parser("check", help="record, and compare with FILE")
    checker.add_argument("file", type=Path)
    for command in (recorder, comparer, checker):
        command.add_argument("--only", default="*", metavar="PATTERN", help="names of kinds, as a shell pattern [*]")
        command.add_argument("--parts", default=",".join(PARTS), help="parts, separated by commas [%(default)s]")
    for command in (recorder, checker):
        command.add_argument(
            "--keep", type=Path, metavar="DIR", help="use this new directory for models and runs, and keep it"
        )
    args = parser.parse_args()
    for file in (getattr(args, name, None) for name in ("before", "after", "file")):
        if args.command != "record" and file and not file.is_file():
            parser.error(f"{file} does not exist: write it with {parser.prog} record {file}")
    args.parts = args.parts.split(",")
    if unknown := [part for part in args.parts if part not in PARTS]:
        parser.error(f"--parts {','.join(unknown)}: the parts are {', '.join(PARTS)}")
    if not any(fnmatchcase(name, args.only) and parts_of(name, args.parts) for name in KINDS):
        parser.error(f"--only {args.only!r} matches no kind of tests/kinds.py with these parts, such as 'latent'")
    return args


def main() -> int:
    args = parse()
    if args.command == "record":
        return int(not record(args, args.file))
    if args.command == "compare":
        return int(not compare(args, args.before, args.after))
    with tempfile.TemporaryDirectory() as directory:
        before, after = args.file.resolve(), Path(directory) / "now.json"
        record(args, after)
        return int(not compare(args, before, after))


if __name__ == "__main__":
    sys.exit(main())
