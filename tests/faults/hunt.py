"""Kill a command at each operation on its files, one after another, and check that running it again repairs the result.

    python -m tests.faults.hunt                            # every command, killed at every operation: an hour or two
    python -m tests.faults.hunt sft export --every 10      # two of them, at every tenth place
    python -m tests.faults.hunt grpo --only rollouts       # at the operations on these files
    python -m tests.faults.hunt infer --fault ENOSPC       # or the operation fails: a full disk, EIO, EINTR

An operation opens a file for writing, writes, flushes, renames, creates or deletes in the directory of results.
Operations are counted and interrupted inside the C library (durable.c), so the writers of torch and safetensors are
included. For each operation, the command starts in an empty directory, is interrupted there, and is run again as a user
would. The result must be that of an uninterrupted run, without incomplete files.

Of the hundreds of writes to a file of tensors, only the first two and the last are tested, unless --every_write is
given.
"""

import argparse
import errno
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from swiftlite.rollouts.generation import Generation
from tests.e2e.conftest import read_metrics
from tests.forked import SignalAtCall, start_swiftlite
from tests.parallel.launch import open_store, rank_environments
from tests.tiny import make_tiny_hf

SHIM = Path(__file__).with_name("durable.c")
SECONDS = 300
"""Maximum seconds of one command."""


@dataclass(frozen=True)
class Fault:
    """A fault that a command is exposed to.

    Attributes:
        at: number (from 1) of the operation at which the fault occurs; 0 only counts operations.
        error: number from `errno` with which the operation fails; 0: the process is killed.
    """

    at: int = 0
    error: int = 0


@dataclass(frozen=True)
class Trial:
    """The result of a fault.

    Attributes:
        was_hit: whether the fault occurred. A run can have fewer operations than the counted run, and not every
            operation can fail in every way.
        wrong: what running the command again did not repair; empty if nothing.
    """

    was_hit: bool
    wrong: str = ""


@dataclass(frozen=True)
class Command:
    """A command to interrupt.

    Attributes:
        argv: its words. Words that equal or start with MODEL, ROWS, PROMPTS, REWARDS, RUN or OUT/ are replaced by
            paths of `make_inputs` and of the results.
        again: words that are added when the command is run again.
        processes: number of ranks.
        content: returns what two runs must have in common, from the directory of results.
        keeps: whether the command refuses to overwrite complete results.
    """

    argv: str
    content: Callable[[Path], object]
    again: str = ""
    processes: int = 1
    keeps: bool = False


def content_of_run(out: Path) -> dict[str, object]:
    """Return everything in a run that does not depend on the clock."""
    checkpoints = {path.name: digest_of_checkpoint(path) for path in sorted(out.glob("run/checkpoint-*"))}
    metrics = read_metrics(out / "run")
    measured = [json.loads((out / "run" / name).read_text()) for name in ("acceptance.json", "drafts.json")]
    # Whether the file of the lock can be deleted does not matter: the lock is the kernel's. Nor does the page: a run
    # that cannot write it says so and ends well, and its speeds are never the same.
    left_out = (".lock", "run_report.html")
    names = sorted(str(path.relative_to(out)) for path in out.rglob("*") if path.name not in left_out)
    return {"checkpoints": checkpoints, "metrics": metrics, "measured": measured, "names": names}


def content_of_rollouts(out: Path) -> dict[str, object]:
    """Return the content of a run with rollouts; of their files everything except the speed."""
    rollouts = {}
    for path in sorted(out.glob("run/rollouts/*.safetensors")):
        generation = Generation.load(path)
        figures = {name: value for name, value in generation.figures.items() if not name.endswith("per_second")}
        arrays = {name: repr(value.tolist()) for name, value in vars(generation).items() if hasattr(value, "tolist")}
        rollouts[path.name] = {**arrays, "figures": figures, "settings": dict(generation.settings)}
    readable = {path.name: path.read_text() for path in sorted(out.glob("run/rollouts/*.jsonl"))}
    return {**content_of_run(out), "rollouts": rollouts, "readable": readable}


OF_ONE_SAVE = (".metadata", "SHA256SUMS")
"""Files that differ between checkpoints: `.metadata` contains a new id, and `SHA256SUMS` a digest of `.metadata`."""


def digest_of_checkpoint(checkpoint: Path) -> str:
    """Return a digest of the bytes of a checkpoint."""
    digest = hashlib.sha256()
    for path in sorted(checkpoint.glob("*")):
        if path.name not in OF_ONE_SAVE:
            digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()


