"""Train for an hour while a random process of the run is killed every half minute, and compare with an uninterrupted
run.

    python -m tests.faults.soak                  # an hour or so on 2 cores
    python -m tests.faults.soak --steps 6000

The run has two ranks, the real launcher and asynchronous saves. One of the launcher, the ranks and their child
processes is killed with kill -9; then the same command is started again with --resume. The script prints which
processes were killed, whether a process remained, whether the last checkpoint is bitwise identical to that of the
uninterrupted run, and how memory and open files of the uninterrupted run grew.
"""

import argparse
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import psutil

from tests.faults.hunt import digest_of_checkpoint, write_model_and_rows

MEAN_SECONDS = 30
"""Mean seconds between two kills, or twice the time of a start if that is longer. Some kills occur during a start."""
SECONDS_TO_END = 60
"""Seconds in which the other processes of a run must end."""
STEPS_A_SAVE = 20


@dataclass
class Growth:
    """The memory and open files of a run's processes while it ran: sums over its ranks, one sample per second."""

    memory: list[int] = field(default_factory=list)
    files: list[int] = field(default_factory=list)

    def add(self, processes: list[psutil.Process]) -> None:
        memory = 0
        files = 0
        for process in processes:
            try:
                memory += process.memory_info().rss
                files += process.num_fds()
            except psutil.NoSuchProcess:
                return
        self.memory.append(memory)
        self.files.append(files)

    def __str__(self) -> str:
        """Compare the third quarter of the run with its last quarter, because caches are filled in the first two
        quarters."""
        return f"bytes {_late(self.memory)}; open files {_late(self.files)}"


def _late(samples: list[int]) -> str:
    quarter = max(len(samples) // 4, 1)
    third, last = median(samples[-2 * quarter : -quarter]), median(samples[-quarter:])
    return f"{third:.4g} then {last:.4g}"


def family(launcher: subprocess.Popen) -> list[psutil.Process]:
    """Return the launcher and all processes that it or its ranks have started."""
    try:
        process = psutil.Process(launcher.pid)
        processes = [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []
    return [process for process in processes if _is_alive(process)]


def _is_alive(process: psutil.Process) -> bool:
    """Return whether a process runs. A zombie, which has ended but was not waited for, does not."""
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def start(command: list[str], directory: Path, log: Path) -> subprocess.Popen:
    environment = os.environ | {"NPROC_PER_NODE": "2", "OMP_NUM_THREADS": "1"}
    with log.open("ab") as out:
        return subprocess.Popen(command, cwd=directory, env=environment, stdout=out, stderr=out, start_new_session=True)


def unbroken(command: list[str], directory: Path) -> tuple[float, Growth]:
    """Run the command; return its seconds, and its memory and open files."""
    begin = time.monotonic()
    growth = Growth()
    launcher = start(command, directory, directory / "unbroken.log")
    while launcher.poll() is None:
        growth.add(family(launcher)[1:3])
        time.sleep(1)
    assert launcher.returncode == 0, (directory / "unbroken.log").read_text()[-3000:]
    return time.monotonic() - begin, growth


def broken(command: list[str], directory: Path, mean_seconds: float, chance: random.Random) -> Iterator[str]:
    """Run the command with --resume until it ends by itself; yield the name of each killed process."""
    while True:
        launcher = start([*command, "--resume"], directory, directory / "broken.log")
        try:
            launcher.wait(chance.uniform(5, 2 * mean_seconds - 5))
        except subprocess.TimeoutExpired:
            yield _kill_one(launcher, chance)
            if launcher.wait():
                continue
        assert launcher.returncode == 0, (directory / "broken.log").read_text()[-3000:]
        return


def _kill_one(launcher: subprocess.Popen, chance: random.Random) -> str:
    """Kill one process of a run, wait until all of them are gone, and return its name."""
    processes = family(launcher)
    if not processes:
        return "nothing: it had just ended"
    number = chance.randrange(len(processes))
    name = ("launcher", "rank 0", "rank 1")[number] if number < 3 else "writer"
    alive = _kill(processes[number], launcher)
    if alive and name == "writer":
        name = "writer that had done its part"  # so the run goes on
        alive = _kill(psutil.Process(launcher.pid), launcher)
    if alive:
        doing = "\n".join(map(str, alive))
        sys.exit(f"{name} was killed, and {SECONDS_TO_END} s later these live:\n{doing}")
    return name


def _kill(victim: psutil.Process, launcher: subprocess.Popen) -> list[psutil.Process]:
    """Kill one process of a run; return the run's processes that are still alive long after."""
    processes = family(launcher)
    with suppress(psutil.NoSuchProcess):  # it ended just now
        victim.kill()
    deadline = time.monotonic() + SECONDS_TO_END
    while alive := [process for process in processes if _is_alive(process)]:
        if time.monotonic() > deadline:
            break
        time.sleep(0.1)
    return alive


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=44_000, help="of the run (default: 44000)")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        model, rows = write_model_and_rows(directory)
        command = [
            *(sys.executable, "-W", "ignore", "-m", "swiftlite", "megatron", "sft"),
            *("--model", model, "--dataset", rows, "--split_dataset_ratio", "0.1", "--torch_dtype", "float32"),
            *("--micro_batch_size", "1", "--global_batch_size", "2", "--lr", "1e-3", "--acceptance_samples", "0"),
            *("--async_save", "true", "--save_steps", str(STEPS_A_SAVE), "--save_total_limit", "2"),
            *("--report_to", "none", "--eval_steps", "100000", "--logging_steps", "10"),
        ]
        start_seconds, _ = unbroken([*command, "--train_iters", "1", "--output_dir", "start"], directory)
        mean_seconds = max(MEAN_SECONDS, 2 * start_seconds)
        print(f"a start takes {start_seconds:.0f} s; a death every {mean_seconds:.0f} s", flush=True)
        command += ["--train_iters", str(args.steps)]
        begin = time.monotonic()
        chance = random.Random(args.seed)
        with ThreadPoolExecutor() as beside:
            reference = beside.submit(unbroken, [*command, "--output_dir", "unbroken"], directory)
            deaths = Counter(broken([*command, "--output_dir", "broken"], directory, mean_seconds, chance))
            took = time.monotonic() - begin
            print(
                f"broken: {took:.0f} s, {deaths.total()} kills ({dict(deaths)}), no process was left over", flush=True
            )
            took, growth = reference.result()
        print(f"unbroken, beside it: {took:.0f} s; {growth}", flush=True)
        last = f"checkpoint-{args.steps}"
        same = digest_of_checkpoint(directory / "unbroken" / last) == digest_of_checkpoint(directory / "broken" / last)
        left = sorted(path.name for path in (directory / "broken").glob(".*"))
        print(f"{last}: {'every bit is that of the unbroken run' if same else 'OTHER BITS'}; left over: {left}")
    sys.exit(0 if same else 1)


if __name__ == "__main__":
    main()
