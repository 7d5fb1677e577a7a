"""Test every kind of run on the emulated GPU, from the command line to the report.

Results are compared with those on the CPU, and slow operations are counted.
"""

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.cuda_emulated import library, worker
from tests.cuda_emulated.kinds import FLOAT32_BOUND, KINDS, STEPS, bound_of, loss_pairs, write_inputs
from tests.cuda_emulated.record import Event
from tests.forked import forkserver, start_swiftlite
from tests.tiers import all_but, selected, some_of
from tests.untimed import untimed

pytestmark = [
    pytest.mark.cuda_emulated,
    pytest.mark.skipif(bool(library.missing()), reason=library.missing() or "there is a compiler"),
]
# Combinations of what other kinds of runs have. `scripts/test.sh cuda_emulated` runs these kinds too.
SLOW = (
    "dense float32",
    "dense, not fused",
    "dense FP8",
    "plain text",
    "packed",
    "padding_free",
    "experts float32",
    "experts packed, balanced",
    "latent",
    "latent packed",
    "latent float32",
    "gated delta",
    "gated delta float32",
    "lora",
    "lora dropout",
    "lora experts",
    "dora",
    "streamed",
    "recomputed",
    "dp_balanced",
    "dpo",
    "dpo float32",
    "rm",
    "gkd",  # "grpo" has a teacher too
    "eagle3.1 packed",
    "features packed",
    "dflash packed",
    "dspark packed",
    "latent lite, biases updated",
    "kto",
    "heads_only",
    "heads_only, drafted tokens",
    "heads_only, fitted",
    "heads_only kl",
    "heads_only kl, not fused",
    "cached trunk states",  # three epochs; "streamed trunk" writes and reads such states too
    "unrolled",
    "unrolled packed",
    "images",
    "recomputed selectively",
    "saved asynchronously",
    "optimizer on the host",
    "optimizer on the host, not distributed",
    "resumed",
)
every_kind = pytest.mark.parametrize("name", all_but(KINDS, *SLOW))
Found = dict[str, Any]


@pytest.fixture(scope="module")
def results(request, tmp_path_factory) -> Callable[[str, str], Found]:
    """Return results(device, kind), for the emulated device and the CPU, and for the kinds that selected tests need.

    All kinds take a minute and a half in three processes on two cores, because the emulated device is as slow as two
    processes. A part of the kinds has one emulated device, because its start takes as long as several kinds. The
    process of the CPU is forked.
    """
    directory = tmp_path_factory.mktemp("kinds")
    needed = {*selected(request, "name"), *LAUNCHES, *(f"{name} 4 layers" for name in LAUNCHES)}
    if "optimizer on the host" in needed:
        needed.add(PLAIN_OPTIMIZER)
    names = [name for name in KINDS if name in needed]
    write_inputs(directory, names, partial(forked_command, directory=directory))
    devices = 2 if len(names) > 30 else 1
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    processes = []
    for first in range(devices):
        words = ["-m", "tests.cuda_emulated.worker", "emulated", directory, *names[first::devices]]
        processes.append(subprocess.Popen([sys.executable, *words], env=environment))
    cpu = forkserver().Process(target=worker.compute_on_cpu, args=(directory, names))
    cpu.start()
    try:
        codes = [process.wait(timeout=900) for process in processes]
        cpu.join(900)
    finally:
        for process in (*processes, cpu):
            process.kill()  # of those that ended this does nothing
    assert {*codes, cpu.exitcode} == {0}
    found = {(path.parent.name, path.stem): json.loads(path.read_text()) for path in directory.glob("results/*/*.json")}
    return lambda device, name: found[device, name]


def forked_command(words: list[str], directory: Path) -> None:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    running = start_swiftlite(words, directory, [environment], directory / "drawn.out", directory / "drawn.err")
    assert running.wait(300) == 0, running.communicate()


@pytest.fixture
def emulated(results) -> Callable[[str], Found]:
    return lambda name: results("emulated", name)


def events_of(found: Found) -> Counter[Event]:
    events: Counter[Event] = Counter()
    for event in found["events"]:
        events[Event(event["kind"], event["operation"], event["region"], event["line"])] = event["count"]
    return events


