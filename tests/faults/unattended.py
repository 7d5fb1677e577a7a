"""Inject faults into runs that nobody watches, and compare the results with those of uninterrupted runs.

    python -m tests.faults.unattended                             # all faults with three seeds
    python -m tests.faults.unattended --faults kill nan --seeds 1

Each run has two ranks, started by the real launcher with --max_restarts. It must end with exit code 0 without a second
command; after a bad row, with the one command that the message prints. Its last checkpoint must be bitwise identical to
that of an uninterrupted run; after a bad row or step, of a run without that row or step. No process, no temporary file
and no damaged file under a valid name may remain, and the decision must be in metrics.jsonl.
"""

import argparse
import hashlib
import json
import logging
import os
import random
import re
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from swiftlite.plan.facts import run_checkpoints
from swiftlite.report.metrics import decisions_in, read_metrics, restarts_in
from tests.faults.hunt import write_model_and_rows
from tests.faults.soak import family
from tests.store.s3 import faulty_line, s3_server

STEPS, SAVE_STEPS = 160, 10
BAD_STEP = 47
STREAMED_ROWS, BAD_ROW = 400, 300
"""The bad row comes after the first checkpoint. Five rows are packed into one, of which a step has two."""
SECONDS_OF_A_RUN = 1800
"""Enough for a busy machine."""
SLOW_SECONDS = 80
"""Seconds by which a slow node is late; --distributed_timeout_minutes is 1."""
INJECTED = f'''
"""Loaded by every Python process of a run: changes swiftlite at one place, as the environment says."""
import importlib.abc, importlib.machinery, os, sys, time

FAULT = os.environ.get("UNATTENDED_FAULT")


def break_trainer(module):
    step, run = module.Trainer.step, module.Trainer._run
    current = []

    def numbered(self, number):
        current[:] = [number]
        if FAULT == "omit" and number == {BAD_STEP}:
            self.batches.get(number - 1)
            self.scheduler.step(increment=1)
            return {{"loss": 0.0}}
        return step(self, number)

    def run_with_nan(self, *args, forward_only, **kwargs):
        sums = run(self, *args, forward_only=forward_only, **kwargs)
        if FAULT == "nan" and current == [{BAD_STEP}] and not forward_only:
            for parameter in self.model[0].parameters():
                if parameter.requires_grad:
                    parameter.main_grad.fill_(float("nan"))
        return sums

    module.Trainer.step, module.Trainer._run = numbered, run_with_nan


def slow_encoder(module):
    encode = module.ConversationEncoder.__call__
    waits = [{SLOW_SECONDS}] if os.environ.get("NODE_RANK") == "1" else []

    def late(self, *args, **kwargs):
        if waits:
            time.sleep(waits.pop())
        return encode(self, *args, **kwargs)

    module.ConversationEncoder.__call__ = late


PLACES = {{"nan": ("swiftlite.train.trainer", break_trainer), "omit": ("swiftlite.train.trainer", break_trainer),
          "slow": ("swiftlite.data.encoder", slow_encoder)}}


class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != PLACES[FAULT][0]:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        execute = spec.loader.exec_module

        def load(module):
            execute(module)
            PLACES[FAULT][1](module)

        spec.loader.exec_module = load
        return spec


if FAULT in PLACES:
    sys.meta_path.insert(0, Finder())
'''


