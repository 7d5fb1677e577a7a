"""Test the training of models with indexers (DSA) in parallel layouts against one process."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.parallel import parity
from tests.parallel.parity import CASES, FEW_STEPS, SMALL, Job, Result
from tests.tiers import selected, some_of

pytestmark = pytest.mark.gloo

SIZES: dict[str, Any] = {"index_topk": 6, "index_n_heads": 16}
MODELS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "heads": ("deepseek_v32", 1, SIZES),
    # Layers 1 and 3 use the selections of layers 0 and 2.
    "shared": ("glm_moe_dsa", 0, SIZES | {"index_topk_freq": 2, "index_skip_topk_offset": 1}),
}
MODES: dict[str, dict[str, Any]] = {
    "frozen": {},
    "joint": {"indexer_mode": "joint"},
    "only": {"indexer_mode": "indexer_only"},
}
MODES["heads_only"] = MODES["joint"] | {"mtp_mode": "heads_only", "mtp_loss": "ce"}
RUNS = [
    ("heads", "joint", "TP2+SP"),
    ("heads", "joint", "EP2xTP2"),
    ("heads", "joint", "PP2"),
    ("heads", "joint", "full uniform 2"),
    ("heads", "only", "TP2+SP"),
    ("heads", "only", "PP2"),
    ("heads", "heads_only", "PP2"),
    ("shared", "joint", "CP2xTP2"),
    ("shared", "joint", "PP2"),
    ("shared", "joint", "full uniform 1"),
    ("shared", "joint", "selective"),
    ("shared", "only", "CP2"),
    ("shared", "frozen", "CP2"),  # of some rows, only one of the two ranks has tokens that do not see all others
]


@pytest.fixture(scope="module")
def computed(request, tmp_path_factory) -> tuple[dict[str, Path], dict[tuple[str, str, str], Result]]:
    root = tmp_path_factory.mktemp("sparse")
    chosen = selected(request, "model", "mode", "name")
    models = {}
    for model in {model for model, _, _ in chosen}:
        family, depth, config = MODELS[model]
        models[model] = parity.make_model(root / model, family, depth, tied=not depth, **config)
    jobs: dict[int, dict[tuple[str, str, str], Job]] = {1: {}}
    for model, mode, name in chosen:
        options = SMALL | MODES[mode]
        jobs[1][model, mode, "alone"] = Job(models[model], root / f"{model}-{mode}", options, FEW_STEPS)
        divided = Job(models[model], root / f"{model}-{mode}-{name}", options | CASES[name].options, FEW_STEPS)
        jobs.setdefault(CASES[name].num_processes, {})[model, mode, name] = divided
    return models, parity.run_each(jobs)


@pytest.mark.parametrize(
    ("model", "mode", "name"),
    some_of(RUNS, ("heads", "joint", "TP2+SP"), ("heads", "only", "PP2"), ("shared", "joint", "PP2")),
)
def test_layouts(computed, model, mode, name):
    models, results = computed
    alone, other = results[model, mode, "alone"], results[model, mode, name]
    source = load_file(models[model] / "model.safetensors")
    assert parity.beyond(alone, other, source) == {}
    losses = [[step.get("indexer_loss") for step in result.metrics] for result in (alone, other)]
    assert losses[1] == (losses[0] if mode == "frozen" else pytest.approx(losses[0], rel=1e-5))
    trained = {key for key in source if not torch.equal(source[key], alone.weights[key])}
    if mode == "only":
        assert {".indexer." in key for key in trained} == {True}
    if mode == "heads_only":
        assert {key.startswith("mtp.") or ".layers.4." in key for key in trained} == {True}
    assert any(".indexer." in key for key in trained) == (mode != "frozen") == all(losses[0])