def content_of_files(out: Path) -> dict[str, str]:
    """Return the bytes of every file; for files that always differ, only their names."""
    content = {}
    for path in sorted(out.rglob("*")):
        if path.is_file() and path.name != ".lock":
            is_same = path.name not in OF_ONE_SAVE
            content[str(path.relative_to(out))] = hashlib.sha256(path.read_bytes()).hexdigest() if is_same else ""
    return content


SFT = (
    "megatron sft --model MODEL --dataset ROWS --split_dataset_ratio 0.1 --torch_dtype float32 --micro_batch_size 1 "
    "--global_batch_size 2 --train_iters 4 --save_steps 2 --logging_steps 1 --lr 1e-3 --acceptance_samples 1 "
    "--acceptance_max_new_tokens 2 --report_to none --output_dir OUT/run"
)
GRPO = (
    "megatron grpo --model MODEL --dataset PROMPTS --split_dataset_ratio 0.1 --torch_dtype float32 "
    "--reward_funcs varied --external_plugins REWARDS --num_generations 2 --global_batch_size 4 --micro_batch_size 2 "
    "--steps_per_generation 2 --max_length 64 --max_completion_length 6 --train_iters 4 --save_steps 3 "
    "--logging_steps 1 --lr 1e-2 --acceptance_samples 1 --acceptance_max_new_tokens 2 --report_to none "
    "--output_dir OUT/run"
)
REWARDS = """
def varied(completion_ids):
    return [sum(token % 5 for token in ids) / len(ids) for ids in completion_ids]


async def talk(messages, generate):
    messages = [*messages, await generate(messages, max_tokens=4), {"role": "user", "content": "More?"}]
    return [*messages, await generate(messages)]
"""
TALK = GRPO.replace("--max_length 64 --max_completion_length 6", "--max_length 128 --max_completion_length 48")
COMMANDS = {
    "sft": Command(SFT, content_of_run, "--resume"),
    "sft_async": Command(f"{SFT} --async_save true", content_of_run, "--resume"),
    "sft_limit_1": Command(f"{SFT} --save_total_limit 1", content_of_run, "--resume"),
    "sft_2": Command(SFT, content_of_run, "--resume", processes=2),
    "sft_2_async": Command(f"{SFT} --async_save true", content_of_run, "--resume", processes=2),
    "grpo": Command(GRPO, content_of_rollouts, "--resume"),
    "grpo_async": Command(f"{GRPO} --async_rollouts 1", content_of_rollouts, "--resume"),
    "grpo_talk": Command(f"{TALK} --rollout_func talk", content_of_rollouts, "--resume"),
    "export": Command("export --to_hf --model RUN --output_dir OUT/hf", content_of_files, keeps=True),
    "export_2": Command(
        "export --to_hf --model RUN --output_dir OUT/hf --pipeline_model_parallel_size 2",
        content_of_files,
        processes=2,
        keeps=True,
    ),
    "to_mcore": Command("export --to_mcore --model MODEL --output_dir OUT/mcore", content_of_files, keeps=True),
    "infer": Command(
        "infer --model MODEL --infer_backend transformers --val_dataset PROMPTS --max_new_tokens 4 "
        "--torch_dtype float32 --result_path OUT/answers.jsonl",
        content_of_files,
    ),
    "regenerate": Command(
        "regenerate --model MODEL --infer_backend transformers --dataset PROMPTS --max_new_tokens 4 --temperature 0.9 "
        "--num_answers 2 --gold_fraction 0.3 --torch_dtype float32 --output_dir OUT/regenerated",
        content_of_files,
    ),
    "evaluate": Command(
        "evaluate --model MODEL --dataset ROWS --torch_dtype float32 --max_new_tokens 4 --output_dir OUT/evaluation",
        content_of_files,
    ),
}


def build_shim(directory: Path) -> Path:
    """Compile durable.c to a library that can be loaded into any process."""
    library = directory / "durable.so"
    command = ["gcc", "-O1", "-Wall", "-Werror", "-shared", "-fPIC", "-o", library, SHIM, "-ldl"]
    subprocess.run(command, check=True)
    return library


def write_model_and_rows(directory: Path) -> tuple[str, str]:
    """Write a tiny model with a head and 20 training rows; return their paths."""
    model = make_tiny_hf(directory / "model", "qwen3", depth=1, with_tokenizer=True)
    rows = directory / "rows.jsonl"
    content = [{"query": f"What is {n} plus {n}?", "response": f"It is {2 * n}."} for n in range(20)]
    rows.write_text("".join(json.dumps(row) + "\n" for row in content))
    return str(model), str(rows)


