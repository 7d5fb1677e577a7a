"""Test unrolled heads and distillation for every kind of layout against one process."""

import json
import os
import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from torch.multiprocessing.spawn import ProcessRaisedException

from swiftlite.args.commands import SftArgs
from swiftlite.train import record_files
from tests.engines import dflash_reference, eagle3_reference, feature_reference, gemma4_assistant_reference
from tests.messages import naming
from tests.parallel import parity
from tests.parallel.launch import launch
from tests.parallel.parity import BOUNDS, CASES, FEW_STEPS, SMALL, TP2_SP, Job, Result
from tests.parallel.runs import train
from tests.tiers import all_but, selected, some_of
from tests.tiny import make_tiny_hf
from tests.train.cached_states import ENTRY, records

pytestmark = pytest.mark.gloo

UNROLL = {"mtp_unroll": 3}
JOINT = {"mtp_unroll_weights": "joint"}
PACKED = {"padding_free": True, "micro_batch_size": 2}
# Each with its own single process: (family, depth, options).
WAYS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "unroll": ("qwen3", 1, UNROLL),
    "unroll, packed": ("qwen3", 1, UNROLL | PACKED),
    "unroll, latent": ("deepseek_v3", 1, UNROLL),
    "unroll, kl, heads": ("glm4_moe", 1, UNROLL | {"mtp_loss": "kl", "mtp_mode": "heads_only"}),
    "kl": ("qwen3", 2, {"mtp_loss": "kl"}),
    "tv, packed": ("qwen3", 2, {"mtp_loss": "tv"} | PACKED),
    "draft vocabulary": ("qwen3", 2, {"mtp_loss": "kl", "mtp_mode": "heads_only"}),
    "unroll, lk": ("qwen3", 1, UNROLL | {"mtp_loss": "lk_hybrid"}),
    "unroll, joint": ("qwen3", 1, UNROLL | JOINT | {"mtp_loss": "tv"}),
    "unroll, joint, packed": ("qwen3", 1, UNROLL | JOINT | {"mtp_loss": "kl"} | PACKED),
    "eagle3": ("qwen3", 0, UNROLL | {"mtp_mode": "heads_only"}),
    "eagle3, packed": ("qwen3", 0, UNROLL | PACKED | {"mtp_mode": "heads_only"}),
    "features": ("qwen3", 0, UNROLL | {"mtp_mode": "heads_only"}),
    "features, packed": ("qwen3", 0, UNROLL | PACKED | {"mtp_mode": "heads_only", "mtp_loss": "kl"}),
    "dflash": ("qwen3", 0, UNROLL | {"mtp_mode": "heads_only"}),
    "dflash, packed": ("qwen3", 0, UNROLL | PACKED | {"mtp_mode": "heads_only", "mtp_loss": "kl"}),
    "assistant": ("gemma4_text", 0, UNROLL | {"mtp_mode": "heads_only"}),
    "assistant, clusters": ("gemma4_text", 0, UNROLL | PACKED | {"mtp_mode": "heads_only", "mtp_loss": "kl"}),
    "dspark": ("qwen3", 0, UNROLL | {"mtp_mode": "heads_only"}),
    "dspark, packed": (
        *("qwen3", 0),
        UNROLL | PACKED | {"mtp_mode": "heads_only", "mtp_loss": "ce", "drafter_anchors": 0.6},
    ),
}
CHOSEN = {
    "unroll": ("TP2+SP", "PP2", "CP2", "PP2 MTP apart"),
    "unroll, packed": ("CP2",),
    "unroll, latent": ("TP2+SP",),
    "unroll, kl, heads": ("PP2", "PP2 MTP apart"),
    "kl": ("TP2", "DP2"),
    "tv, packed": ("CP2",),
    "draft vocabulary": ("TP2", "PP2"),
    "unroll, lk": ("TP2+SP",),
    "unroll, joint": ("TP2", "CP2"),
    "unroll, joint, packed": ("CP2", "TP2"),
    "eagle3": ("TP2", "TP2+SP", "PP2", "CP2", "DP2", "PP2 MTP apart"),
    "eagle3, packed": ("CP2", "PP2"),
    "features": ("TP2", "TP2+SP", "PP2", "CP2", "DP2", "PP2 MTP apart"),
    "features, packed": ("CP2", "PP2"),
    "dflash": ("TP2", "TP2+SP", "PP2", "CP2", "DP2", "PP2 MTP apart"),
    "dflash, packed": ("TP2+SP", "CP2"),
    "assistant": ("TP2", "TP2+SP", "PP2", "CP2", "DP2"),
    "assistant, clusters": ("TP2", "TP2+SP", "PP2", "CP2", "DP2"),
    "dspark": ("TP2", "TP2+SP", "PP2", "CP2", "DP2"),
    "dspark, packed": ("TP2+SP", "CP2", "DP2"),
}
LAYOUTS = {name: CASES[name].options for name in ("TP2", "PP2", "CP2", "DP2", "PP2 MTP apart")} | {"TP2+SP": TP2_SP}