def listed(events: Mapping[Event, int]) -> list[str]:
    """Return the events as lines for the message of a failed test."""
    return [
        f"{times} x {event.kind}: {event.operation}, {event.region}, {event.line}" for event, times in events.items()
    ]


def chosen(found: Found, choose: Callable[[Event], bool]) -> dict[Event, int]:
    return {event: times for event, times in events_of(found).items() if choose(event)}


def in_a_pass(event: Event) -> bool:
    """Return whether an event is a wait, or a copy for which the host waits, within a micro-batch."""
    return event.kind in ("wait", "unpinned") and event.region in ("layer", "model", "backward")


def at_a_border(event: Event) -> bool:
    return event.kind == "wait" and event.region == "border"


@every_kind
def test_a_run_goes_from_load_to_report(emulated, name):
    found, kind = emulated(name), KINDS[name]
    assert found["codes"] == [0] * (1 + bool(kind.resumed)), found["said"][-3000:]
    assert {"args.json", "metrics.jsonl", "run_report.html"} <= set(found["files"])
    assert any(file.startswith("checkpoint-") for file in found["files"])
    assert found["steps"] >= STEPS


@every_kind
def test_losses_are_the_cpus(results, name):
    ours, theirs = results("emulated", name)["metrics"], results("cpu", name)["metrics"]
    assert len(ours) >= STEPS
    bound = bound_of(KINDS[name])
    for key, loss, expected in loss_pairs(ours, theirs):
        assert loss == pytest.approx(expected, rel=bound, abs=bound), key


PLAIN_OPTIMIZER = "distributed optimizer"


@pytest.mark.parametrize("name", some_of(["optimizer on the host"]))
def test_an_optimizer_on_the_host_computes_the_same(emulated, name):
    """Every bit, because both devices compute with the same kernels here. Half of the steps are those of a resumed
    run.
    """
    ours, plain = emulated(name)["metrics"], emulated(PLAIN_OPTIMIZER)["metrics"]
    assert len(ours) > STEPS
    assert list(map(untimed, ours)) == list(map(untimed, plain))


# In bfloat16 measured up to 1e-2, with experts. With the 1 + weight of Qwen3-Next's norms in bfloat16 it was 7e-2.
FIRST_GRADIENTS = 2e-2


@every_kind
def test_the_first_gradients_are_the_cpus(results, name):
    norms = [results(device, name)["metrics"][0]["grad_norm"] for device in ("emulated", "cpu")]
    assert norms[0] == pytest.approx(norms[1], rel=FLOAT32_BOUND if KINDS[name].is_float32 else FIRST_GRADIENTS)


@every_kind
def test_nothing_that_cuda_refuses(emulated, name):
    """The whole run is checked."""
    assert listed(chosen(emulated(name), lambda event: event.kind in ("mixed", "generator"))) == []


@every_kind
def test_no_double_precision_in_a_step(emulated, name):
    assert listed(chosen(emulated(name), lambda event: event.kind == "float64" and event.region != "")) == []


# Where experts are products of their own, each layer of them asks once how many tokens each has. torch's product for
# all experts takes 16 bits only, and adapters on experts have sizes of their own.
ONE_BY_ONE = ("experts float32", "latent float32", "gated delta float32", "lora experts")


@every_kind
def test_a_pass_through_the_model_waits_for_nothing(emulated, name):
    """In forward and backward passes of layers, heads and losses, the queue of a GPU would not become empty."""
    found = emulated(name)
    events = chosen(found, in_a_pass)
    if name in ONE_BY_ONE:
        experts = "swiftlite/model/layers/experts.py"
        counts = {event: times for event, times in events.items() if event.line.startswith(experts)}
        assert sum(counts.values()) <= NUM_EXPERT_LAYERS * found["micro_batches"], listed(counts)
        events = {event: times for event, times in events.items() if event not in counts}
    assert listed(events) == []