def make_inputs(directory: Path) -> dict[str, str]:
    """Write a model, rows, prompts, reward functions and a trained run; return their paths by the placeholders that
    commands use.
    """
    words = write_files(directory) | {"RUN": str(directory / "trained/run")}
    (directory / "trained").mkdir()
    code, errors, _ = run(COMMANDS["sft"], words, directory / "trained")
    assert code == 0, errors
    return words


def write_files(directory: Path) -> dict[str, str]:
    """Write what `make_inputs` does, without the run."""
    model, rows = write_model_and_rows(directory)
    prompts, rewards = directory / "prompts.jsonl", directory / "rewards.py"
    prompts.write_text("".join(Path(rows).read_text().splitlines(keepends=True)[:4]))
    rewards.write_text(REWARDS)
    return {"MODEL": model, "ROWS": rows, "PROMPTS": str(prompts), "REWARDS": str(rewards)}


def fill(argv: str, words: dict[str, str]) -> list[str]:
    """Return a command line as a list, with paths instead of the words that stand for them."""
    filled = []
    for word in argv.split():
        name, slash, rest = word.partition("/")
        filled.append(words.get(name, name) + slash + rest)
    return filled


def run(
    command: Command,
    words: dict[str, str],
    out: Path,
    fault: Fault = Fault(),
    *,
    is_again: bool = False,
    signal_at: SignalAtCall | None = None,
) -> tuple[int, str, list[str]]:
    """Run a command with its results in `out`.

    Returns:
        Its exit code, its stderr, and its operations as durable.c lists them.
    """
    text = f"{command.argv} {command.again}" if is_again else command.argv
    argv = fill(text, words | {"OUT": str(out)})
    with tempfile.TemporaryDirectory() as scratch:
        log = Path(scratch, "log")
        Path(scratch, "counter").write_bytes(bytes(8))
        environment = os.environ | {
            "OMP_NUM_THREADS": "1",
            "FAULTS_ROOT": str(out),
            "FAULTS_COUNTER": f"{scratch}/counter",
            "FAULTS_LOG": str(log),
            "FAULTS_AT": str(fault.at),
            "FAULTS_ERRNO": str(fault.error),
        }
        environments = [environment]
        store = open_store()
        if command.processes > 1:
            environments = [environment | rank for rank in rank_environments(command.processes, store.port)]
        outputs = Path(scratch, "out"), Path(scratch, "err")
        is_hunt = "FAULTS_SHIM" in os.environ  # which also interrupts the writing of pages
        process = start_swiftlite(argv, out, environments, *outputs, signal_at, pages=is_hunt)
        try:
            _, errors = process.communicate(SECONDS)
        except subprocess.TimeoutExpired:
            process.send_signal(9)
            raise
        return process.wait(0), errors, log.read_text().splitlines() if log.exists() else []


def hit(command: Command, words: dict[str, str], directory: Path, expected: object, fault: Fault) -> Trial:
    """Interrupt a command once, run it again, and check the result."""
    out = directory / f"at-{fault.at}"
    out.mkdir()
    try:
        code, errors, operations = run(command, words, out, fault)
        where = operations[fault.at - 1] if len(operations) >= fault.at else f"{fault.at}, not reached"
        was_hit = any(operation.endswith(" (hit)") for operation in operations)
        wrong = _wrong_at_once(command, out, code, errors, expected, fault)
        # A kill can come when all is done.
        is_whole = code == 0 or (command.keeps and command.content(out) == expected)
        if not wrong and not is_whole:
            wrong = _wrong_when_repeated(command, words, out, expected)
    except subprocess.TimeoutExpired:
        return Trial(True, f"operation {fault.at}: hangs")
    shutil.rmtree(out)
    return Trial(was_hit, f"operation {where}: {wrong}" if wrong else "")


def _wrong_at_once(command: Command, out: Path, code: int, errors: str, expected: object, fault: Fault) -> str:
    if code == 0:
        return "" if command.content(out) == expected else "ended well, with other results"
    if not fault.error:
        return ""
    # Of several ranks one speaks. The launcher, who is not here, hides tracebacks of those that lost a connection.
    if "\nswiftlite: " not in f"\n{errors}" or (command.processes == 1 and "Traceback" in errors):
        return f"a traceback:\n{errors}"
    return ""


def _wrong_when_repeated(command: Command, words: dict[str, str], out: Path, expected: object) -> str:
    code, errors, _ = run(command, words, out, is_again=True)
    if code != 0:
        return f"the next command ends with {code}:\n{errors}"
    content = command.content(out)
    return "" if content == expected else f"other results:\n{_difference(content, expected)}"