def add_drafter(directory: Path, way: str) -> None:
    if way.startswith("eagle3"):
        eagle3_reference.add_drafter(directory, "3.1", [0, 2, 3])
    elif way.startswith("features"):
        feature_reference.add_head(directory, "qwen3", [1, 3])
    elif way.startswith("dflash"):
        dflash_reference.add_drafter(directory, [1, 3], layers=2)
    elif way.startswith("assistant"):
        settings = gemma4_assistant_reference.CLUSTERS if "clusters" in way else {}
        gemma4_assistant_reference.add_assistant(directory, **settings)
    elif way.startswith("dspark"):
        dflash_reference.add_drafter(directory, [1, 3], layers=2, rank=8)


@pytest.fixture(scope="module")
def computed(request, tmp_path_factory) -> tuple[dict[str, Path], dict[tuple[str, str], Result]]:
    """Return models by kind, and results by kind and layout; one process is "alone"."""
    root = tmp_path_factory.mktemp("heads")
    models = {}
    pairs = selected(request, "way", "name")
    ways = [way for way in WAYS if way in {*selected(request, "way"), *(way for way, _ in pairs)}]
    for way in ways:
        family, depth, _ = WAYS[way]
        config: dict[str, Any] = {"mtp_draft_vocab": "3-40 77 90-120"} if way == "draft vocabulary" else {}
        models[way] = parity.make_model(root / way, family, depth, **config)
        if not depth:
            add_drafter(models[way], way)
    jobs: dict[int, dict[tuple[str, str], Job]] = {1: {}, 2: {}}
    for way in ways:
        jobs[1][way, "alone"] = Job(models[way], root / way / "alone", SMALL | WAYS[way][2], FEW_STEPS)
    for way, name in pairs:
        jobs[2][way, name] = Job(models[way], root / way / name, SMALL | WAYS[way][2] | LAYOUTS[name], FEW_STEPS)
    return models, parity.run_each(jobs)


@pytest.mark.parametrize(
    ("way", "name"),
    all_but(
        [(way, name) for way, names in CHOSEN.items() for name in names],
        ("unroll", "PP2 MTP apart"),
        ("unroll", "PP2"),
        ("unroll", "TP2+SP"),
        ("unroll", "CP2"),
        ("unroll, latent", "TP2+SP"),
        ("unroll, lk", "TP2+SP"),
        ("unroll, kl, heads", "PP2"),
        ("tv, packed", "CP2"),
        ("kl", "TP2"),
        ("kl", "DP2"),
        ("draft vocabulary", "PP2"),
        ("unroll, joint", "CP2"),
        ("unroll, joint, packed", "CP2"),
        ("unroll, joint, packed", "TP2"),
        ("eagle3", "TP2"),
        ("eagle3", "DP2"),
        ("eagle3", "CP2"),
        ("eagle3", "PP2"),
        ("eagle3", "PP2 MTP apart"),
        ("eagle3, packed", "PP2"),
        ("features", "TP2"),
        ("features", "TP2+SP"),
        ("features", "DP2"),
        ("features", "CP2"),
        ("features", "PP2"),
        ("features, packed", "PP2"),
        ("dflash", "TP2"),
        ("dflash", "DP2"),
        ("dflash", "CP2"),
        ("dflash", "PP2"),
        ("dflash", "PP2 MTP apart"),
        ("assistant", "TP2"),
        ("assistant", "PP2"),
        ("assistant", "CP2"),
        ("assistant", "DP2"),
        ("assistant, clusters", "TP2"),
        ("assistant, clusters", "PP2"),
        ("assistant, clusters", "DP2"),
        ("assistant, clusters", "CP2"),
        ("dspark", "TP2"),
        ("dspark", "DP2"),
        ("dspark", "CP2"),
        ("dspark", "PP2"),
        ("dspark, packed", "TP2+SP"),
        ("dspark, packed", "DP2"),
    ),
)
def test_a_layout_changes_nothing(computed, way, name):
    models, results = computed
    source = load_file(models[way] / "model.safetensors")
    found = parity.compare(results[way, "alone"], results[way, name], source)
    assert [bound for bound in BOUNDS if not found[bound] <= BOUNDS[bound]] == [], found


@pytest.mark.parametrize("way", some_of(WAYS, "unroll", "draft vocabulary"))
def test_every_depth_is_measured(computed, way):
    _, results = computed
    for step in results[way, "alone"].metrics:
        depths = {name for name in step if name.startswith("mtp_")}
        count = 3 if way.startswith(("unroll", "eagle3", "features", "dflash", "dspark", "assistant")) else 2
        assert depths == {f"mtp_{k}_{what}" for k in range(1, count + 1) for what in ("loss", "acceptance")}
        assert all(step[f"mtp_{k}_loss"] > 0.1 for k in range(1, count + 1))


