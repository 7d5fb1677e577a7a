"""Test the kernels for GPUs in training with several layouts on a CPU, against one process with local layers.

These are fused kernels, and Transformer Engine's layers with stand-ins for its compiled parts (`tests/te_stand_ins`).
Checkpoints of both kinds of layers are interchanged.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from swiftlite.plan.kernels import Kernels
from tests import te_stand_ins
from tests.parallel import parity
from tests.parallel.launch import launch
from tests.parallel.parity import BOUNDS, CASES, SMALL, TP2_SP, Job, Result
from tests.tiers import selected, some_of

pytestmark = pytest.mark.gloo

FUSED = Kernels(is_fused=True)
GROUPED = Kernels(is_fused=True, has_grouped_experts=True)
TE = Kernels("transformer_engine", is_fused=True, has_grouped_experts=True)
TE_ATTENTION = replace(TE, attention="te")
KL = {"mtp_loss": "kl"}
PACKED = {"padding_free": True, "micro_batch_size": 2}
ALONE: dict[str, Any] = {}
# (model, options of its own) and what is compared with it.
WAYS: dict[str, tuple[str, dict[str, Any], dict[str, tuple[Kernels, dict[str, Any]]]]] = {
    "qwen3": (
        "qwen3",
        {},
        {
            "fused TP2+SP": (FUSED, TP2_SP),
            "fused PP2": (FUSED, CASES["PP2"].options),
            "fused DP2+overlap": (FUSED, CASES["DP2+overlap"].options),
            "TE": (TE, ALONE),
            "TE TP2+SP": (TE, TP2_SP),
            "TE DP2+overlap": (TE, CASES["DP2+overlap"].options),
        },
    ),
    "kl, packed": (
        "qwen3",
        KL | PACKED,
        {
            "fused TP2": (FUSED, CASES["TP2"].options),
            "fused CP2": (FUSED, CASES["CP2"].options),
            "TE": (TE_ATTENTION, ALONE),
        },
    ),
    "tied": (
        "qwen3",
        KL,
        {
            "fused PP2": (FUSED, CASES["PP2"].options),
            "fused DP2+overlap": (FUSED, CASES["DP2+overlap"].options),
            "fused TP2": (FUSED, CASES["TP2"].options),
        },
    ),
    "heads, overlap": (
        "qwen3",
        {"mtp_mode": "heads_only"},
        {"fused DP2+overlap": (FUSED, CASES["DP2+overlap"].options)},
    ),
    "experts": (
        "glm4_moe",
        {},
        {
            "grouped": (GROUPED, ALONE),
            "grouped ETP2xTP2": (GROUPED, CASES["ETP2xTP2"].options),
            "TE EP2": (TE, CASES["EP2"].options),
        },
    ),
    "latent": ("deepseek_v3", {}, {"TE TP2+SP": (TE, TP2_SP)}),
}
COMPARED = [(way, name) for way, (_, _, others) in WAYS.items() for name in others]
DAILY = [
    ("qwen3", "fused TP2+SP"),
    ("qwen3", "fused DP2+overlap"),
    ("tied", "fused PP2"),
    ("tied", "fused DP2+overlap"),
    ("qwen3", "TE TP2+SP"),
    ("kl, packed", "fused CP2"),
    ("kl, packed", "TE"),
    ("experts", "grouped ETP2xTP2"),
    ("experts", "TE EP2"),
]


def needs(name: str) -> None:
    """Skip the test if it requires Transformer Engine's package and the package is not installed."""
    if name.startswith("TE") and (reason := te_stand_ins.missing()):
        pytest.skip(reason)


HALF, LAST = 1, 2
Computed = tuple[dict[str, Path], dict[tuple[str, str], Result]]


@pytest.fixture(scope="module")
def computed(request, tmp_path_factory) -> Computed:
    """Return models by kind, and results by kind and name; one process with local layers is "alone"."""
    root = tmp_path_factory.mktemp("kernels")
    models = {way: parity.make_model(root / way, family, 1, tied=way == "tied") for way, (family, _, _) in WAYS.items()}
    starts: dict[tuple[bool, int], dict[tuple[str, str], Job]] = {
        (False, 1): {},
        (False, 2): {},
        (True, 1): {},
        (True, 2): {},
    }
    chosen = selected(request, "way", "name")
    for way, (_, changed, others) in WAYS.items():
        if way not in dict(chosen) and way != "qwen3":
            continue
        options = SMALL | changed
        starts[False, 1][way, "alone"] = Job(models[way], root / way / "alone", options, (1, LAST))
        for name, (kernels, layout) in others.items():
            if (way, name) not in chosen and (way, name) != ("qwen3", "TE"):
                continue
            job = Job(models[way], root / way / name, options | layout, (1, LAST), kernels=kernels)
            starts[name.startswith("TE"), 1 if layout is ALONE else 2][way, name] = job
    # The first steps with layers of one kind, the others with the other.
    firsts = {name: Job(models["qwen3"], root / name, SMALL, (1, HALF), save=True) for name in ("local", "TE")}
    starts[False, 1]["qwen3", "local, first"] = firsts["local"]
    starts[True, 1]["qwen3", "TE, first"] = replace(firsts["TE"], kernels=TE)
    starts[True, 1]["qwen3", "local, then TE"] = goes_on(firsts["local"], root / "second TE", TE)
    results = {}
    for (is_te, num_processes), queue in starts.items():
        if is_te and te_stand_ins.missing():
            continue
        launcher = te_stand_ins.launch if is_te else launch
        results |= zip(queue, parity.run(num_processes, list(queue.values()), launcher), strict=True)
    if not te_stand_ins.missing():
        job = goes_on(firsts["TE"], root / "second local", Kernels())
        (results["qwen3", "TE, then local"],) = parity.run(1, [job])
    return models, results


def goes_on(first: Job, out_dir: Path, kernels: Kernels) -> Job:
    steps = (HALF + 1, LAST)
    return Job(first.hf_dir, out_dir, SMALL, steps, first.out_dir / f"checkpoint-{HALF}", kernels=kernels)


@pytest.mark.parametrize(("way", "name"), some_of(COMPARED, *DAILY))
def test_kernels_change_roundings_alone(computed, way, name):
    needs(name)
    models, results = computed
    source = load_file(models[way] / "model.safetensors")
    found = parity.compare(results[way, "alone"], results[way, name], source)
    assert [bound for bound in BOUNDS if not found[bound] <= BOUNDS[bound]] == [], found


def test_transformer_engine_s_linear_layers_and_norms_make_the_same_loss_to_the_last_bit(computed):
    needs("TE")
    _, results = computed
    first, ours = (results["qwen3", name].metrics[0] for name in ("alone", "TE"))
    losses = [name for name in first if name.endswith("loss")]
    assert [ours[name] for name in losses] == [first[name] for name in losses]


@pytest.mark.parametrize("name", ["local, then TE", "TE, then local"])
def test_a_checkpoint_goes_on_with_other_layers(computed, name):
    needs("TE")
    _, results = computed
    whole, second = results["qwen3", "alone"].metrics, results["qwen3", name].metrics
    for expected, ours in zip(whole[HALF:], second, strict=True):
        for loss in ("loss", "mtp_1_loss"):
            assert ours[loss] == pytest.approx(expected[loss], rel=BOUNDS["loss"]), loss
