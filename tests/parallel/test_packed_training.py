"""Test runs that pack rows: layouts against one process, packed against padded, recomputation and resuming."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from swiftlite.data.packing.schedule import schedule
from tests.parallel import parity
from tests.parallel.parity import BOUNDS, CASES, FULL, TP2_SP, Job, Result
from tests.tiers import all_but, selected, some_of

pytestmark = pytest.mark.gloo

SAVED_AT, LAST = 1, 3
QWEN3, MIXTURE = ("qwen3", 2, True), ("glm4_moe", 1, False)
Model = tuple[str, int, bool]
ROWS = {"packing": True, "packing_length": 64}
BALANCED = ROWS | {"sequence_packing_scheduler": "dp_balanced"}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    **{name: (CASES[name].num_processes, CASES[name].options) for name in ("PP2", "CP2", "DP2", "PP2xVPP2", "EP2")},
    "TP2+SP": (2, TP2_SP),
    "PP3 MTP middle": (3, CASES["PP3 MTP middle"].options),
    "PP2xCP2": (4, {"pipeline_model_parallel_size": 2, "context_parallel_size": 2}),
}
# By model and layout, under the scheduler: micro-batches then differ in length, and their number from step to step.
CHOSEN = {
    QWEN3: ("CP2", "DP2", "TP2+SP", "PP2xVPP2", "PP3 MTP middle", "PP2xCP2"),
    MIXTURE: ("EP2", "PP2"),
}
# The exchanges of these layouts are those of other ones here or, without packing, of test_parity.py.
SLOW = [(QWEN3, name) for name in ("TP2+SP", "PP2xVPP2", "PP3 MTP middle", "PP2xCP2")] + [(MIXTURE, "PP2")]
RESUMED = ("DP2",)
RECOMPUTE = {"block 1": FULL["block 1"], "selective": {"recompute_granularity": "selective"}}
RECOMPUTED: dict[Model, tuple[str, ...]] = {QWEN3: ("CP2",), MIXTURE: ("PP2",)}


@dataclass
class Computed:
    models: dict[Model, Path]
    results: dict[tuple[Model, str], Result]

    def differences(self, model: Model, one: str, other: str) -> dict[str, float]:
        source = load_file(self.models[model] / "model.safetensors")
        return parity.compare(self.results[model, one], self.results[model, other], source)


@pytest.fixture(scope="module")
def computed(request, tmp_path_factory) -> Computed:
    root = tmp_path_factory.mktemp("packed")
    models = {model: parity.make_model(root / "-".join(map(str, model)), *model) for model in CHOSEN}
    jobs: dict[int, dict[tuple[Model, str], Job]] = {}

    def add(
        num_processes: int,
        model: Model,
        name: str,
        options: dict[str, Any],
        first: int = 1,
        last: int = LAST,
        **more: Any,
    ) -> Job:
        out_dir = root / "runs" / "-".join(map(str, (*model, name)))
        job = Job(models[model], out_dir, options, (first, last), **more)
        jobs.setdefault(num_processes, {})[model, name] = job
        return job

    for model in CHOSEN:
        add(1, model, "padded", {})
        add(1, model, "padding_free", {"padding_free": True, "micro_batch_size": 4})
        add(1, model, "balanced", BALANCED)
    resumed = [(QWEN3, layout) for layout in RESUMED]
    for model, layout in dict.fromkeys([*selected(request, "model", "layout"), *resumed]):
        if layout in LAYOUTS:
            num_processes, options = LAYOUTS[layout]
            add(num_processes, model, layout, BALANCED | options)
    add(1, QWEN3, "rows", ROWS)
    add(2, QWEN3, "rows DP2", ROWS | LAYOUTS["DP2"][1])
    for model, layout, name in selected(request, "model", "layout", "name"):
        num_processes, options = LAYOUTS.get(layout, (1, {}))
        add(num_processes, model, f"{layout} {name}", BALANCED | options | RECOMPUTE[name])
    for layout in RESUMED:
        num_processes, options = LAYOUTS[layout]
        stopped = add(num_processes, QWEN3, f"{layout} stopped", BALANCED | options, last=SAVED_AT, save=True)
        add(  # computed after it: in order, in the same start of processes
            num_processes,
            QWEN3,
            f"{layout} resumed",
            BALANCED | options,
            first=SAVED_AT + 1,
            resume=stopped.out_dir / f"checkpoint-{SAVED_AT}",
        )
    return Computed(models, parity.run_each(jobs))


def assert_within(differences: dict[str, float]) -> None:
    assert [name for name, bound in BOUNDS.items() if not differences[name] <= bound] == [], differences


@pytest.mark.parametrize("name", ["padding_free", "balanced"])
@pytest.mark.parametrize("model", CHOSEN)
def test_packed_is_padded(computed, model, name):
    """Each step has the same samples, however they are packed."""
    assert_within(computed.differences(model, "padded", name))


def test_steps_have_other_numbers_of_micro_batches():
    lengths = [len(sample) for sample in parity.make_samples(128)]
    steps = [lengths[start : start + 8] for start in range(0, len(lengths), 8)]
    assert len({schedule(step, ROWS["packing_length"], 1).num_micro_batches for step in steps}) > 1


@pytest.mark.parametrize(
    ("model", "layout"), all_but([(model, layout) for model in CHOSEN for layout in CHOSEN[model]], *SLOW)
)
def test_every_layout_computes_what_one_process_does(computed, model, layout):
    assert_within(computed.differences(model, "balanced", layout))


def test_rows_are_the_same_on_two_ranks(computed):
    assert_within(computed.differences(QWEN3, "rows", "rows DP2"))
    assert computed.results[QWEN3, "rows"].metrics[0] != computed.results[QWEN3, "balanced"].metrics[0]


@pytest.mark.parametrize("name", some_of(RECOMPUTE, "block 1"))  # test_packing.py has both in one process
@pytest.mark.parametrize(
    ("model", "layout"), all_but([(model, layout) for model in RECOMPUTED for layout in RECOMPUTED[model]], *SLOW[-1:])
)
def test_recomputing_changes_no_bit(computed, model, layout, name):
    assert set(computed.differences(model, layout, f"{layout} {name}").values()) == {0.0}


@pytest.mark.parametrize("layout", RESUMED)
def test_a_resumed_run_goes_on_bit_for_bit(computed, layout):
    whole, resumed = computed.results[QWEN3, layout], computed.results[QWEN3, f"{layout} resumed"]
    assert resumed.metrics == whole.metrics[SAVED_AT:]
    assert whole.weights.keys() == resumed.weights.keys()
    assert all(torch.equal(resumed.weights[name], tensor) for name, tensor in whole.weights.items())
