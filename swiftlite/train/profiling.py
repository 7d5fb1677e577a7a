"""Profile the steps of `--profile_steps`, on the ranks of `--profile_ranks`."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch.autograd import DeviceType  # pyright: ignore[reportPrivateImportUsage]
from torch.autograd.profiler import emit_nvtx
from torch.profiler import ProfilerActivity, profile

from swiftlite.args.fields import ProfilingArgs
from swiftlite.base.atomic import atomic_write, sync
from swiftlite.base.errors import reason_of
from swiftlite.base.log import logger
from swiftlite.report.profiles import FOLDER, TABLE_SUFFIX

NUM_OPERATORS = 20
"""Number of operators in the table of a profile."""
MAX_MEMORY_EVENTS = 1_000_000
"""Number of newest allocations and deallocations in a snapshot of the memory; an entry takes about 1 KB."""


class Recorder(Protocol):
    """One kind of profile. `start` is called at most once, and `stop` at most once after it."""

    def start(self) -> None: ...

    def stop(self, directory: Path, steps: range, rank: int) -> Path | None:
        """Stop, and write what was recorded.

        Returns:
            The main file; None if another program writes it.
        """
        ...


class TorchRecorder:
    """Records operators, and the kernels of a GPU, with torch's profiler.

    Shapes of inputs are not recorded, because torch would keep references to the inputs.
    """

    def __init__(self, is_cuda: bool):
        activities = [ProfilerActivity.CPU]
        if is_cuda:
            activities.append(ProfilerActivity.CUDA)
        self.is_cuda = is_cuda
        self.profile = profile(activities=activities)

    def start(self) -> None:
        self.profile.start()

    def stop(self, directory: Path, steps: range, rank: int) -> Path:
        self.profile.stop()
        name = _name_of(steps, rank)
        trace = directory / f"{name}.trace.json.gz"  # compressed by torch, because of its suffix
        _write(trace, lambda path: self.profile.export_chrome_trace(str(path)))
        table = {
            "steps": [steps[0], steps[-1]],
            "rank": rank,
            "device": "cuda" if self.is_cuda else "cpu",
            "trace": trace.name,
            "operators": self.slowest(),
        }
        atomic_write(directory / f"{name}{TABLE_SUFFIX}", json.dumps(table, indent=2).encode() + b"\n")
        return trace

    def slowest(self) -> list[dict[str, Any]]:
        """Return the slowest operators of a CPU or kernels of a GPU by their own time, without that of what they call.

        `share` is relative to the sum over all operators or kernels.
        """
        kind = DeviceType.CUDA if self.is_cuda else DeviceType.CPU
        times = []
        for event in self.profile.key_averages():
            if event.device_type == kind and not event.is_user_annotation:
                own_time = event.self_device_time_total if self.is_cuda else event.self_cpu_time_total
                times.append((own_time, event.key, event.count))
        total = sum(own_time for own_time, _, _ in times) or 1.0
        times.sort(reverse=True)
        return [
            {"name": name, "calls": calls, "milliseconds": own_time / 1000, "share": own_time / total}
            for own_time, name, calls in times[:NUM_OPERATORS]
        ]


class MemoryRecorder:
    """Records allocations and deallocations on the GPU with their stack traces."""

    def start(self) -> None:
        torch.cuda.memory._record_memory_history(max_entries=MAX_MEMORY_EVENTS)

    def stop(self, directory: Path, steps: range, rank: int) -> Path:
        path = directory / f"{_name_of(steps, rank)}.memory.pickle"
        try:
            _write(path, lambda temporary: torch.cuda.memory._dump_snapshot(str(temporary)))
        finally:
            torch.cuda.memory._record_memory_history(enabled=None)
        return path


class NsysRecorder:
    """Marks the range that Nsight Systems records, with a name for each operator. Nsight Systems writes the file."""

    def __init__(self):
        self.ranges = emit_nvtx()

    def start(self) -> None:
        torch.cuda.profiler.start()
        self.ranges.__enter__()

    def stop(self, directory: Path, steps: range, rank: int) -> None:
        self.ranges.__exit__(None, None, None)
        torch.cuda.synchronize()  # a step does not wait for its update
        torch.cuda.profiler.stop()


@dataclass
class Profiler:
    """Records consecutive steps of this rank. Without a recorder, nothing is recorded.

    A run that is resumed within the steps records the remaining ones, in files of other names.

    Attributes:
        directory: where the files are written.
        steps: the steps to record.
    """

    directory: Path = Path()
    steps: range = range(0)
    rank: int = 0
    recorder: Recorder | None = None
    _recorded: list[int] = field(default_factory=list)

    def before(self, step: int) -> None:
        """Start to record if `step` is the first recorded step; called before each step."""
        if self.recorder is None or step not in self.steps:
            return
        if not self._recorded:
            try:
                self.directory.mkdir(parents=True, exist_ok=True)
                self.recorder.start()
            except Exception as error:  # of the profiler or the disk
                self.recorder = None
                logger.warning("--profile_steps: no profile: %s", reason_of(error))
        self._recorded.append(step)

    def after(self, step: int) -> None:
        """Write the profile if `step` is the last step to record; called after each step."""
        if self.steps and step == self.steps[-1]:
            self.close()

    def close(self) -> None:
        """Write the steps that are recorded so far, which can end with an incomplete one.

        If they cannot be written, a warning is logged, and training continues.
        """
        if self.recorder is None or not self._recorded:
            return
        recorder, self.recorder = self.recorder, None
        recorded = range(self._recorded[0], self._recorded[-1] + 1)
        logger.info(
            "writing the profile of steps %d to %d, which can take longer than the steps", recorded[0], recorded[-1]
        )
        try:
            path = recorder.stop(self.directory, recorded, self.rank)
        except Exception as error:  # of the profiler or the disk
            logger.warning("--profile_steps: the profile was not written: %s", reason_of(error))
        else:
            logger.info("profile of steps %d to %d: %s", recorded[0], recorded[-1], path or "written by nsys")


def make_profiler(args: ProfilingArgs, output_dir: Path, rank: int, *, is_cuda: bool) -> Profiler:
    """Return the profiler of a rank, which records nothing if the options do not ask for it."""
    if not args.profile_steps or rank not in args.profile_ranks:
        return Profiler()
    recorders: dict[str, Callable[[], Recorder]] = {
        "torch": lambda: TorchRecorder(is_cuda),
        "memory": MemoryRecorder,
        "nsys": NsysRecorder,
    }
    first, last = args.profile_steps
    return Profiler(output_dir / FOLDER, range(first, last + 1), rank, recorders[args.profile_kind]())


def _name_of(steps: range, rank: int) -> str:
    return f"steps-{steps[0]}-{steps[-1]}-rank-{rank}"


def _write(path: Path, write: Callable[[Path], object]) -> None:
    """Let `write` write a file, and give it its name when it is complete."""
    temporary = path.with_name(f".incomplete.{path.name}")  # the suffix selects the format
    try:
        write(temporary)
        sync(temporary)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
