"""Test profiles and times on CUDA."""

import gzip
import json
import pickle
import time

import pytest
import torch

from swiftlite.args.fields import ProfilingArgs
from swiftlite.train.metrics.step_clock import StepClock
from swiftlite.train.profiling import Profiler, make_profiler

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


def multiply() -> torch.Tensor:
    matrix = torch.randn(2048, 2048, device="cuda")
    return matrix @ matrix


def profiled(directory, kind) -> Profiler:
    args = ProfilingArgs(profile_steps=[1, 2], profile_kind=kind)
    profiler = make_profiler(args, directory, 0, is_cuda=True)
    for step in (1, 2):
        profiler.before(step)
        multiply()
        torch.cuda.synchronize()
        profiler.after(step)
    return profiler


def test_a_trace_has_kernels(tmp_path):
    profiled(tmp_path, "torch")
    with gzip.open(tmp_path / "profile/steps-1-2-rank-0.trace.json.gz") as file:
        events = json.load(file)["traceEvents"]
    assert [event for event in events if event.get("cat") == "kernel"]
    table = json.loads((tmp_path / "profile/steps-1-2-rank-0.operators.json").read_text())
    assert table["device"] == "cuda"
    slowest = table["operators"][0]
    assert slowest["milliseconds"] > 0
    assert 0 < slowest["share"] <= 1


def test_a_snapshot_has_the_allocations(tmp_path):
    profiled(tmp_path, "memory")
    snapshot = pickle.loads((tmp_path / "profile/steps-1-2-rank-0.memory.pickle").read_bytes())
    assert sum(map(len, snapshot["device_traces"])) > 0
    assert [entry for trace in snapshot["device_traces"] for entry in trace if entry["size"] == 4 * 2048 * 2048]


def test_the_range_for_nsys_begins_and_ends(tmp_path):
    profiler = profiled(tmp_path, "nsys")
    assert profiler.recorder is None  # it has stopped
    assert list((tmp_path / "profile").iterdir()) == []  # nsys writes the file


def test_times_are_those_of_the_stream():
    clock = StepClock(is_cuda=True)
    multiply()
    torch.cuda.synchronize()
    start = time.perf_counter()
    with clock.part("data"):
        time.sleep(0.1)  # nothing is queued, so the events are recorded at once
    with clock.part("forward"):
        for _ in range(50):
            multiply()
    queued = time.perf_counter() - start
    torch.cuda.synchronize()
    whole = time.perf_counter() - start
    clock.finish_step(whole)
    assert clock.times["data"] >= 0.1
    assert 0 < clock.times["forward"] <= whole - 0.1
    assert queued <= whole