def _difference(content: object, expected: object) -> str:
    if not isinstance(content, dict) or not isinstance(expected, dict):
        return f"{content!r} is not {expected!r}"
    lines = []
    for name in sorted(content.keys() | expected.keys()):
        if content.get(name) != expected.get(name):
            lines.append(f"{name}: {content.get(name)!r} is not {expected.get(name)!r}")
    return "\n".join(lines)


def places(operations: Sequence[str]) -> list[int]:
    """Return the numbers of all operations; of the writes to one file, only the first two and the last.

    Args:
        operations: lines of "NUMBER KIND PATH".
    """
    chosen = []
    writes: dict[str, list[int]] = {}
    for operation in operations:
        number, kind, path = operation.split(" ", 2)
        if kind == "write":
            writes.setdefault(path, []).append(int(number))
        else:
            chosen.append(int(number))
    for numbers in writes.values():
        chosen += {*numbers[:2], numbers[-1]}
    return sorted(chosen)


def hunt(
    names: Sequence[str],
    directory: Path,
    *,
    errors: Sequence[int],
    every: int,
    every_write: bool,
    at_once: int,
    only: str = "",
) -> list[str]:
    """Interrupt each command at one operation after another, and print the results.

    Args:
        errors: numbers from `errno`, with one round of trials for each; 0: the command is killed.
        every: test every Nth operation.
        every_write: whether to test also the writes that `places` omits.
        only: part of the paths of the operations to test.
        at_once: number of trials at the same time.

    Returns:
        Lines that describe what went wrong.
    """
    words = make_inputs(directory)
    findings = []
    for name in names:
        command = COMMANDS[name]
        unbroken = directory / f"{name}-unbroken"
        unbroken.mkdir()
        print(f"{name}: begins", flush=True)
        code, said, operations = run(command, words, unbroken)
        assert code == 0, said
        assert operations, f"{name}: no operation was recorded"
        expected = command.content(unbroken)
        numbers = list(range(1, len(operations) + 1)) if every_write else places(operations)
        numbers = [number for number in numbers if only in operations[number - 1]]
        numbers = numbers[min(every, len(numbers)) // 2 :: every]  # from the middle of the first lot
        for error in errors:
            how = errno.errorcode[error] if error else "killed"
            broken = directory / f"{name}-{how}"
            broken.mkdir()
            with ThreadPoolExecutor(at_once) as threads:
                task = partial(hit, command, words, broken, expected)
                trials = list(threads.map(task, [Fault(number, error) for number in numbers]))
            num_hit = sum(trial.was_hit for trial in trials)
            wrong = [trial.wrong for trial in trials if trial.wrong]
            if not num_hit:
                wrong.append("no trial was hit")
            tried = f"{len(numbers)} of {len(operations)} operations tried"
            print(f"{name}: {how}: {tried}, {num_hit} hit, {len(wrong)} not made good", flush=True)
            for line in wrong:
                print(f"  {line}", flush=True)
            findings += wrong
    return findings


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [*COMMANDS, "all"]
    listed = f"of {', '.join(COMMANDS)}; all by default"
    parser.add_argument("commands", nargs="*", choices=names, default="all", metavar="COMMAND", help=listed)
    parser.add_argument("--every", type=int, default=1, metavar="N", help="try every Nth place (default: each)")
    parser.add_argument("--only", default="", metavar="TEXT", help="only operations on paths that contain a text")
    parser.add_argument("--every_write", action="store_true", help="try all writes to a file: hours")
    faults = ("KILL", "ENOSPC", "EIO", "EINTR", "EROFS", "EACCES")
    parser.add_argument("--fault", action="append", choices=faults, help="may be repeated (default: KILL)")
    parser.add_argument("--at_once", type=int, default=2, help="so many trials at a time (default: 2)")
    args = parser.parse_args()
    chosen = args.fault or ["KILL"]
    with tempfile.TemporaryDirectory() as directory:
        if "FAULTS_SHIM" not in os.environ:
            return _with_shim(Path(directory))
        findings = hunt(
            list(COMMANDS) if "all" in args.commands else args.commands,
            Path(directory).resolve(),
            errors=[0 if fault == "KILL" else getattr(errno, fault) for fault in chosen],
            every=args.every,
            every_write=args.every_write,
            at_once=args.at_once,
            only=args.only,
        )
    return 1 if findings else 0


def _with_shim(directory: Path) -> int:
    """Run this script again in a process in which calls of the C library go through durable.c."""
    shim = build_shim(directory)
    environment = os.environ | {"LD_PRELOAD": str(shim), "FAULTS_SHIM": str(shim)}
    return subprocess.run([sys.executable, "-m", "tests.faults.hunt", *sys.argv[1:]], env=environment).returncode


if __name__ == "__main__":
    sys.exit(main())