NUM_EXPERT_LAYERS = 3
"""Maximum number of layers with experts: two decoder layers and a head. The first layer of DeepSeek-V3 has no
experts."""
BORDER_WAITS = 1
"""Maximum number of waits of a step outside of passes. It waits for its statistics and gradient norms, but not for the
update. Several data-parallel ranks or pipeline stages also wait for the number of targets of the global batch."""
MORE_WAITS = {
    "grpo": 1,  # log-probabilities of the policy before its update
    "kto": 1,  # the divergence from the reference
    "gkd": 2,  # the teacher's states of each of 2 micro-batches, which are kept by the host
    "streamed": 8,  # rows that ranks exchange
    "cached trunk states": 2,  # in the first of three epochs, the states of each of 4 micro-batches, to be written
    "optimizer on the host": 8,  # the gradients of each tensor
    "optimizer on the host, not distributed": 31,  # the gradients of each tensor
}


@every_kind
def test_a_step_waits_a_stated_number_of_times(emulated, name):
    found = emulated(name)
    waits = chosen(found, at_a_border)
    assert sum(waits.values()) <= (BORDER_WAITS + MORE_WAITS.get(name, 0)) * found["steps"], listed(waits)


@every_kind
def test_copies_to_the_device_are_pinned(emulated, name):
    """Copies between the passes are checked too."""
    copies = chosen(emulated(name), lambda event: event.kind == "unpinned" and event.region == "border")
    assert listed(copies) == []


STREAMING = (
    "swiftlite/model/trunk.py",
    "swiftlite/runtime/transfers.py",
    "swiftlite/runtime/device.py",
    "swiftlite/train/hidden_state_cache.py",
)


@pytest.mark.parametrize("name", some_of(["streamed trunk"]))
def test_a_streamed_trunk_waits_once_per_layer(emulated, name):
    """Before the first step, for all micro-batches of a group together, and no layer is copied from unpinned memory."""
    found = emulated(name)
    before = chosen(found, lambda event: event.region == "" and event.line.startswith(STREAMING))
    waits = {event: times for event, times in before.items() if event.kind == "wait"}
    num_layers = 2
    assert 0 < sum(waits.values()) <= num_layers, listed(waits)
    assert listed({event: times for event, times in before.items() if event.kind == "unpinned"}) == []


def launches_per_layer(emulated: Callable[[str], Found], name: str) -> float:
    """Return the kernel launches per layer and micro-batch, forward and backward.

    The number is the difference between models with 4 and with 2 layers, divided by 2.
    """
    counts = []
    for found in (emulated(name), emulated(f"{name} 4 layers")):
        launches = sum(count for region, count in found["launches"].items() if region != "border")
        counts.append(launches / found["micro_batches"])
    return (counts[1] - counts[0]) / 2


# Operations that would be kernels, of a layer and micro-batch, forward and backward.
LAUNCHES = {"dense": 34, "experts": 80, "lora": 86}


@pytest.mark.parametrize("name", LAUNCHES)
def test_a_layer_launches_no_more_than_stated(emulated, name):
    assert 10 < launches_per_layer(emulated, name) <= LAUNCHES[name]


@pytest.mark.parametrize("name", LAUNCHES)
def test_launches_between_passes_do_not_depend_on_the_number_of_layers(emulated, name):
    """The first step also creates the state of the optimizer."""
    assert emulated(name)["borders"][-1] == emulated(f"{name} 4 layers")["borders"][-1] > 10


def test_the_table(request, emulated, record_property):
    """`scripts/test.sh cuda_emulated` prints this table."""
    printed = table(emulated, [name for name in KINDS if name in selected(request, "name")])
    record_property("table", printed)
    assert "launches of a layer and micro-batch, dense" in printed


def table(emulated: Callable[[str], Found], names: Sequence[str]) -> str:
    """Return a table with waits per step by kind of run, and launches per micro-batch and per layer."""
    lines = [f"{'kind of run':32}{'waits per step':>16}{'of them in passes':>20}{'launches a micro-batch':>25}"]
    for name in names:
        found = emulated(name)
        steps = found["steps"]
        inside = sum(chosen(found, in_a_pass).values())
        waits = inside + sum(chosen(found, at_a_border).values())
        launches = sum(count for region, count in found["launches"].items() if region != "border")
        launches /= found["micro_batches"]
        lines.append(f"{name:32}{waits / steps:16.1f}{inside / steps:20.1f}{launches:25.1f}")
    for name in LAUNCHES:
        lines.append(f"launches of a layer and micro-batch, {name}: {launches_per_layer(emulated, name):.1f}")
    return "\n".join(lines)