@dataclass
class Job:
    """A run into which a fault is injected.

    Attributes:
        out: --output_dir.
        launchers: the launcher of each node.
        chance: random numbers of this seed.
        store: URL of --checkpoint_store, or empty.
        set_store_down: lets the store refuse connections, or answer again.
    """

    directory: Path
    out: Path
    chance: random.Random
    command: list[str] = field(default_factory=list)
    launchers: list[subprocess.Popen] = field(default_factory=list)
    store: str = ""
    set_store_down: Callable[[bool], None] = lambda is_down: None

    @property
    def log(self) -> Path:
        return self.directory / f"{self.out.name}.log"

    def start(self, environment: Mapping[str, str]) -> None:
        temporary = self.directory / "tmp" / self.out.name
        temporary.mkdir(parents=True, exist_ok=True)
        paths = os.pathsep.join([str(self.directory / "injected"), *sys.path[:1], os.environ.get("PYTHONPATH", "")])
        common = {"OMP_NUM_THREADS": "1", "PYTHONPATH": paths, "TMPDIR": str(temporary), "NPROC_PER_NODE": "2"}
        with self.log.open("ab") as log:
            self.launchers.append(
                subprocess.Popen(
                    self.command,
                    cwd=self.directory,
                    env={**os.environ, **common, **environment},
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
            )

    def wait_for_checkpoint(self, step: int) -> None:
        self.wait_until(lambda: any(path.name == f"checkpoint-{step}" for path in run_checkpoints(self.out)))

    def wait_until(self, is_reached: Callable[[], bool]) -> None:
        """Wait for a state of the run. It is an error if the launcher ends before."""
        deadline = time.monotonic() + SECONDS_OF_A_RUN
        while not is_reached():
            assert time.monotonic() < deadline, self.log.read_text()[-3000:]
            assert self.launchers[0].poll() is None, self.log.read_text()[-3000:]
            time.sleep(0.02)

    def ranks(self) -> list[psutil.Process]:
        return [process for process in family(self.launchers[0])[1:] if "--output_dir" in process.cmdline()][:2]

    def send(self, number: int) -> None:
        """Send a signal to a random rank."""
        self.chance.choice(self.ranks()).send_signal(number)

    def kill_after(self, change: Callable[[], None]) -> None:
        """Kill a random rank after a change of files. All ranks are stopped meanwhile, so that they write no others."""
        ranks = self.ranks()
        for rank in ranks:
            rank.send_signal(signal.SIGSTOP)
        change()
        self.chance.choice(ranks).kill()
        for rank in ranks:
            with suppress(psutil.NoSuchProcess):  # the killed one
                rank.send_signal(signal.SIGCONT)

    def end(self) -> None:
        """Kill the launchers of a run that did not end by itself; their ranks end with them."""
        for launcher in self.launchers:
            launcher.kill()

    def wait(self) -> int:
        """Wait until all launchers have ended; return the largest exit code."""
        return max(launcher.wait(SECONDS_OF_A_RUN) for launcher in self.launchers)


def kill(job: Job) -> None:
    job.wait_for_checkpoint(SAVE_STEPS)
    time.sleep(job.chance.uniform(0, 3))
    job.send(signal.SIGKILL)


def hang(job: Job) -> None:
    job.wait_for_checkpoint(SAVE_STEPS)
    time.sleep(job.chance.uniform(0, 1))
    job.send(signal.SIGSTOP)


def damaged_checkpoint(job: Job) -> None:
    job.wait_for_checkpoint(2 * SAVE_STEPS)
    job.kill_after(lambda: _damage(run_checkpoints(job.out)[-1], job.chance))


def damaged_copy(job: Job) -> None:
    """The newest complete copy is damaged, and the directory has lost its checkpoints from this step on."""
    store = Path(job.store.removeprefix("file://"))

    def copies() -> list[Path]:
        return [path for path in run_checkpoints(store) if (path / "SHA256SUMS").exists()]

    def change() -> None:
        newest = copies()[-1]
        _damage(newest, job.chance)
        for path in run_checkpoints(job.out):
            if int(path.name.partition("-")[2]) >= int(newest.name.partition("-")[2]):
                path.rename(job.directory / f"lost-{job.out.name}-{path.name}")

    job.wait_until(lambda: len(copies()) > 1)
    job.kill_after(change)


def store_down(job: Job) -> None:
    job.wait_for_checkpoint(2 * SAVE_STEPS)
    job.set_store_down(True)
    job.send(signal.SIGKILL)
    job.wait_until(lambda: bool(restarts_in(read_metrics(job.out))))
    job.set_store_down(False)


def damaged_cache(job: Job) -> None:
    job.wait_for_checkpoint(2 * SAVE_STEPS)
    files = [path for path in job.directory.glob(f"states-{job.out.name}/*") if path.stat().st_size > 4096]
    job.kill_after(lambda: _change(job.chance.choice(sorted(files)), job.chance))


def bad_row(job: Job) -> None:
    """The run ends; its message prints the command that continues it."""
    assert job.launchers[0].wait(SECONDS_OF_A_RUN) != 0
    options = re.search(r"--resume --max_bad_rows \d+", job.log.read_text())
    assert options, job.log.read_text()[-2000:]
    assert run_checkpoints(job.out), "the row was read before the first checkpoint"
    job.command += shlex.split(options.group())
    job.launchers.clear()
    job.start({})


def nothing(job: Job) -> None:
    """Inject no fault from outside; the environment does."""


def _damage(checkpoint: Path, chance: random.Random) -> None:
    path = chance.choice(sorted(checkpoint.glob("*.distcp")))
    if chance.random() < 1 / 3:
        path.unlink()
    else:
        _change(path, chance)


def _change(path: Path, chance: random.Random) -> None:
    """Flip a byte of a file, or truncate it."""
    content = bytearray(path.read_bytes())
    place = chance.randrange(len(content))
    if chance.random() < 0.5:
        path.write_bytes(content[:place])
        return
    content[place] ^= 1
    path.write_bytes(content)


@dataclass(frozen=True)
class Fault:
    """A fault and how it is tried.

    Attributes:
        inject: called while the run trains.
        base: the kind of run, a key of `BASES`.
        options: additional options of the run.
        environment: "UNATTENDED_FAULT" of the run.
        reference: the same for the run that the result must equal.
        decision: the fault that metrics.jsonl must name; empty if only the restart is recorded.
        logged: words that the log must contain.
        store: kind of store: "", "file" or "s3".
        num_nodes: number of launchers.
    """

    inject: Callable[[Job], None]
    base: str = "plain"
    options: tuple[str, ...] = ()
    environment: str = ""
    reference: str = ""
    decision: str = ""
    logged: str = ""
    store: str = ""
    num_nodes: int = 1


FAULTS = {
    "kill": Fault(kill),
    "hang": Fault(hang, options=("--distributed_timeout_minutes", "1")),
    "bad_row": Fault(bad_row, base="stream", decision="bad_row"),
    "nan": Fault(nothing, options=("--skip_bad_steps", "6"), environment="nan", reference="omit", decision="bad_step"),
    "damaged_checkpoint": Fault(damaged_checkpoint, decision="damaged_checkpoint"),
    "damaged_copy": Fault(damaged_copy, decision="damaged_copy", store="file"),
    "store_down": Fault(store_down, decision="store_down", store="s3"),
    "slow_node": Fault(
        nothing,
        options=("--distributed_timeout_minutes", "1"),
        environment="slow",
        logged="waiting for rank 1",
        num_nodes=2,
    ),
    "damaged_cache": Fault(damaged_cache, base="heads", decision="damaged_cache"),
}
BASES = {
    "plain": (),
    "stream": tuple("--streaming true --streaming_buffer_size 20 --packing true --max_length 128".split()),
    "heads": ("--mtp_mode", "heads_only"),
}


@contextmanager
def _store(fault: Fault, job: Job) -> Iterator[Mapping[str, str]]:
    """Open the store of a run; yield the environment with which its client finds it."""
    if fault.store == "":
        yield {}
    elif fault.store == "file":
        job.store = f"file://{job.directory / f'store-{job.out.name}'}"
        yield {}
    else:
        with s3_server() as server, faulty_line(server) as line:
            job.store = server.new_url()
            job.set_store_down = lambda is_down: setattr(line, "is_down", is_down)
            address, port = line.server_address[:2]
            yield server.environment | {"AWS_ENDPOINT_URL": f"http://{address}:{port}"}


class Trial:
    """Runs of one model over the same rows, in one directory."""

    def __init__(self, directory: Path):
        self.directory = directory
        (directory / "injected").mkdir()
        (directory / "injected" / "sitecustomize.py").write_text(INJECTED)
        self.model, _ = write_model_and_rows(directory)
        rows = [{"query": f"What is {n} plus {n}?", "response": f"It is {2 * n}."} for n in range(STREAMED_ROWS)]
        lines = [json.dumps(row) + "\n" for row in rows]
        (directory / "rows-bad.jsonl").write_text("".join([*lines[:BAD_ROW], '{"query": \n', *lines[BAD_ROW + 1 :]]))
        (directory / "rows-without.jsonl").write_text("".join([*lines[:BAD_ROW], *lines[BAD_ROW + 1 :]]))
        self.references: dict[tuple[str, ...], str] = {}

    def command(self, out: Path, rows: str, base: str) -> list[str]:
        words = [*(sys.executable, "-W", "ignore", "-m", "swiftlite", "megatron", "sft", "--model", self.model)]
        words += ["--dataset", rows, "--torch_dtype", "float32", "--micro_batch_size", "1", "--global_batch_size", "2"]
        words += ["--lr", "1e-3", "--acceptance_samples", "0", "--report_to", "none", "--train_iters", str(STEPS)]
        words += ["--save_steps", str(SAVE_STEPS), "--save_total_limit", "4", "--output_dir", str(out), *BASES[base]]
        if base == "heads":
            words += ["--cache_trunk_states", str(self.directory / f"states-{out.name}")]
        return words

    def reference(self, fault: Fault, rows: str) -> str:
        """Return the digest of the last checkpoint of an uninterrupted run."""
        key = (fault.base, fault.reference, rows)
        if key not in self.references:
            job = Job(self.directory, self.directory / f"reference-{len(self.references)}", random.Random(0))
            job.command = self.command(job.out, rows, fault.base)
            job.start({"UNATTENDED_FAULT": fault.reference})
            assert job.wait() == 0, job.log.read_text()[-3000:]
            self.references[key] = digest_of_tensors(job.out / f"checkpoint-{STEPS}")
        return self.references[key]

    def run(self, name: str, seed: int) -> list[str]:
        """Run with a fault; return what is wrong with the result."""
        fault = FAULTS[name]
        rows, rows_of_reference = "rows.jsonl", "rows.jsonl"
        if name == "bad_row":
            rows, rows_of_reference = "rows-bad.jsonl", "rows-without.jsonl"
        job = Job(self.directory, self.directory / f"{name}-{seed}", random.Random(seed))
        job.command = [*self.command(job.out, rows, fault.base), *fault.options, "--max_restarts", "3"]
        with ExitStack() as stack:
            stack.callback(job.end)
            environment = dict(stack.enter_context(_store(fault, job)))
            if job.store:
                job.command += ["--checkpoint_store", job.store]
            environment["UNATTENDED_FAULT"] = fault.environment
            self._start(job, fault.num_nodes, environment)
            fault.inject(job)
            code = job.wait()
        return self._wrong(job, fault, code, self.reference(fault, rows_of_reference))

    def _start(self, job: Job, num_nodes: int, environment: Mapping[str, str]) -> None:
        if num_nodes == 1:
            job.start(environment)
            return
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = str(probe.getsockname()[1])
        for node in range(num_nodes):
            place = {"NNODES": str(num_nodes), "NODE_RANK": str(node), "NPROC_PER_NODE": "1"}
            job.start({**environment, **place, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port})

    def _wrong(self, job: Job, fault: Fault, code: int, expected: str) -> list[str]:
        wrong = []
        if code:
            wrong.append(f"exit code {code}: {job.log.read_text()[-1500:]}")
        last = job.out / f"checkpoint-{STEPS}"
        if not last.is_dir() or digest_of_tensors(last) != expected:
            wrong.append("the last checkpoint is another one")
        found = {line["fault"] for line in decisions_in(read_metrics(job.out))}
        if fault.decision and fault.decision not in found:
            wrong.append(f"metrics.jsonl has no decision {fault.decision}, only {sorted(found)}")
        if fault.logged not in job.log.read_text():
            wrong.append(f"the log does not say: {fault.logged}")
        deadline = time.monotonic() + 30
        while (left := _processes_of(job)) and time.monotonic() < deadline:
            time.sleep(0.5)
        if left:
            wrong.append(f"processes remain: {left}")
        files = [path for path in (self.directory / "tmp" / job.out.name).rglob("*") if path.is_file()]
        files += [path for path in job.out.glob(".*") if path.name != ".lock"]
        if files:
            wrong.append(f"files remain: {sorted(map(str, files))}")
        return wrong


def digest_of_tensors(checkpoint: Path) -> str:
    """Return a digest of the weights and the optimizer state. trainer_state.json also counts what was left out."""
    digest = hashlib.sha256()
    for path in sorted(checkpoint.glob("*.distcp")):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()


def _processes_of(job: Job) -> list[psutil.Process]:
    return [process for process in psutil.process_iter() if str(job.out) in " ".join(_words_of(process))]


def _words_of(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", nargs="+", choices=FAULTS, default=list(FAULTS))
    parser.add_argument("--seeds", type=int, default=3, help="runs per fault (default: 3)")
    args = parser.parse_args()
    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # the S3 server logs every request
    num_wrong = 0
    with tempfile.TemporaryDirectory() as name:
        trial = Trial(Path(name))
        for fault in args.faults:
            for seed in range(args.seeds):
                begin = time.monotonic()
                try:
                    wrong = trial.run(fault, seed)
                except (AssertionError, subprocess.TimeoutExpired) as error:
                    wrong = [f"{type(error).__name__}: {error}"]
                num_wrong += bool(wrong)
                seconds = time.monotonic() - begin
                print(f"{fault} {seed}: {'; '.join(wrong) or 'equal'} ({seconds:.0f} s)", flush=True)
    sys.exit(min(num_wrong, 1))


if __name__ == "__main__":
    main()
