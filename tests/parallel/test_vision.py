"""Compare layouts with one process for models whose rows have images."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForImageTextToText

from tests.images import Seen, extras_of
from tests.parallel import parity
from tests.parallel.parity import CASES, SMALL, Job, Result, bounds_of
from tests.tiers import all_but, selected, some_of
from tests.tiny import make_tiny_vision_hf, per_expert

pytestmark = pytest.mark.gloo

CHOSEN = {
    "qwen3_5": (
        *("TP2+SP", "CP2", "DP2", "DP2+overlap", "full uniform 1"),
        *("PP2", "PP2xVPP2", "PP2xTP2", "PP2 MTP apart", "PP3 MTP middle"),
    ),
    "qwen3_5_moe": ("EP2", "PP2"),
    "qwen2_5_vl": ("TP2+SP", "PP2"),
    "qwen3_vl_moe": ("TP2+SP", "CP2", "EP2", "PP2"),
    "qwen3_vl": ("TP2", "TP2+SP", "CP2", "DP2+overlap", "full uniform 1", "full uniform 2", "PP2", "PP4"),
}
PIPELINED = [("qwen3_5", "PP2"), ("qwen3_vl", "PP2xTP2")]
"""Cases without MTP heads, for which the outputs of the tower are not sent to other stages."""
BATCHED: dict[str, dict[str, Any]] = {
    "PP2 padded": CASES["PP2"].options | {"micro_batch_size": 2},
    "PP2xVPP2 packed": CASES["PP2xVPP2"].options | {"micro_batch_size": 2, "padding_free": True},
}
"""Cases of qwen3_5 with several rows in a micro-batch."""
STEPS = (1, 3)
"""In two steps, some weights of the tower change so little that rounding was 1.2e-3 of the change."""
LEARNING = {"freeze_vit": False, "freeze_aligner": False}
ROWS: list[list[int | str]] = [[5, "0", 6], [2, "1", 3, "2", 4], [9], [7, "2", 3]]
"""With two data-parallel ranks, the last micro-batch of one rank in each step has no image."""


FROZEN: dict[str, tuple[dict[str, Any], set[str]]] = {
    "defaults": ({"freeze_vit": True, "freeze_aligner": True}, {"llm", "heads"}),
    "only aligner": ({"freeze_vit": True, "freeze_llm": True}, {"aligner", "heads"}),
    "heads only": ({"freeze_vit": True, "freeze_aligner": True, "mtp_mode": "heads_only"}, {"heads"}),
}
"""Options, and the parts that are trained with them."""


def part_of(name: str) -> str:
    """Return the part of a model that a tensor in its files belongs to."""
    if name.startswith("mtp."):
        return "heads"
    if "visual." in name:
        return "aligner" if "merger" in name else "vit"
    return "llm"


def make_job(hf_dir: Path, out_dir: Path, **options: Any) -> Job:
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(AutoConfig.from_pretrained(hf_dir))
    rows = [Seen(hf_dir, ROWS[number % len(ROWS)], number) for number in range(SMALL["global_batch_size"] * 3)]
    samples = [row.sample(model) for row in rows]
    options = SMALL | LEARNING | options
    return Job(hf_dir, out_dir, options, STEPS, samples=samples, extras=extras_of(hf_dir))


@pytest.fixture(scope="module")
def computed(request, tmp_path_factory) -> dict[tuple[str, str], Result]:
    root = tmp_path_factory.mktemp("vision")
    needed = {*selected(request, "family", "name"), ("qwen3_5", "alone")}
    jobs: dict[int, dict[tuple[str, str], Job]] = {1: {}, 2: {}, 3: {}, 4: {}}
    chosen = {family: names for family, names in CHOSEN.items() if family in dict(needed)}
    for family, names in chosen.items():
        hf_dir = make_tiny_vision_hf(root / family, family, depth=1, **parity.SIZES)
        jobs[1][family, "alone"] = make_job(hf_dir, root / f"{family} alone")
        for name in names:
            case = CASES[name]
            if (family, name) in needed:
                jobs[case.num_processes][family, name] = make_job(hf_dir, root / f"{family} {name}", **case.options)
        for name, (options, _) in FROZEN.items():
            if (family, name) in needed:
                jobs[1][family, name] = make_job(hf_dir, root / f"{family} {name}", **options)
    for name, options in BATCHED.items():
        if ("qwen3_5", name) not in needed:
            continue
        jobs[2]["qwen3_5", name] = make_job(root / "qwen3_5", root / f"qwen3_5 {name}", **options)
    trunks = selected(request, "trunk", "name")
    for family, name in trunks:
        case = CASES[name]
        hf_dir = make_tiny_vision_hf(root / f"{family} trunk", family, tied=True, **parity.SIZES)
        jobs[1][family, "trunk"] = make_job(hf_dir, root / f"{family} trunk alone")
        job = make_job(hf_dir, root / f"{family} trunk {name}", **case.options)
        jobs[case.num_processes][family, f"trunk {name}"] = job
    results = parity.run_each(jobs)
    sources = {(family, "source"): root / family for family in chosen}
    sources |= {(family, "source of trunk"): root / f"{family} trunk" for family, _ in trunks}
    return {**results, **sources}


LAYOUTS = [(family, name) for family, names in CHOSEN.items() for name in names]
DAILY = (
    *(("qwen3_5", name) for name in ("TP2+SP", "DP2+overlap", "PP2xVPP2 packed")),
    ("qwen3_vl", "CP2"),
)
"""Each kind of layout once, and the towers that write to one or to several layers. Stages of another tower:
PIPELINED."""


@pytest.mark.parametrize(("family", "name"), some_of([*LAYOUTS, *(("qwen3_5", name) for name in BATCHED)], *DAILY))
def test_a_layout_computes_what_one_process_does(computed, family, name):
    source = per_expert(load_file(computed[family, "source"] / "model.safetensors"))
    assert parity.beyond(computed[family, "alone"], computed[family, name], source, bounds_of(family)) == {}


@pytest.mark.parametrize(("trunk", "name"), all_but(PIPELINED, PIPELINED[0]))
def test_pipeline_stages_compute_what_one_process_does(computed, trunk, name):
    """`trunk` is the family."""
    source = load_file(computed[trunk, "source of trunk"] / "model.safetensors")
    one, other = computed[trunk, "trunk"], computed[trunk, f"trunk {name}"]
    assert parity.beyond(one, other, source, bounds_of(trunk)) == {}


@pytest.mark.parametrize(
    ("family", "name"),
    all_but(
        [(family, name) for name in FROZEN for family in CHOSEN],
        *((family, name) for name in FROZEN for family in ("qwen3_5_moe", "qwen2_5_vl", "qwen3_vl_moe")),
        ("qwen3_5", "only aligner"),
        ("qwen3_vl", "heads only"),
    ),
)
def test_frozen_parts_remain_bitwise_identical(computed, family, name):
    source = per_expert(load_file(computed[family, "source"] / "model.safetensors"))
    weights = computed[family, name].weights
    assert weights.keys() == source.keys()
    changed = {key for key in weights if not torch.equal(weights[key], source[key])}
    assert {part_of(key) for key in changed} == FROZEN[name][1]
    assert changed == {key for key in source if part_of(key) in FROZEN[name][1]}


def test_the_tower_is_trained(computed):
    gradients = computed["qwen3_5", "alone"].gradients
    of_tower = [gradient for name, gradient in gradients.items() if "visual" in name]
    assert of_tower
    assert all(gradient.abs().max() > 0 for gradient in of_tower)