@pytest.mark.parametrize("name", some_of(["TP2+SP", "CP2"], "CP2"))
def test_ranks_read_what_they_have_written(tmp_path, name):
    """The cached states of each layout are bitwise identical, although ranks of other layouts hold
    other parts of them.
    """
    model = parity.make_model(tmp_path / "model", "glm4_moe", 1)
    options = SMALL | UNROLL | {"mtp_loss": "kl", "mtp_mode": "heads_only"} | LAYOUTS[name]
    cache = tmp_path / "cache"
    cache.mkdir()
    cached = options | {"cache_trunk_states": str(cache)}
    jobs = [
        Job(model, tmp_path / str(number), chosen, FEW_STEPS) for number, chosen in enumerate([options, cached, cached])
    ]
    plain, written, read = parity.run(2, jobs)
    assert plain.metrics == written.metrics == read.metrics
    for key, tensor in plain.weights.items():
        assert tensor.equal(written.weights[key])
        assert tensor.equal(read.weights[key])
    assert len({part for part, _ in records(cache)}) == 2


def train_on_a_slow_disk(args: SftArgs) -> int:
    """Train while writes are slow, so that ranks write equal states at the same time."""
    append = record_files._append

    def slow(path: Path, content: bytes) -> int:
        time.sleep(0.02)
        return append(path, content)

    record_files._append = slow  # this process ends with the run
    return train(args)


def options_of_a_cache(directory: Path) -> SftArgs:
    """Return options for rows that occur twice, on both ranks in the same step.

    The last held-out row is next to padding.
    """
    model = make_tiny_hf(directory / "model", "qwen3", depth=1, with_tokenizer=True, num_key_value_heads=2)
    rows = [json.dumps({"query": f"What is {n // 2}?", "response": f"It is {n // 2}."}) for n in range(8)]
    for name, chosen in {"rows": rows, "val": rows[:3]}.items():
        (directory / f"{name}.jsonl").write_text("\n".join(chosen))
    return SftArgs(
        model=str(model),
        dataset=[str(directory / "rows.jsonl")],
        val_dataset=[str(directory / "val.jsonl")],
        output_dir=str(directory / "run"),
        mtp_mode="heads_only",
        torch_dtype="float32",
        micro_batch_size=1,
        global_batch_size=2,
        train_iters=4,
        dataset_shuffle=False,
        acceptance_samples=0,
        report_to=[],
        cache_trunk_states=str(directory / "cache"),
    )


def test_ranks_may_write_the_same_states(tmp_path):
    assert launch(2, train_on_a_slow_disk, options_of_a_cache(tmp_path)) == [0, 0]
    # 4 different rows, and the row of padding.
    assert len(records(tmp_path / "cache")) == 5
    assert len(list((tmp_path / "cache").glob("*"))) == 5  # cache.json, and two files of each rank


def train_with_room_for(free: int, args: SftArgs) -> int:
    shutil.disk_usage = lambda directory: shutil._ntuple_diskusage(10**9, 0, free)  # this process ends with the run
    return train(args)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["TP2+SP", "CP2"])
def test_the_disk_must_have_room_for_what_all_ranks_write(tmp_path, name):
    args = replace(options_of_a_cache(tmp_path), **LAYOUTS[name])
    assert launch(2, train_with_room_for, 10**9, args) == [0, 0]
    cache = tmp_path / "cache"
    written = sum(len(content) + ENTRY for content in records(cache).values())  # each once
    # Of the header of each record a few bytes more are counted than it has.
    for free, fits in {written - 1: False, int(written * 1.02): True}.items():
        other = replace(args, output_dir=str(tmp_path / f"{free}"), cache_trunk_states=str(tmp_path / f"{free} cache"))
        if fits:
            assert launch(2, train_with_room_for, free, other) == [0, 0]
        else:
            with pytest.raises(ProcessRaisedException, match=naming("--cache_trunk_states GB")):
                launch(2, train_with_room_for, free, other)


def train_in(directories: list[str], args: SftArgs) -> int:
    """Train with a different current directory on each rank, as on machines with local disks."""
    os.chdir(directories[int(os.environ["RANK"])])
    return train(args)


def test_an_old_cache_of_another_machine_is_refused(tmp_path):
    args = options_of_a_cache(tmp_path)
    other = make_tiny_hf(tmp_path / "other", "qwen3", depth=1, with_tokenizer=True, num_key_value_heads=2, seed=5)
    machines = [str(tmp_path / name) for name in ("first", "second")]
    for machine in machines:
        Path(machine).mkdir()
    old = replace(args, model=str(other), output_dir=str(tmp_path / "old"), cache_trunk_states="second/cache")
    assert launch(2, train_in, [str(tmp_path)] * 2, old) == [0, 0]
    with pytest.raises(ProcessRaisedException, match=naming("--cache_trunk_states cache machine")):
        launch(2, train_in, machines, replace(args, cache_trunk_states="cache"))
